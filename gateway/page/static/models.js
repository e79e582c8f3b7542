// The models of the server: what each can do, and what it does now.

import { request } from "./api.js";
import { pause, visible } from "./dom.js";

const SOON_MS = 1000;
const RETRY_MS = 2000; // the services may still be starting
const STATES = { absent: "not loaded", asleep: "asleep", loading: "loading" };
const WAITING = { absent: "Loading", asleep: "Waking", loading: "Loading" };

let models = [];
let changed = () => {};
let polling = null;
const watchers = new Set(); // of models that are awaited

export const areListed = () => models.length > 0;
export const first = () => models[0];
export const named = (id) => models.find((model) => model.id === id);
export const chats = ({ capabilities = ["chat"] }) => capabilities.includes("chat");
export const embeds = ({ capabilities = [] }) => capabilities.some((one) => ["embeddings", "classify", "score", "rerank"].includes(one));

/** The state in a word or two; "" for a model that serves. */
export const stateOf = ({ state, problem }) => (problem ? "failed" : STATES[state] ?? "");

/** What the user has to know before a first request to the model; "" if it serves. */
export function advice({ state, problem, size }) {
  const bytes = size ? ` (${size < 1e9 ? `${Math.round(size / 1e6)} MB` : `${(size / 1e9).toFixed(1)} GB`})` : "";
  if (problem) return `It could not be loaded: ${problem}`;
  if (state === "absent") return `Not loaded${bytes}: the next request loads it.`;
  if (state === "asleep") return "Asleep: the next request wakes it.";
  return state === "loading" ? "Loading: requests wait until it is ready." : "";
}

async function poll() {
  for (;;) {
    await visible();
    try {
      models = (await (await request("v1/models")).json()).data;
    } catch {
      await pause(RETRY_MS);
      continue;
    }
    changed(models);
    for (const watcher of [...watchers]) watcher();
    if (!watchers.size && !models.some(({ state }) => state === "loading")) return;
    await pause(SOON_MS);
  }
}

/** Lists the models again, and goes on as long as one of them loads or is awaited. */
export function refresh() {
  polling ??= poll().finally(() => (polling = null));
}

/** show: called with the models whenever they were listed. */
export function start(show) {
  changed = show;
  refresh();
}

/**
 * Follows a model that a request waits for, unless the request is answered soon. show: called with what it does, in
 * words, or "" once it serves. Returns the function that ends it.
 */
export function follow(id, show) {
  const began = performance.now();
  const watcher = () => {
    const model = named(id);
    const doing = WAITING[model?.state];
    if (!doing) watchers.delete(watcher);
    const seconds = Math.round((performance.now() - began) / 1000);
    show(doing ? `${doing} ${id}${model.progress ? ` (${model.progress})` : ""}, ${seconds} s` : "");
  };
  const timer = setTimeout(() => {
    watchers.add(watcher);
    refresh();
  }, SOON_MS);
  return () => {
    clearTimeout(timer);
    watchers.delete(watcher);
  };
}

/** Fills a picker with the models. Keeps the user's choice; `fits` selects the models that may be chosen. */
export function fill(picker, listed, fits) {
  const chosen = picker.value;
  const options = listed.map((model) => {
    const notes = [fits(model) ? "" : model.capabilities?.join(", ") || "other tasks", stateOf(model)].filter(Boolean).join(", ");
    return { value: model.id, textContent: notes ? `${model.id} (${notes})` : model.id, disabled: !fits(model) };
  });
  while (picker.length > options.length) picker.lastChild.remove();
  while (picker.length < options.length) picker.append(document.createElement("option"));
  options.forEach((option, index) => Object.assign(picker.options[index], option));
  picker.value = (listed.find(({ id }) => id === chosen) ?? listed.find(fits))?.id ?? "";
}
