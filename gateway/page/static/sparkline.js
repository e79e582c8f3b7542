// A number over the last two minutes.

import { make } from "./dom.js";

const [SPAN_S, GAP_S] = [120, 4]; // the time that is shown; a longer gap between numbers breaks the line
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [240, 44];

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export class Sparkline {
  #points = []; // [seconds, number], null: there was none
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });

  constructor() {
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(this.#area, this.#line);
    this.element = make("div", { class: "sparkline" });
    this.element.append(picture);
  }

  add(value) {
    const time = performance.now() / 1000;
    this.#points.push([time, value]);
    while (this.#points[0][0] < time - SPAN_S) this.#points.shift();
    this.draw();
  }

  draw() {
    const highest = Math.max(...this.#points.map(([, value]) => value), 1e-9) * 1.1;
    const until = this.#points.at(-1)?.[0];
    let line = "", area = "", start = null, before = 0;
    const close = () => {
      if (start !== null) area += `V${HEIGHT}H${start}Z`;
      start = null;
    };
    for (const [time, value] of this.#points) {
      if (value === null || time - before > GAP_S) close();
      before = time;
      if (value === null) continue;
      const x = ((1 - (until - time) / SPAN_S) * WIDTH).toFixed(1);
      const y = (HEIGHT - 1 - (value / highest) * (HEIGHT - 3)).toFixed(1);
      line += `${start === null ? "M" : "L"}${x} ${y}`;
      area += `${start === null ? "M" : "L"}${x} ${y}`;
      start ??= x;
    }
    close();
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", area);
  }
}
