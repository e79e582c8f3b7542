// The page: its views, and the status that all show.

import { events, request } from "./api.js";
import * as chat from "./chat.js";
import { byId, pause, visible } from "./dom.js";
import * as engine from "./engine.js";
import * as models from "./models.js";
import * as vectors from "./vectors.js";

const RETRY_MS = 1500;
const TITLES = { chat: "Pagewire", vectors: "Embeddings – Pagewire", engine: "Engine – Pagewire" };

let offered = ["chat", "engine"];

function showView() {
  const asked = location.hash.slice(1);
  const shown = offered.includes(asked) ? asked : offered[0];
  for (const view of Object.keys(TITLES)) {
    byId(view).hidden = view !== shown;
    if (view === shown) byId(`to-${view}`).setAttribute("aria-current", "page");
    else byId(`to-${view}`).removeAttribute("aria-current");
  }
  document.title = TITLES[shown];
  if (shown === "engine") engine.redraw();
}

/** Offers the views that the models are for: a chat, and embeddings if there are models for them. */
function showModels(listed) {
  const vectorModels = listed.filter((model) => models.embeds(model));
  const hasChat = listed.some((model) => models.chats(model)) || !vectorModels.length;
  byId("to-chat").hidden = !hasChat;
  byId("to-vectors").hidden = !vectorModels.length;
  offered = [...(hasChat ? ["chat"] : []), ...(vectorModels.length ? ["vectors"] : []), "engine"];
  chat.showModels(listed);
  vectors.showModels(vectorModels);
  showView();
}

function showHealth(state, text, detail = "") {
  byId("health").dataset.state = state;
  byId("health").title = detail;
  if (byId("health-text").textContent !== text) byId("health-text").textContent = text;
}

function summary({ ready, reason, services, replicas, sleep }) {
  const lost = services.find(({ state }) => state === "unreachable");
  const model = models.first();
  // Of a model that is not loaded, there are no services.
  if (lost && model?.state === "absent") return model.problem ? ["unreachable", "Not loaded", model.problem] : ["serving", "Not loaded", "The next request loads the model."];
  if (lost && model?.state === "loading") return ["not_serving", "Loading"];
  if (lost) return ["unreachable", `${lost.service[0].toUpperCase()}${lost.service.slice(1)} not reachable`, lost.detail];
  if (ready && sleep.level) return ["serving", "Asleep", sleep.problem || (sleep.wakes_on_request ? "A request wakes the model." : "Requests wait until the model is woken.")];
  if (!ready || !replicas.some(({ attached }) => attached)) return ["not_serving", "Starting", reason];
  return ["serving", "Ready"];
}

async function watch() {
  let wasLost = false;
  for (;;) {
    await visible();
    const controller = new AbortController();
    const hide = () => document.hidden && controller.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const status of events(await request("v1/status/stream", { signal: controller.signal }))) {
        const isLost = status.services.some(({ state }) => state === "unreachable");
        if (isLost && !wasLost) models.refresh();
        wasLost = isLost;
        showHealth(...summary(status));
        engine.show(status);
      }
    } catch (error) {
      if (error.status === 404) return watchReadiness();
      if (!controller.signal.aborted) {
        showHealth("unreachable", "Gateway not reachable");
        engine.showGone();
      }
    }
    document.removeEventListener("visibilitychange", hide);
    if (!controller.signal.aborted) await pause(RETRY_MS);
  }
}

/** Polls readiness if the status is on the port for operators, which this page cannot reach. */
async function watchReadiness() {
  byId("to-engine").hidden = true;
  byId("health").removeAttribute("href");
  for (;;) {
    await visible();
    try {
      await request("readyz");
      showHealth("serving", "Ready");
    } catch (error) {
      if (error.status) showHealth("not_serving", "Starting", error.message);
      else showHealth("unreachable", "Gateway not reachable");
    }
    await pause(2 * RETRY_MS);
  }
}

addEventListener("hashchange", () => {
  document.body.classList.remove("tabbing");
  showView();
});
addEventListener("keydown", ({ key }) => key === "Tab" && document.body.classList.add("tabbing"));
engine.start();
chat.start();
vectors.start();
models.start(showModels);
showView();
watch();
