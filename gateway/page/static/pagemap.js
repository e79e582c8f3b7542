// The KV blocks of one group of layers as a grid, in the order of their ids.

import { make } from "./dom.js";

// In the order of their numbers in the map's runs, which begin with 1.
export const COUNTS = [
  { name: "free", meaning: "nobody holds it, and nothing in it can be found again" },
  { name: "cached", meaning: "nobody holds it, but a request with the same beginning finds it" },
  { name: "used", meaning: "one request holds it" },
  { name: "shared", meaning: "several requests hold it" },
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

  /** A group of the status, whose map may be missing if it is as before. */
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
    this.#text.textContent = `${counts}. ${size}${shown > 1 ? `, one in ${shown} of them drawn` : ""}.`;
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
    // Cells as large as fit into a third of the width's height.
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
