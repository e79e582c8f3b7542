// Parameters of requests, stored until the tab is closed.

import { byId } from "./dom.js";

const STORED = "pagewire.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS];

function show(open) {
  byId("settings").hidden = !open;
  byId("open-settings").setAttribute("aria-expanded", String(open));
  if (open) byId("system").focus();
  else byId("open-settings").focus();
}

function store() {
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
