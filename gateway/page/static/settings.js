// Parameters of requests, stored until the tab is closed.

import { byId } from "./dom.js";

const STORED = "pagewire.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS];
// What OpenAI's API takes if neither the request nor the model names a value.
const OF_THE_API = { temperature: 1, top_p: 1 };
const SHOWN = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

let defaults = OF_THE_API;

function show(open) {
  byId("settings").hidden = !open;
  byId("open-settings").setAttribute("aria-expanded", String(open));
  if (open) byId("system").focus();
  else byId("open-settings").focus();
}

/** Shows the parameters of the next answer: the user's, else the model's defaults. */
function showUsed() {
  const used = { ...defaults, ...parameters() };
  const listed = SHOWN.filter((name) => used[name] !== undefined).map((name) => `${name.replaceAll("_", " ")} ${used[name]}`);
  byId("sampling").textContent = `Sampling: ${listed.join(", ")}`;
}

/** model: of /v1/models. */
export function showDefaults(model) {
  defaults = { ...OF_THE_API, ...model?.default_sampling_params };
  for (const name of NUMBERS) if (defaults[name] !== undefined) byId(name).placeholder = defaults[name];
  if (model?.default_sampling_source) byId("defaults-source").textContent = ` (${model.default_sampling_source})`;
  showUsed();
}

function store() {
  showUsed();
  sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]))));
}

export function start() {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  for (const name of FIELDS) {
    byId(name).value = stored[name] ?? "";
    byId(name).addEventListener("input", store);
  }
  byId("open-settings").addEventListener("click", () => show(byId("settings").hidden));
  byId("close-settings").addEventListener("click", () => show(false));
  byId("reset-settings").addEventListener("click", () => {
    for (const name of FIELDS) byId(name).value = "";
    store();
  });
  byId("settings").addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      show(false);
    }
  });
}

export const systemPrompt = () => byId("system").value.trim();

/** Parameters of a request; those that are not set are left out. */
export function parameters() {
  const set = NUMBERS.filter((name) => byId(name).value !== "");
  return Object.fromEntries(set.map((name) => [name, byId(name).valueAsNumber]));
}
