// Removes from a lock file what has no effect on the installation: requests for funding, and licenses.
const fs = require("node:fs");

const name = "package-lock.json";
const lock = JSON.parse(fs.readFileSync(name));
for (const entry of Object.values(lock.packages)) {
  delete entry.funding;
  delete entry.license;
}
fs.writeFileSync(name, JSON.stringify(lock, null, 2) + "\n");
