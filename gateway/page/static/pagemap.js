// The KV blocks of one group of layers as a grid, in the order of their ids.

import { make } from "./dom.js";

// In the order of the states in the map's runs, from 1.
export const COUNTS = [
  { name: "free", meaning: "not in use, without reusable contents" },
  { name: "cached", meaning: "not in use, but a request with the same prefix reuses it" },
  { name: "used", meaning: "in use by one request" },
  { name: "shared", meaning: "in use by several requests" },
];
const GAP = 1;
const [SMALLEST, LARGEST] = [4, 12];

const count = (number) => number.toLocaleString("en-US");

export class PageMap {
  #canvas = make("canvas", { role: "img" });
  #text = make("p", { class: "note" });
  #runs = [];

  constructor(title) {
    this.element = make("div", { class: "page-map" });
    if (title) this.element.append(make("h4", { textContent: title }));
    this.element.append(this.#canvas, this.#text);
  }

  /** Shows a group of the status. Its map is missing if it has not changed. */
  show(group) {
    const unshared = group.used - group.shared;
    const parts = { free: group.free, cached: group.cached, used: unshared, shared: group.shared };
    const counts = COUNTS.map(({ name }) => `${count(parts[name])} ${name}`).join(", ");
    const kind = group.kind === "state" ? "states" : "pages";
    const window = group.window ? `, a window of ${count(group.window)} tokens` : "";
    const size = `${count(group.blocks)} ${kind} of ${group.block_size} tokens${window}`;
    this.#canvas.setAttribute("aria-label", `${size}: ${counts}`);
    const cells = group.map?.blocks_per_cell;
    if (cells) this.#canvas.dataset.blocksPerCell = cells;
    const shown = Number(this.#canvas.dataset.blocksPerCell ?? 1);
    this.#text.textContent = `${counts}. ${size}${shown > 1 ? `, one in ${shown} is drawn` : ""}.`;
    if (group.map) {
      this.#runs = group.map.runs;
      this.draw();
    }
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || !this.#runs.length) return;
    let total = 0;
    for (let i = 1; i < this.#runs.length; i += 2) total += this.#runs[i];
    // The largest cells with which the map is about a quarter as high as wide.
    const pitch = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt((width * width) / 4 / total))));
    const columns = Math.max(1, Math.floor((width + GAP) / pitch));
    const rows = Math.ceil(total / columns);
    const ratio = devicePixelRatio;
    Object.assign(this.#canvas.style, { width: `${columns * pitch}px`, height: `${rows * pitch}px` });
    this.#canvas.width = Math.round(columns * pitch * ratio);
    this.#canvas.height = Math.round(rows * pitch * ratio);
    const style = getComputedStyle(this.element);
    const colours = COUNTS.map(({ name }) => style.getPropertyValue(`--page-${name}`));
    const context = this.#canvas.getContext("2d");
    context.scale(ratio, ratio);
    let cell = 0;
    for (let i = 0; i < this.#runs.length; i += 2) {
      context.fillStyle = colours[this.#runs[i] - 1];
      for (const end = cell + this.#runs[i + 1]; cell < end; cell++) {
        context.fillRect((cell % columns) * pitch, Math.floor(cell / columns) * pitch, pitch - GAP, pitch - GAP);
      }
    }
  }
}
