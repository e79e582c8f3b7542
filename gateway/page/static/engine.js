// The state of the engine: numbers with their history, the map of KV pages, the services.

import { byId, make } from "./dom.js";
import { seconds } from "./message.js";
import { COUNTS, PageMap } from "./pagemap.js";
import { Sparkline } from "./sparkline.js";

const count = (number) => number.toLocaleString("en-US");
const latency = (value) => (value === null ? "–" : seconds(value));
const STATES = { serving: "Serving", not_serving: "Not ready", unreachable: "Unreachable", unknown: "Unknown" };
const LINE = ["gateway", "tokenizer", "scheduler", "executor"];

// title, value over time, text, text below
const TILES = [
  ["Throughput", (s) => s.throughput.generation_tokens_per_second, (s) => `${s.throughput.generation_tokens_per_second.toFixed(1)} tokens/s`,
    (s) => `${s.throughput.prompt_tokens_per_second.toFixed(0)} prompt tokens/s`],
  ["Requests", (s) => s.requests.running, (s) => `${count(s.requests.running)} running`, (s) => `${count(s.requests.waiting)} waiting`],
  ["Time to first token", (s) => s.latency.time_to_first_token.p50, (s) => latency(s.latency.time_to_first_token.p50),
    (s) => `95th percentile ${latency(s.latency.time_to_first_token.p95)}`],
  ["Between tokens", (s) => s.latency.inter_token.p50, (s) => latency(s.latency.inter_token.p50),
    (s) => `95th percentile ${latency(s.latency.inter_token.p95)}`],
];

const tiles = [];
let maps = []; // by replica, then by group

function makeTiles() {
  for (const [title, value, text, below] of TILES) {
    const figure = make("p", { class: "figure", textContent: "–" });
    const note = make("p", { class: "note", textContent: " " });
    const line = new Sparkline();
    byId("tiles").append(make("article", { class: "tile" }, make("h3", { textContent: title }), figure, note, line.element));
    tiles.push({ value, text, below, figure, note, line });
  }
}

function makeLegend() {
  for (const { name, meaning } of COUNTS) {
    byId("legend").append(make("li", { title: meaning }, make("span", { class: `swatch ${name}` }), name));
  }
}

function duration(value) {
  if (!value) return "–";
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

function showServices({ services, num_gateways: numGateways }) {
  const missing = LINE.filter((name) => !services.some(({ service }) => service === name));
  const unknown = missing.map((service) => ({ service, state: "unknown", address: "", detail: "", pid: 0, uptime_seconds: 0 }));
  byId("services").replaceChildren(...[...services, ...unknown].map((one) => {
    const state = make("td", {}, make("span", { class: "state", "data-state": one.state }, make("span", { class: "dot" }), STATES[one.state]));
    if (one.detail) state.append(make("span", { class: "detail", textContent: one.detail }));
    const cells = [duration(one.uptime_seconds), one.pid || "–", one.address || "–"].map((text) => make("td", { textContent: text }));
    return make("tr", {}, make("th", { scope: "row", textContent: one.service }), state, ...cells);
  }));
  byId("services-note").textContent = `${count(numGateways)} gateway process${numGateways === 1 ? " is" : "es are"} connected; the table shows the one that serves this page.`;
}

function showReplicas({ replicas, sleep }) {
  const shape = JSON.stringify(replicas.map(({ name, address, groups }) => [name, address, groups.length]));
  if (byId("replicas").dataset.shape !== shape) {
    byId("replicas").dataset.shape = shape;
    maps = replicas.map(({ groups }) => groups.map((group, index) => new PageMap(groups.length > 1 ? `Group ${index + 1}` : "")));
    byId("replicas").replaceChildren(...replicas.map((replica, index) =>
      make("article", { class: "replica" }, make("header", {}, make("h3", { textContent: replicas.length > 1 ? replica.name : "Executor" }), make("p", { class: "note" })),
        ...maps[index].map(({ element }) => element))));
    if (!replicas.length) byId("replicas").append(make("p", { class: "note", textContent: "The scheduler does not answer." }));
  }
  replicas.forEach((replica, index) => {
    const { queries, hits } = replica.prefix_cache;
    const found = queries ? `, ${Math.round((100 * hits) / queries)}% of prompt tokens found in the cache` : "";
    const rows = `${count(replica.running)} of ${count(replica.max_num_seqs)} rows in use${found}`;
    const nothing = replica.groups.length ? "" : "; the model keeps no state between steps";
    const goes = replica.leaving ? "; it is leaving and gets no new requests" : "";
    const ends = replica.replacing_weights ? ", which will be replaced when its requests finish" : "";
    const weights = replica.weights_version ? `; weights ${replica.weights_version}${ends}` : "";
    const role = { prefill: "; computes prompts for others", decode: "; continues prompts of others" }[replica.role] ?? "";
    const away = sleep.level ? "Asleep: the memory of the model is free." : `Not connected${processes(replica.ranks)}. Its requests continue when it is back, or on another executor.`;
    byId("replicas").children[index].querySelector(".note").textContent = replica.attached ? rows + role + nothing + weights + processes(replica.ranks) + goes : away;
    replica.groups.forEach((group, place) => maps[index][place].show(group));
  });
}

// The processes of an executor; "" if there is one.
function processes(ranks) {
  if (!ranks.length) return "";
  const stages = new Set(ranks.map(({ stage }) => stage)).size;
  const ready = ranks.filter(({ state }) => state === "ready").length;
  const waits = ranks.map((rank) => rank.wait_seconds).filter((seconds) => seconds !== null);
  const waited = waits.length ? `, which have waited up to ${duration(Math.max(...waits))} for each other` : "";
  return `; ${count(ranks.length)} processes${stages > 1 ? ` in ${count(stages)} stages` : ""}${ready < ranks.length ? `, ${count(ready)} of them ready` : waited}`;
}

export function show(status) {
  for (const tile of tiles) {
    tile.figure.textContent = tile.text(status);
    tile.note.textContent = tile.below(status);
    tile.line.add(tile.value(status));
  }
  byId("engine").classList.remove("stale");
  showReplicas(status);
  showServices(status);
}

/** The gateway does not answer. */
export function showGone() {
  byId("engine").classList.add("stale");
  for (const { line } of tiles) line.add(null);
  showServices({ services: [{ service: "gateway", state: "unreachable", address: "", detail: "It does not answer.", pid: 0, uptime_seconds: 0 }], num_gateways: 0 });
}

/** Draws again, after a change of size or colours, or while the view was hidden. */
export function redraw() {
  for (const { line } of tiles) line.draw();
  for (const map of maps.flat()) map.draw();
}

export function start() {
  makeTiles();
  makeLegend();
  new ResizeObserver(redraw).observe(byId("engine"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
