// Types terms into the search of a built site: node search.mjs SITE < TERMS prints the pages found, as JSON, one line a term.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { runInThisContext } from "node:vm";

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3]; // the messages of the theme's worker
const site = process.argv[2];
const workers = join(site, "assets", "javascripts", "workers");
const script = readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));

let hear;
globalThis.self = globalThis;
globalThis.addEventListener = (_kind, listener) => (hear = listener);
globalThis.document = { currentScript: null };
const answered = (message) =>
  new Promise((answer) => {
    globalThis.postMessage = ({ type, data }) => answer({ type, data });
    hear({ data: message });
  });

runInThisContext(readFileSync(join(workers, script), "utf8"));
const ready = await answered({ type: SETUP, data: { ...index, options: { suggest: false } } });
if (ready.type !== READY) throw new Error("the search did not start");
for (const term of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const { type, data } = await answered({ type: QUERY, data: term });
  if (type !== RESULT) throw new Error(`${term}: no result`);
  console.log(JSON.stringify(data.items.map(([page]) => page.location)));
}
