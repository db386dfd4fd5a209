// Elements made from data. Text is only ever set as text: the name of a class may look like HTML.

export const byId = (id) => document.getElementById(id);
export const calm = matchMedia("(prefers-reduced-motion: reduce)");

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const wait = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

export function percent(value) {
  if (value > 0 && value < 0.001) return "< 0.1 %";
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function duration(milliseconds) {
  if (milliseconds >= 1000) return `${(milliseconds / 1000).toPrecision(3)} s`;
  return `${milliseconds >= 100 ? Math.round(milliseconds) : Number(milliseconds.toPrecision(milliseconds >= 10 ? 3 : 2))} ms`;
}

// A range input whose positions are spread evenly over the orders of magnitude.
export class LogSlider {
  constructor(id, words, onInput = () => {}) {
    this.input = byId(id);
    this.output = byId(`${id}-value`);
    this.words = words;
    this.input.addEventListener("input", () => { this.show(); onInput(this.value); });
  }

  range(low, high, value) {
    this.low = low;
    this.high = high;
    this.input.value = Math.round((1000 * Math.log(Math.min(Math.max(value, low), high) / low)) / Math.log(high / low));
    this.show();
  }

  get value() {
    return this.low * (this.high / this.low) ** (this.input.value / 1000);
  }

  show() {
    const text = this.words(this.value);
    this.output.textContent = text;
    this.input.setAttribute("aria-valuetext", text);
  }
}
