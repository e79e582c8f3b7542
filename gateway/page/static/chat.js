// The conversation, with the answer that is being generated.

import { ApiError, events, request } from "./api.js";
import { makeRoom } from "./context.js";
import { byId, make } from "./dom.js";
import { MessageView } from "./message.js";
import * as models from "./models.js";
import * as settings from "./settings.js";

const STORED = "pagewire.messages";
const CHOSEN = "pagewire.model";
const NO_CHAT = "No model of this server can chat.";
const STARTERS = ["Explain paging in three sentences", "Write a haiku about memory", "Merge two sorted lists in Python"];

let messages = [];
let views = [];
let running = null; // the AbortController of the answer that is being generated

function store() {
  const kept = messages.map(({ role, content, reasoning, figures, error, note }) => ({ role, content, reasoning, figures, error, note }));
  sessionStorage.setItem(STORED, JSON.stringify(kept));
}

function isAtEnd() {
  const box = byId("conversation");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function scrollToEnd() {
  const box = byId("conversation");
  box.scrollTop = box.scrollHeight;
}

function add(message) {
  const index = messages.push(message) - 1;
  const view = new MessageView(message, { edit: () => edit(index), regenerate: () => regenerate(index) });
  views.push(view);
  byId("messages").append(view.element);
  byId("empty").hidden = true;
  return view;
}

/** Removes all messages from this one on. */
function truncate(index) {
  for (const view of views.splice(index)) view.element.remove();
  messages.length = index;
  byId("empty").hidden = index > 0;
}

function edit(index) {
  if (running) return;
  views[index].edit((content) => {
    truncate(index);
    say(content);
  });
}

function regenerate(index) {
  if (running) return;
  truncate(index);
  answer();
}

function say(content) {
  if (models.areListed() && !byId("model").value) return;
  add({ role: "user", content });
  answer();
}

/** The body of a request with these messages. `message`, the answer, notes how many are left out. */
async function body(said, message, signal) {
  const model = byId("model").value || undefined;
  const prompt = settings.systemPrompt();
  const system = prompt ? [{ role: "system", content: prompt }] : [];
  const parameters = settings.parameters();
  const { leftOut, limit } = await makeRoom(model, system, said, parameters.max_tokens, signal);
  if (leftOut) message.note = `The model takes ${limit.toLocaleString("en-US")} tokens: the oldest ${leftOut} messages are left out.`;
  return {
    model,
    messages: [...system, ...said.slice(leftOut)],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...parameters,
  };
}

/** Moves lost focus to the prompt, except on touch screens, where that would open a keyboard. */
function keepFocus() {
  const focused = document.activeElement;
  const isLost = focused === document.body || !focused.checkVisibility();
  if (isLost && matchMedia("(hover: hover)").matches) byId("prompt").focus({ preventScroll: true });
}

function setRunning(controller) {
  const isStopFocused = document.activeElement === byId("stop");
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  document.body.classList.toggle("answering", Boolean(controller));
  if (controller || isStopFocused) keepFocus();
}

async function answer() {
  const said = messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "", reasoning: "", figures: {}, isStreaming: true };
  const view = add(message);
  const controller = new AbortController();
  setRunning(controller);
  scrollToEnd();
  message.unfollow = models.follow(byId("model").value, (doing) => showWaiting(message, view, doing));
  try {
    const sent = await body(said, message, controller.signal);
    view.show();
    await receive(await send(sent, controller, message), message, view);
  } catch (error) {
    if (controller.signal.aborted) message.figures.stopped = true;
    else message.error = error instanceof ApiError ? error.message : `The connection was lost: ${error.message}`;
  }
  message.isStreaming = false;
  message.unfollow();
  message.waiting = "";
  const follows = isAtEnd();
  view.show();
  if (follows) scrollToEnd();
  setRunning(null);
  store();
  models.refresh();
  byId("announcement").textContent = message.error ? "" : message.figures.stopped ? "Stopped" : ["Answer complete", message.note].filter(Boolean).join(". ");
}

/** Shows what the model of an answer does before it can begin. */
function showWaiting(message, view, doing) {
  if (doing && !message.waiting) byId("announcement").textContent = doing;
  message.waiting = doing;
  view.show();
}

function send(sent, controller, message) {
  message.began = performance.now();
  return request("v1/chat/completions", { body: sent, signal: controller.signal });
}

async function receive(response, message, view) {
  let firstAt = 0;
  for await (const chunk of events(response)) {
    const delta = chunk.choices[0]?.delta ?? {};
    const now = performance.now();
    if (!firstAt && (delta.content || delta.reasoning)) {
      firstAt = now;
      message.unfollow();
      message.waiting = "";
      message.figures.first = (now - message.began) / 1000;
    }
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning ?? "";
    if (chunk.choices[0]?.finish_reason === "length") message.figures.cut = true;
    const tokens = chunk.usage?.completion_tokens;
    if (tokens) message.figures.tokens = tokens;
    if (tokens > 1 && now > firstAt && chunk.choices.length) message.figures.rate = (tokens - 1) / ((now - firstAt) / 1000);
    const follows = isAtEnd();
    view.update(() => follows && scrollToEnd());
  }
}

export function stop() {
  running?.abort();
}

export function newChat() {
  stop();
  truncate(0);
  store();
  byId("prompt").focus();
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 220)}px`;
}

function submit() {
  const prompt = byId("prompt");
  const content = prompt.value.trim();
  if (!content || running) return;
  prompt.value = "";
  fit(prompt);
  say(content);
}

function showAdvice() {
  const model = models.named(byId("model").value);
  byId("empty-model").textContent = model?.id ?? "the model";
  byId("model-state").textContent = model ? models.advice(model) : (models.areListed() ? NO_CHAT : "");
  byId("model-state").classList.toggle("failed", Boolean(model?.problem));
  settings.showDefaults(model);
}

/** listed: of /v1/models. */
export function showModels(listed) {
  const picker = byId("model");
  const isFirst = !picker.length;
  models.fill(picker, listed, models.chats);
  const chosen = listed.find(({ id }) => id === sessionStorage.getItem(CHOSEN));
  if (isFirst && chosen && models.chats(chosen)) picker.value = chosen.id;
  showAdvice();
}

export function start() {
  settings.start();
  for (const text of STARTERS) byId("starters").append(make("button", { type: "button", textContent: text, onclick: () => running || say(text) }));
  for (const message of JSON.parse(sessionStorage.getItem(STORED) ?? "[]")) add(message);
  scrollToEnd();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("prompt").addEventListener("input", (event) => fit(event.target));
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", newChat);
  byId("model").addEventListener("change", () => {
    sessionStorage.setItem(CHOSEN, byId("model").value);
    showAdvice();
  });
  byId("model").addEventListener("focus", models.refresh);
}
