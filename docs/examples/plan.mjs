// Workers in Node: each turn reads the table, asks `leasehold plan` what to do, and does it.
// node plan.mjs leasehold plan      (the words are the command that answers; the table here is an array)
import { spawnSync } from "node:child_process";

const [program, ...words] = process.argv.slice(2);
const table = Array.from({ length: 6 }, (_, n) => ({ key: `shard-${n}`, owner: null, version: "0", idle: null }));

function plan(worker, turn) {
  const question = { leases: table, me: { worker, turn }, config: { rules: "kcl", max_steals: 3 } };
  const result = spawnSync(program, words, { input: JSON.stringify(question), encoding: "utf8" });
  if (result.status !== 0) throw new Error(result.stderr);
  return JSON.parse(result.stdout);
}

// What a store does: write only if the lease still has the version that was read.
function write(key, seen, change) {
  const stored = table.find((lease) => lease.key === key);
  if (stored.version !== seen) return false;
  Object.assign(stored, change, { version: String(Number(stored.version) + 1), idle: 0 });
  return true;
}

function turn(worker, number) {
  const seen = new Map(table.map((lease) => [lease.key, lease.version]));
  for (const { do: verb, key } of plan(worker, number).actions) {
    if (["claim", "steal"].includes(verb)) write(key, seen.get(key), { owner: worker });
    else if (verb === "renew") write(key, seen.get(key), {});
    else if (verb === "release") write(key, seen.get(key), { owner: null });
  }
}

function show() {
  const held = Object.groupBy(table, (lease) => lease.owner);
  console.log(Object.keys(held).sort().map((worker) => `${worker}: ${held[worker].length}`).join(", "));
}

turn("node-a", 0); // alone
show();
turn("node-b", 0); // one more
turn("node-a", 1);
show();
for (const lease of table) if (lease.owner === "node-a") lease.idle = 60; // nobody has renewed them for a minute
turn("node-b", 1);
show();
