import { el, svg } from "./dom.js";

const HEIGHT = 200, LEFT = 46, RIGHT = 14, TOP = 12, BOTTOM = 36;

// A line chart as wide as its place, with a fixed number of elements: an update moves the points of lines that exist.
export class LineChart {
  constructor({ label, series, max = 1, ticks = [0, 0.5, 1], format = String, x = "" }) {
    Object.assign(this, { label, series, max, ticks, format, width: 360, shown: [series.map(() => []), [0, 1], ["", ""]] });
    this.lines = series.map(() => svg("polyline", { class: "line" }));
    this.dots = series.map(() => svg("path", { class: "dots" }));
    this.xText = svg("text", { y: HEIGHT - 4, class: "middle axis" }, x);
    this.from = svg("text", { x: LEFT + 4, y: HEIGHT - 20, class: "middle" });
    this.to = svg("text", { y: HEIGHT - 20, class: "middle" });
    this.rules = ticks.map((tick) => svg("path", { class: tick === 0 ? "base" : "grid" }));
    this.element = svg("svg", { class: "chart", height: HEIGHT, role: "img", "aria-label": label },
      ...this.rules, ...ticks.map((tick) => svg("text", { x: LEFT - 8, y: this.y(tick) + 4, class: "end" }, format(tick))),
      this.from, this.to, this.xText,
      ...series.map((each, index) => svg("g", { class: each.css }, this.lines[index], this.dots[index])));
    new ResizeObserver(() => this.fit()).observe(this.element);
  }

  fit() {
    this.width = Math.max(this.element.clientWidth, 200);
    this.xText.setAttribute("x", (LEFT + this.width - RIGHT) / 2);
    this.to.setAttribute("x", this.width - RIGHT - 4);
    this.rules.forEach((rule, index) => rule.setAttribute("d", `M${LEFT},${this.y(this.ticks[index])}H${this.width - RIGHT}`));
    this.update(...this.shown);
  }

  y(value) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.max);
  }

  // `points` has a list of [x, y] per series; `range` is the first and the last x, `ends` their texts.
  update(points, range, ends) {
    this.shown = [points, range, ends];
    const scale = (this.width - LEFT - RIGHT - 8) / Math.max(range[1] - range[0], 1e-9);
    const place = ([x, y]) => `${(LEFT + 4 + (x - range[0]) * scale).toFixed(1)},${this.y(Math.min(Math.max(y, 0), this.max)).toFixed(1)}`;
    const words = points.map((line, index) => {
      const known = line.filter(([, y]) => y != null);
      this.lines[index].setAttribute("points", known.map(place).join(" "));
      this.dots[index].setAttribute("d", known.map((point) => `M${place(point)}h.01`).join(""));
      return known.length ? `${this.series[index].name} ${this.format(known.at(-1)[1])}` : "";
    });
    [this.from.textContent, this.to.textContent] = ends;
    this.element.setAttribute("aria-label", `${this.label}. Now: ${words.filter(Boolean).join(", ") || "nothing yet"}.`);
  }
}

// An image of 16 shades, given as hexadecimal digits.
export function drawPixels(shades, size) {
  const side = Math.sqrt(shades.length);
  const canvas = el("canvas", { width: side, height: side, class: "pixels" });
  canvas.style.width = canvas.style.height = `${size}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(side, side);
  [...shades].forEach((digit, index) => {
    const shade = 255 - 17 * parseInt(digit, 16);
    image.data.set([shade, shade, shade, 255], 4 * index);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}
