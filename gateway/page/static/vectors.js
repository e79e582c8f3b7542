// Vectors of texts, and how close they are; or the scores of a model that classifies.

import { ApiError, request } from "./api.js";
import { byId, copyButton, make } from "./dom.js";
import * as models from "./models.js";

const SHOWN = 8; // numbers of a vector

const norm = (vector) => Math.hypot(...vector);

function similarity(a, b) {
  const product = a.reduce((sum, value, index) => sum + value * b[index], 0);
  return product / (norm(a) * norm(b));
}

function shownVector(vector, title) {
  const values = vector.slice(0, SHOWN).map((value) => value.toFixed(4)).join(", ");
  return make(
    "section", {},
    make("h2", { textContent: title }),
    make("p", { class: "values", textContent: `[${values}${vector.length > SHOWN ? ", …" : ""}]` }),
    make("p", { class: "note" }, `${vector.length} numbers, length ${norm(vector).toFixed(3)} `, copyButton(() => JSON.stringify(vector))),
  );
}

function shownSimilarity(value) {
  const shown = value.toFixed(4);
  return make(
    "section", {},
    make("h2", { textContent: `Similarity ${shown}` }),
    make("meter", { min: 0, max: 1, value: Math.max(0, value), "aria-label": `Similarity ${shown}` }),
    make("p", { class: "note", textContent: "The cosine of the angle between the two vectors: 1 is the same direction." }),
  );
}

async function vectorsOf(model, input) {
  const { data, usage } = await (await request("v1/embeddings", { body: { model, input } })).json();
  const vectors = data.map(({ embedding }) => embedding);
  const parts = vectors.map((vector, index) => shownVector(vector, vectors.length > 1 ? `Vector ${index + 1}` : "Vector"));
  if (vectors.length > 1) parts.unshift(shownSimilarity(similarity(...vectors)));
  return [...parts, make("p", { class: "note", textContent: `${usage.prompt_tokens} tokens` })];
}

async function classesOf(model, input) {
  const { data } = await (await request("v1/classify", { body: { model, input } })).json();
  return data.map(({ label, probs }, index) => make(
    "section", {},
    make("h2", { textContent: data.length > 1 ? `Text ${index + 1}: ${label}` : label }),
    make("p", { class: "values", textContent: probs.map((value) => value.toFixed(4)).join(", ") }),
  ));
}

async function results(model, input) {
  try {
    return await vectorsOf(model, input);
  } catch (error) {
    if (error.status !== 400) throw error;
    return await classesOf(model, input).catch(() => { throw error; });
  }
}

async function submit() {
  const input = [byId("first-text").value, byId("second-text").value].filter((text) => text.trim());
  if (!input.length) return;
  const model = byId("vectors-model").value;
  const result = byId("vectors-result");
  byId("embed").disabled = true;
  const unfollow = models.follow(model, (doing) => doing && result.replaceChildren(make("p", { class: "note", textContent: doing })));
  try {
    result.replaceChildren(...(await results(model, input)));
  } catch (error) {
    const text = error instanceof ApiError ? error.message : `The connection was lost: ${error.message}`;
    result.replaceChildren(make("p", { class: "error", textContent: text }));
  }
  unfollow();
  models.refresh();
  byId("embed").disabled = false;
}

function showAdvice() {
  const model = models.named(byId("vectors-model").value);
  byId("vectors-state").textContent = model ? models.advice(model) : "";
}

/** listed: the models that embed or classify, of /v1/models. */
export function showModels(listed) {
  models.fill(byId("vectors-model"), listed, models.embeds);
  showAdvice();
}

export function start() {
  byId("vectors-model").addEventListener("change", showAdvice);
  byId("vectors-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
}
