// Draws the state that the server sends. Everything is set as text, so that no name can become markup.
"use strict";
const saved = document.getElementById("saved") && JSON.parse(document.getElementById("saved").textContent); // by `--once`
const FIELDS = { lag: "seconds", switches: "moves" };
const FIRST = 25, MORE = 200, NAMES = new Set(["key", "owner", "host"]);
let state = null, asked = false, events = null;
const wanted = { table: 0, sort: "status", down: false, text: "", most: FIRST };
const at = id => document.getElementById(id);
const bound = (value, least) => `${least ? "≥ " : ""}${seconds(value)}`;
const seconds = value => value === null || value === undefined ? "–" : value < 1000 ? `${value.toFixed(1)} s`
  : value < 10_000 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
const clock = time => new Date(time * 1000).toLocaleTimeString([], { hourCycle: "h23" });

function cell(kind, text, classes = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = classes;
  return made;
}

function link(text, query) {
  const made = cell("td", "", "name"), button = cell("button", text, "name");
  button.addEventListener("click", () => { if (location.hash === `#${query}`) explain(query); else location.hash = query; });
  made.append(button);
  return made;
}

// Requests another view. The server sorts and filters, so that a page costs the same for any number of leases.
function open_view(change) {
  Object.assign(wanted, change);
  if (saved) { take(saved_view()); return; }
  const { down, ...rest } = wanted;
  events?.close();
  events = new EventSource(`view?${new URLSearchParams(down ? { ...rest, down: "" } : rest)}`);
  events.onmessage = message => take(JSON.parse(message.data));
  events.onerror = () => { at("state").textContent = "the server does not answer; trying again"; at("state").className = "bad"; };
}

// Selects and sorts the rows of a saved page as the server does; they come with the worst first.
function saved_view() {
  const view = saved.tables[wanted.table].view, of = row => row[FIELDS[wanted.sort] ?? wanted.sort];
  const shown = view.rows.filter(row => `${row.key} ${row.owner ?? "nobody"} ${row.status} ${row.host ?? ""}`.toLowerCase().includes(wanted.text.toLowerCase()));
  if (NAMES.has(wanted.sort)) shown.sort((a, b) => (of(a) ?? "") < (of(b) ?? "") ? -1 : (of(a) ?? "") > (of(b) ?? "") ? 1 : 0);
  else if (wanted.sort !== "status") shown.sort((a, b) => (of(b) ?? 0) - (of(a) ?? 0));
  if (wanted.down) shown.reverse();
  return { ...view, groups: saved.groups, rows: shown.slice(0, wanted.most), found: shown.length };
}

const TITLES = {
  status: "how the lease is read; point at a word for the reason",
  lag: "age of the first record that is read and not handled, or how far the read is behind the tip",
  end: "whether the tip of the shard was reached",
  age: "how long the last record that was handled had been in the stream",
  "KB/s": "throughput of the shard",
  renewed: "time since the lease was last renewed",
  switches: "how often the lease passed from one worker to another",
  host: "the machine of the owner",
  "moving to": "the worker that takes the lease next",
  target: "how many leases the worker should hold",
  rule: "the rule by which the lease was taken",
};

function rows(id, heads, made) {
  const head = document.createElement("tr"), focused = document.activeElement?.dataset.sort;
  for (const [name, key, classes] of heads) {
    const one = cell("th", key ? "" : name, classes || "");
    one.scope = "col";
    if (TITLES[name]) one.title = TITLES[name];
    if (key) {
      const mine = key === wanted.sort, rising = NAMES.has(key) !== wanted.down;
      const button = cell("button", name + (mine ? (rising ? " ↑" : " ↓") : ""), "name");
      one.ariaSort = mine ? (rising ? "ascending" : "descending") : "none";
      button.dataset.sort = key;
      button.addEventListener("click", () => open_view({ sort: key, down: mine && !wanted.down }));
      one.append(button);
    }
    head.append(one);
  }
  const top = document.createElement("thead"), body = document.createElement("tbody");
  top.append(head);
  body.append(...made);
  at(id).replaceChildren(top, body);
  if (focused) at(id).querySelector(`[data-sort="${focused}"]`)?.focus();
}

function row(cells, bad) {
  const made = document.createElement("tr");
  if (bad) made.className = "bad";
  made.append(...cells);
  return made;
}

function facts() {
  const total = state.total;
  const told = [["leases", total.leases], ["workers", total.workers], ["without owner", total.unowned, total.unowned],
    ["not OK", total.not_ok, total.not_ok], ["lag, most", bound(total.lag_max, total.lag_at_least)], ["lag, sum", bound(total.lag_sum, total.lag_at_least)],
    ["moves seen", total.moves], ["finished", total.finished]];
  if (state.swap) told.push(["in FROM", state.swap.there], ["on their way", state.swap.moving], ["in TO", state.swap.gone]);
  at("facts").replaceChildren(...told.map(([name, value, bad]) => {
    const box = cell("div", "", bad ? "bad" : "");
    box.append(cell("dt", name), cell("dd", value ?? "–"));
    return box;
  }));
}

async function curve(id, query) {
  if (saved && query) return;
  const drawn = saved ? saved.tables[wanted.table].lag : await (await fetch(`lag.svg?table=${wanted.table}${query}`)).text();
  at(id).replaceChildren(document.importNode(new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement, true));
}

