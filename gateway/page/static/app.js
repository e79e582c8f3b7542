// The page: its two views, and the status that both show.

import { events, request } from "./api.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import * as engine from "./engine.js";
import * as vectors from "./vectors.js";

const RETRY_MS = 1500;
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

let first = "chat"; // the view beside the engine: "chat" or "vectors"

function showView() {
  const isEngine = location.hash === "#engine";
  byId("chat").hidden = isEngine || first !== "chat";
  byId("vectors").hidden = isEngine || first !== "vectors";
  byId("engine").hidden = !isEngine;
  for (const [id, current] of [["to-chat", !isEngine], ["to-engine", isEngine]]) {
    if (current) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  document.title = isEngine ? "Engine – Pagewire" : "Pagewire";
  if (isEngine) engine.redraw();
}

/** Offers embeddings instead of a chat, for a model that does not generate. */
function offerVectors(model) {
  first = "vectors";
  byId("to-chat").textContent = "Embeddings";
  vectors.start(model);
  showView();
}

function showHealth(state, text, detail = "") {
  byId("health").dataset.state = state;
  byId("health").title = detail;
  if (byId("health-text").textContent !== text) byId("health-text").textContent = text;
}

function summary({ ready, reason, services, replicas, sleep }) {
  const lost = services.find(({ state }) => state === "unreachable");
  if (lost) return ["unreachable", `${lost.service[0].toUpperCase()}${lost.service.slice(1)} not reachable`, lost.detail];
  if (ready && sleep.level) return ["serving", "Asleep", sleep.problem || (sleep.wakes_on_request ? "A request wakes the model." : "Requests wait until the model is woken.")];
  if (!ready || !replicas.some(({ attached }) => attached)) return ["not_serving", "Starting", reason];
  return ["serving", "Ready"];
}

/** Waits until the page is visible: a hidden page sends no requests. */
function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

async function watch() {
  for (;;) {
    await visible();
    const controller = new AbortController();
    const hide = () => document.hidden && controller.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      for await (const status of events(await request("v1/status/stream", { signal: controller.signal }))) {
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
    if (!controller.signal.aborted) await sleep(RETRY_MS);
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
    await sleep(2 * RETRY_MS);
  }
}

addEventListener("hashchange", () => {
  document.body.classList.remove("tabbing");
  showView();
});
addEventListener("keydown", ({ key }) => key === "Tab" && document.body.classList.add("tabbing"));
engine.start();
chat.start(offerVectors);
showView();
watch();
