// Draws what the server tells; everything is set as text, so that no name can be markup.
"use strict";
let states = [], asked = false, sort = "key", down = false;
const at = id => document.getElementById(id);
const seconds = value => value === null || value === undefined ? "–" : `${value.toFixed(1)} s`;
const clock = time => new Date(time * 1000).toLocaleTimeString();
const chosen = () => states[Number(at("table").value) || 0];

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

function rows(id, heads, made) {
  const head = document.createElement("tr");
  for (const [name, key, classes] of heads) {
    const one = cell("th", name + (key && key === sort ? (down ? " ↓" : " ↑") : ""), classes || "");
    if (key) {
      one.dataset.sort = key;
      one.addEventListener("click", () => { down = sort === key ? !down : false; sort = key; draw(); });
    }
    head.append(one);
  }
  at(id).replaceChildren(head, ...made);
}

function row(cells, bad) {
  const made = document.createElement("tr");
  if (bad) made.className = "bad";
  made.append(...cells);
  return made;
}

function facts(state) {
  const total = state.total;
  const told = [["leases", total.leases], ["workers", total.workers], ["without owner", total.unowned, total.unowned],
    ["not OK", total.not_ok, total.not_ok], ["lag, most", seconds(total.lag_max)], ["lag, sum", seconds(total.lag_sum)],
    ["moves seen", total.moves], ["finished", total.finished]];
  at("facts").replaceChildren(...told.map(([name, value, bad]) => {
    const box = cell("div", "", bad ? "bad" : "");
    box.append(cell("dt", name), cell("dd", value ?? "–"));
    return box;
  }));
}

async function lag(points) {
  const known = points.map(point => point[1]).filter(most => most !== null);
  at("most").textContent = known.length ? `; the highest here is ${seconds(Math.max(...known))}` : "; no row tells";
  const drawn = await (await fetch(`lag.svg?table=${Number(at("table").value) || 0}`)).text();
  at("lag").replaceChildren(document.importNode(new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement, true));
}

const value = (lease, key) => ({ key: lease.key, owner: lease.owner ?? "", lag: lease.lag.seconds ?? -1, kbps: lease.kbps ?? -1,
  age: lease.lag.age ?? -1, status: -lease.number, idle: lease.idle ?? -1, switches: lease.lag.moves ?? -1, host: lease.lag.host ?? "" })[key];

function leases(state) {
  const wanted = at("filter").value.toLowerCase();
  const shown = state.leases.filter(lease => `${lease.key} ${lease.owner ?? "nobody"} ${lease.status} ${lease.lag.host ?? ""}`.toLowerCase().includes(wanted));
  shown.sort((a, b) => { const x = value(a, sort), y = value(b, sort); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
  rows("leases", [["lease", "key", "name"], ["owner", "owner", "name"], ["status", "status", "name"], ["lag", "lag"], ["end", "", "wide"], ["age", "age", "wide"],
    ["KB/s", "kbps"], ["renewed", "idle", "wide"], ["switches", "switches", "wide"], ["host", "host", "wide name"], ["moving to", "", "wide name"]],
  shown.map(lease => row([
    link(lease.key, `lease=${encodeURIComponent(lease.key)}`),
    lease.owner ? link(lease.owner, `worker=${encodeURIComponent(lease.owner)}`) : cell("td", lease.ended ? "finished" : "nobody", "name"),
    word(lease),
    cell("td", lease.lag.events !== undefined ? `${lease.lag.events} events` : seconds(lease.lag.seconds)),
    cell("td", lease.lag.end ? "yes" : "", "wide good"), cell("td", seconds(lease.lag.age), "wide"), cell("td", lease.kbps ?? "–"),
    cell("td", lease.idle === null ? "–" : `${lease.idle} s ago`, "wide"), cell("td", lease.lag.moves ?? "–", "wide"),
    cell("td", lease.lag.host ?? "", "wide name"), cell("td", lease.heir ?? "", "wide name")], lease.status !== "OK")));
}

function word(lease) {
  const made = cell("td", lease.ended && lease.status === "OK" ? "" : lease.status, lease.status === "OK" ? "name good" : "name");
  made.title = lease.says;
  return made;
}

function draw() {
  const state = chosen();
  if (!state) return;
  const wrong = [state.trouble, ...(state.contradictions || [])].filter(Boolean).join("; ");
  at("state").textContent = wrong || (state.at ? `read ${clock(state.at)}; rules ${state.rules}` : "waiting for the first reading");
  at("state").className = wrong ? "bad" : "";
  at("status").textContent = `${state.status}: ${state.says}`;
  at("status").className = state.status === "OK" ? "good" : "bad";
  facts(state);
  rows("workers", [["worker", "", "name"], ["leases"], ["target"], ["lag"], ["KB/s"]], state.workers.map(worker => row([
    link(worker.worker, `worker=${encodeURIComponent(worker.worker)}`), cell("td", worker.leases), cell("td", worker.target),
    cell("td", seconds(worker.lag)), cell("td", worker.kbps.toFixed(1))], false)));
  rows("moves", [["at", "", "name"], ["lease", "", "name"], ["from", "", "name"], ["to", "", "name"], ["rule"]], state.moves.slice(0, 20).map(
    ([time, key, before, after, rule]) => row([cell("td", clock(time), "name"), link(key, `lease=${encodeURIComponent(key)}`),
      cell("td", before ?? "nobody", "name"), cell("td", after ?? "nobody", "name"), cell("td", rule)], after === null)));
  leases(state);
}

function turn() {
  draw();
  if (chosen()) lag(chosen().lag);
}

async function explain(query) {
  const said = at("said");
  const answer = await (await fetch(`explain?table=${Number(at("table").value) || 0}&${query}`)).json();
  said.replaceChildren();
  const line = (text, kind = "p") => said.append(cell(kind, text));
  if (answer.error) line(answer.error);
  if (answer.lease) {
    line(answer.lease.key, "h2");
    line(`${answer.status}: ${answer.says}`);
    [...answer.past, ...answer.reading].forEach(each => line(each));
    line(`Should have it: ${answer.should}`);
    line(`Would move: ${answer.moves}`);
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
  states = told;
  const table = at("table"), before = table.value;
  table.replaceChildren(...states.map((state, place) => { const made = cell("option", state.store); made.value = place; return made; }));
  table.value = before || "0";
  turn();
  if (!asked && location.hash.length > 1 && chosen().at) { asked = true; explain(location.hash.slice(1)); }
}

at("filter").addEventListener("input", draw);
at("table").addEventListener("change", turn);
at("close").addEventListener("click", () => at("explain").close());
at("explain").addEventListener("close", () => history.replaceState(null, "", "."));
addEventListener("hashchange", () => { if (location.hash.length > 1) explain(location.hash.slice(1)); });
const events = new EventSource("events");
events.onmessage = message => take(JSON.parse(message.data));
events.onerror = () => { at("state").textContent = "the server does not answer; trying again"; at("state").className = "bad"; };
