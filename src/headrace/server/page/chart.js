// A line chart over the last minutes, drawn by hand in SVG.

import { h, svg } from "./dom.js";

const HEIGHT = 168;
const PAD = { left: 46, right: 10, top: 10, bottom: 22 };
const GAP_S = 4;

export class Chart {
  #series;
  #format;
  #whole;
  #span;
  #data = [];
  #width = 0;
  #pointer = null;

  /** `series`: { name, line } each, where `line` is the number of its colour. `format` writes a value in words. `whole`: values have no halves. */
  constructor({ title, note, series, format, span = 120, top = 1, whole = false }) {
    this.#series = series;
    this.#format = format;
    this.#whole = whole;
    this.#span = span;
    this.top = top;
    this.values = series.map(() => h("b", null, "–"));
    this.when = h("small", { class: "when" });
    this.canvas = svg("svg", { role: "img", class: "plot", height: HEIGHT });
    this.empty = h("p", { class: "vacant", hidden: true });
    this.element = h("figure", { class: "card chart" },
      h("figcaption", null, h("h3", null, title), h("small", null, note),
        h("ul", { class: "legend" }, series.map((one, at) => h("li", { class: `line-${one.line}` }, h("i"), `${one.name} `, this.values[at])), h("li", null, this.when))),
      h("div", { class: "frame" }, this.canvas, this.empty));
    this.title = title;
    this.canvas.addEventListener("pointermove", (event) => {
      this.#pointer = event.clientX - this.canvas.getBoundingClientRect().left;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.draw();
    });
    new ResizeObserver(([entry]) => {
      this.#width = entry.contentRect.width;
      this.draw();
    }).observe(this.element);
  }

  set span(value) {
    this.#span = value;
    this.draw();
  }

  /** `data`: for each series a list of [seconds ago (negative), value or null]. `vacant`: what to do to see something. */
  show(data, vacant) {
    this.#data = data;
    const isEmpty = !data.some((points) => points.some(([at, value]) => value !== null && at >= -this.#span));
    this.empty.hidden = !isEmpty;
    this.empty.textContent = vacant;
    this.draw();
  }

  draw() {
    const width = this.#width - 2;
    if (width < 80 || !this.element.isConnected) return;
    const inner = { width: width - PAD.left - PAD.right, height: HEIGHT - PAD.top - PAD.bottom };
    const visible = this.#data.map((points) => points.filter(([at]) => at >= -this.#span));
    const top = niceTop(Math.max(this.top, ...visible.flat().map(([, value]) => value ?? 0)), this.#whole);
    const x = (at) => PAD.left + inner.width * (1 + at / this.#span);
    const y = (value) => PAD.top + inner.height * (1 - value / top);
    const parts = [];
    for (let step = 0; step <= 4; step += 2) {
      const value = (top * step) / 4;
      parts.push(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, this.#format(value)));
    }
    for (const share of [1, 0.5, 0]) {
      const label = share === 0 ? "now" : `−${this.#span * share >= 120 ? `${(this.#span * share) / 60} min` : `${this.#span * share} s`}`;
      parts.push(svg("text", { class: "tick", x: x(-this.#span * share), y: HEIGHT - 6, "text-anchor": share === 1 ? "start" : share === 0 ? "end" : "middle" }, label));
    }
    visible.forEach((points, at) => parts.push(...this.#lines(points, this.#series[at].line, x, y)));
    const time = this.#pointer === null ? 0 : Math.min(0, Math.max(-this.#span, ((this.#pointer - PAD.left) / inner.width - 1) * this.#span));
    if (this.#pointer !== null) parts.push(svg("line", { class: "cross", x1: x(time), x2: x(time), y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    this.canvas.setAttribute("width", width);
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.canvas.replaceChildren(...parts);
    this.#tell(visible, time);
  }

  #tell(visible, time) {
    const found = visible.map((points) => nearest(points, time));
    found.forEach((value, at) => {
      this.values[at].textContent = value === null ? "–" : this.#format(value);
    });
    this.when.textContent = this.#pointer === null ? "" : `${Math.round(-time)} s ago`;
    if (this.#pointer === null) {
      const words = this.#series.map((one, at) => `${one.name} ${this.values[at].textContent}`).join(", ");
      this.canvas.setAttribute("aria-label", `${this.title}, the last ${this.#span} seconds; now ${words}`);
    }
  }

  /** Runs of values without a gap; a lonely one is a dot. */
  #lines(points, line, x, y) {
    const runs = [];
    let run = [];
    let last = null;
    for (const [at, value] of points) {
      if (value === null || (last !== null && at - last > GAP_S)) {
        if (run.length) runs.push(run);
        run = [];
      }
      if (value !== null) run.push([x(at), y(value)]);
      last = at;
    }
    if (run.length) runs.push(run);
    return runs.map((each) =>
      each.length === 1
        ? svg("circle", { class: `dot line-${line}`, cx: each[0][0], cy: each[0][1], r: 2.5 })
        : svg("polyline", { class: `path line-${line}`, points: each.map(([left, down]) => `${left.toFixed(1)},${down.toFixed(1)}`).join(" ") }),
    );
  }
}

function nearest(points, time) {
  let best = null;
  let distance = 3;
  for (const [at, value] of points) {
    if (value !== null && Math.abs(at - time) < distance) [best, distance] = [value, Math.abs(at - time)];
  }
  return best;
}

/** The next of 1, 2, 4, 5, 10 and so on; `whole`: half of it, which has a tick too, is a whole number. */
function niceTop(value, whole) {
  const base = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * base).find((top) => top >= value * 0.999 && (!whole || top % 2 === 0));
}
