// The view of one message.

import { copyButton, make } from "./dom.js";
import { render } from "./markdown.js";

// The largest share of time for rendering Markdown: a long answer is not rendered for each token.
const SHARE_OF_TIME = 0.2;

/** Seconds as short text. */
export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function figures({ tokens, first, rate, stopped, cut }) {
  const parts = [];
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${seconds(first)}`);
  if (stopped) parts.push("stopped");
  if (cut) parts.push("cut off at the token limit");
  return parts.join(" · ");
}

/** Shows `message`: {role, content, reasoning, error, note, figures, waiting}. `actions`: {edit, regenerate}. */
export class MessageView {
  #message;
  #reasoning = make("div", { class: "prose" });
  #fold;
  #content = make("div", { class: "prose" });
  #error = make("p", { class: "error", role: "alert", hidden: true });
  #note = make("p", { class: "note left-out", hidden: true });
  #figures = make("span", { class: "figures" });
  #actions = make("span", { class: "actions" });
  #next = 0;
  #timer = null;

  constructor(message, actions) {
    this.#message = message;
    const isUser = message.role === "user";
    this.#fold = make("details", { class: "reasoning", hidden: true }, make("summary", { textContent: "Reasoning" }), this.#reasoning);
    this.#actions.append(copyButton(() => message.content));
    if (isUser) this.#actions.append(this.#button("Edit", actions.edit));
    else this.#actions.append(this.#button("Regenerate", actions.regenerate));
    const foot = make("div", { class: "message-foot" }, this.#figures, this.#actions);
    this.element = make("li", { class: `message ${message.role}` }, make("span", { class: "hidden", textContent: isUser ? "You" : "Answer" }));
    this.element.append(this.#note, this.#fold, this.#content, this.#error, foot);
    this.show();
  }

  #button(text, action) {
    return make("button", { type: "button", class: "quiet", textContent: text, onclick: action });
  }

  /** Shows new content as soon as there is time. */
  update(shown = () => {}) {
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      const began = performance.now();
      this.show();
      shown();
      this.#next = (performance.now() - began) / SHARE_OF_TIME;
    }, Math.max(16, this.#next));
  }

  show() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const { role, content, reasoning, error, note, isStreaming } = this.#message;
    this.element.setAttribute("aria-busy", String(Boolean(isStreaming)));
    if (role === "user") this.#content.textContent = content;
    else this.#content.replaceChildren(render(content));
    this.#fold.hidden = !reasoning;
    this.#fold.classList.toggle("running", Boolean(isStreaming && !content));
    if (reasoning) this.#reasoning.replaceChildren(render(reasoning));
    this.#note.hidden = !note;
    this.#note.textContent = note ?? "";
    this.#error.hidden = !error;
    this.#error.textContent = error ?? "";
    this.#figures.textContent = this.#message.waiting || (this.#message.figures ? figures(this.#message.figures) : "");
  }

  /** Lets the user edit the text in place; calls `done` with the new text. */
  edit(done) {
    const area = make("textarea", { value: this.#message.content, rows: 3, "aria-label": "Edit message" });
    const close = () => {
      form.replaceWith(this.#content);
      this.#actions.lastChild.focus();
    };
    const save = make("button", { type: "submit", class: "primary", textContent: "Send" });
    const cancel = make("button", { type: "button", class: "quiet", textContent: "Cancel", onclick: close });
    const form = make("form", { class: "edit" }, area, make("div", { class: "composer-row" }, cancel, save));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) done(area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#content.replaceWith(form);
    area.focus();
  }
}
