// Takes out of a lock file what does not bear on what is installed: who asks for money, and addresses.
const fs = require("node:fs");

const name = "package-lock.json";
const lock = JSON.parse(fs.readFileSync(name));
for (const entry of Object.values(lock.packages)) {
  delete entry.funding;
  delete entry.license;
}
fs.writeFileSync(name, JSON.stringify(lock, null, 2) + "\n");