function leases() {
  rows("leases", [["lease", "key", "name"], ["owner", "owner", "name"], ["status", "status", "whole"], ["lag", "lag"], ["end", "", "wide"], ["age", "age", "wide"],
    ["KB/s", "kbps"], ["renewed", "idle", "wide"], ["switches", "switches", "wide"], ["host", "host", "wide name"], ["moving to", "", "wide name"], ...(state.swap ? [["table", "", "name"]] : [])],
  state.rows.map(lease => row([
    link(lease.key, `lease=${encodeURIComponent(lease.key)}`),
    lease.owner ? link(lease.owner, `worker=${encodeURIComponent(lease.owner)}`) : cell("td", lease.ended ? "finished" : "nobody", "name"),
    word(lease),
    cell("td", lease.events !== undefined ? `${lease.events} events` : bound(lease.seconds, lease.at_least)),
    cell("td", lease.end ? "yes" : "", "wide good"), cell("td", seconds(lease.age), "wide"), cell("td", lease.kbps ?? "–"),
    cell("td", lease.idle === undefined ? "–" : `${lease.idle} s ago`, "wide"), cell("td", lease.moves ?? "–", "wide"),
    cell("td", lease.host ?? "", "wide name"), cell("td", lease.heir ?? "", "wide name"),
    ...(state.swap ? [cell("td", lease.place, "name")] : [])], lease.status !== "OK")));
  const rest = state.found - state.rows.length;
  at("more").hidden = rest <= 0;
  at("more").textContent = `show more (${rest} are not shown)`;
  at("order").textContent = wanted.sort === "status" && !wanted.down ? "the worst first" : `by ${wanted.sort}`;
}

function word(lease) {
  const made = cell("td", lease.ended && lease.status === "OK" ? "" : lease.status, lease.status === "OK" ? "whole good" : "whole");
  if (lease.says) made.title = lease.says;
  return made;
}

function groups() {
  at("groups").hidden = state.groups.length < 2;
  at("groups").replaceChildren(...state.groups.map((group, place) => {
    const one = cell("button", `${group.store} `, "group");
    one.append(cell("span", group.status, group.status === "OK" ? "good" : "bad"));
    one.ariaPressed = place === wanted.table;
    one.title = group.says;
    one.addEventListener("click", () => open_view({ table: place, most: FIRST }));
    return one;
  }));
}

function draw() {
  const swapping = state.swapping || [];
  const wrong = [state.trouble, ...(state.contradictions || []), ...(state.swap ? [] : swapping)].filter(Boolean).join("; ");
  const read = state.at ? [`read ${clock(state.at)}; rules ${state.rules}`, ...swapping].join("; ") : "waiting for the first reading";
  at("state").textContent = `${state.store}: ${wrong || read}`;
  at("state").className = wrong ? "bad" : "";
  at("status").textContent = `${state.status}: ${state.says}`;
  at("status").className = state.status === "OK" ? "good" : "bad";
  groups();
  facts();
  rows("workers", [["worker", "", "name"], ["leases"], ["target"], ["lag"], ["KB/s"], ["even", "", "wide"]], state.workers.map(worker => row([
    link(worker.worker, `worker=${encodeURIComponent(worker.worker)}`), cell("td", worker.leases), cell("td", worker.target),
    cell("td", bound(worker.lag, worker.lag_at_least)), cell("td", worker.kbps.toFixed(1)), cell("td", worker.kbps_target.toFixed(1), "wide")], false)));
  at("others").textContent = state.more_workers ? `the furthest from their target; ${state.more_workers} are not shown` : "";
  rows("moves", [["at", "", "whole"], ["lease", "", "name"], ["from", "", "name"], ["to", "", "name"], ["rule"]], state.moves.map(
    ([time, key, before, after, rule]) => row([cell("td", clock(time), "whole"), link(key, `lease=${encodeURIComponent(key)}`),
      cell("td", before ?? "nobody", "name"), cell("td", after ?? "nobody", "name"), cell("td", rule)], after === null)));
  leases();
  at("most").textContent = state.highest === null ? "; no row tells" : `; the highest here is ${seconds(state.highest)}`;
}

async function explain(query) {
  const said = at("said"), key = new URLSearchParams(query).get("lease");
  const [[kind, name]] = new URLSearchParams(query);
  const answer = saved ? saved.tables[wanted.table][kind]?.[name] ?? { error: "this file does not explain it" }
    : await (await fetch(`explain?table=${wanted.table}&${query}`)).json();
  said.replaceChildren();
  at("strip").replaceChildren();
  const line = (text, kind = "p") => said.append(cell(kind, text));
  if (answer.error) line(answer.error);
  if (answer.lease) {
    line(answer.lease.key, "h2");
    line(`${answer.status}: ${answer.says}`);
    [...answer.past, ...answer.reading].forEach(each => line(each));
    line(`Should have it: ${answer.should}`);
    line(`Would move: ${answer.moves}`);
    curve("strip", `&lease=${encodeURIComponent(key)}`);
  }
  for (const worker of answer.workers ?? []) {
    line(worker.worker, "h2");
    line(`holds ${worker.leases}, share ${worker.share}${worker.ours ? "" : " (another library's: its own rules may differ)"}`);
    worker.actions.forEach(action => line(action.says));
    if (worker.why) line(worker.why);
  }
  for (const [rule, says] of Object.entries(answer.rules ?? {})) line(`${rule}: ${says}`);
  if (!at("explain").open) at("explain").showModal();
}

function take(told) {
  state = told;
  draw();
  if (state.at) curve("lag", "");
  if (!asked && location.hash.length > 1 && state.at) { asked = true; explain(location.hash.slice(1)); }
}

let typed = null;
at("filter").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => open_view({ text: at("filter").value, most: FIRST }), 200);
});
at("more").addEventListener("click", () => open_view({ most: wanted.most + MORE }));
at("close").addEventListener("click", () => at("explain").close());
at("explain").addEventListener("close", () => history.replaceState(null, "", saved ? "#" : "."));
addEventListener("hashchange", () => { if (location.hash.length > 1) explain(location.hash.slice(1)); });
open_view({});
