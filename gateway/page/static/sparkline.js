// A number over the last two minutes.

import { make } from "./dom.js";

const LENGTH = 120;
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [240, 44];

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export class Sparkline {
  #values = []; // null: there was none
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });

  constructor() {
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(this.#area, this.#line);
    this.element = make("div", { class: "sparkline" });
    this.element.append(picture);
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > LENGTH) this.#values.shift();
    this.draw();
  }

  draw() {
    const highest = Math.max(...this.#values, 1e-9) * 1.1;
    const from = LENGTH - this.#values.length;
    let line = "", area = "", start = null;
    const close = () => {
      if (start !== null) area += `V${HEIGHT}H${start}Z`;
      start = null;
    };
    this.#values.forEach((value, index) => {
      if (value === null) return close();
      const x = (((from + index) / (LENGTH - 1)) * WIDTH).toFixed(1);
      const y = (HEIGHT - 1 - (value / highest) * (HEIGHT - 3)).toFixed(1);
      line += `${start === null ? "M" : "L"}${x} ${y}`;
      area += `${start === null ? "M" : "L"}${x} ${y}`;
      start ??= x;
    });
    close();
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", area);
  }
}
