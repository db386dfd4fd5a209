import { byId, calm, duration, el, LogSlider, percent, wait } from "./dom.js";
import { drawPixels, LineChart } from "./draw.js";
import { recordedEvents } from "./recorded.js";

const PACE = 550; // milliseconds per exit: a network is faster than the eye
const MOST_BARS = 8;
const REASONS = {
  finished: "all exits were computed", forecast: "the next exit was not expected in time", deadline: "the deadline came",
  exits: "it was limited to these exits", confidence: "it was confident enough", interrupted: "it was interrupted",
};
export const ruleName = (rule) => (/^[a-z]+$/.test(rule) ? rule[0].toUpperCase() + rule.slice(1) : rule);
const LOOKS = ["s0", "s2"];

// One rule's panel: its answer, a bar per class, and its prediction set.
class RulePanel {
  constructor(rule, look) {
    this.answer = el("p", { class: "answer" }, "–");
    this.bars = el("ol", { class: "bars" });
    this.set = el("p", { class: "reading set" });
    this.rows = new Map();
    this.element = el("article", { class: `panel ${look}` }, el("h2", {}, ruleName(rule)), this.answer, this.bars, this.set);
  }

  show(found, order, truth, name) {
    const values = new Map(found.bars);
    const judged = truth == null ? "" : found.label === truth ? " · correct" : " · wrong";
    const words = ` ${percent(values.get(found.label) ?? 0)}${judged}${found.fell_back ? " · fell back" : ""}`;
    this.answer.replaceChildren(name(found.label), el("small", {}, words));
    this.answer.classList.toggle("right", found.label === truth);
    this.answer.classList.toggle("wrong", truth != null && found.label !== truth);
    for (const [label, row] of this.rows) if (!order.includes(label)) { row.line.remove(); this.rows.delete(label); }
    order.forEach((label, index) => {
      if (!this.rows.has(label)) {
        const bar = el("span", { class: "bar" }), number = el("span", { class: "number" });
        const line = el("li", { class: label === truth ? "truth" : "" },
          el("span", { class: "name" }, name(label), label === truth ? el("span", { class: "tag" }, " true class") : null),
          el("span", { class: "track" }, bar), number);
        this.rows.set(label, { line, bar, number });
      }
      const { line, bar, number } = this.rows.get(label), value = values.get(label) ?? 0;
      if (this.bars.children[index] !== line) this.bars.insertBefore(line, this.bars.children[index] ?? null);
      line.classList.toggle("outside", found.set != null && !found.set[1].includes(label));
      bar.style.transform = `scaleX(${value})`;
      number.textContent = percent(value);
    });
    if (!found.set) { this.set.textContent = ""; return; }
    const [size, members] = found.set, more = size > members.length ? ", …" : "";
    this.set.textContent = `Prediction set of ${size}: ${members.map(name).join(", ")}${more}`;
  }
}

export class ThinkView {
  constructor(backend, info) {
    Object.assign(this, { backend, info, sources: new Map(), own: null, run: new AbortController(), worst: 0 });
    this.deadline = new LogSlider("deadline", duration);
    byId("source").addEventListener("change", () => this.pickSource(byId("source").value));
    byId("example").addEventListener("change", () => this.pick(Number(byId("example").value)));
    byId("go").addEventListener("click", () => this.go());
    byId("worse").addEventListener("click", () => this.showWorse());
    byId("image").addEventListener("change", (event) => this.useFile(event.target.files[0]));
    byId("text").addEventListener("input", (event) => this.useText(event.target.value));
    const drop = byId("view-think");
    drop.addEventListener("dragover", (event) => { if (info.images) { event.preventDefault(); byId("drop").classList.add("over"); } });
    drop.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      byId("drop").classList.remove("over");
      if (info.images) this.useFile(event.dataTransfer.files[0]);
    });
  }

  async start() {
    byId("own").hidden = !(this.info.images || this.info.texts);
    byId("image-field").hidden = !this.info.images;
    byId("text-field").hidden = !this.info.texts;
    byId("drop").textContent = `Your own image for the model ${this.info.name}: drop it here, or choose a file`;
    const titles = { digits: "Handwritten digits", images: "Images of this server", cifar100: "CIFAR-100 (recorded, no images)" };
    byId("source").replaceChildren(...this.info.sources.map((id) => el("option", { value: id }, titles[id] ?? id)));
    await this.pickSource(this.info.sources[0]);
  }

  async pickSource(id) {
    if (!this.sources.has(id)) {
      const found = await this.backend.source(id);
      this.sources.set(id, { ...this.info, note: "Answered by this server, now.", ...found });
    }
    this.source = this.sources.get(id);
    this.own = null;
    this.worst = 0;
    byId("source").value = id;
    byId("source-note").textContent = this.source.note;
    byId("example").replaceChildren(...this.source.examples.map((example, index) => el("option", { value: index }, this.exampleName(example))));
    byId("thumbs").replaceChildren(...this.source.examples.map((example, index) => this.thumb(example, index)).filter(Boolean));
    byId("example-field").hidden = this.source.examples.some((example) => example.pixels);
    byId("worse").disabled = !this.worstExamples().length;
    this.pick(0);
  }

  exampleName(example) {
    const label = example.label == null ? "" : this.source.classes[example.label];
    return [example.name ?? `Input ${example.id}`, label].filter(Boolean).join(": ");
  }

  thumb(example, index) {
    if (!example.pixels) return null;
    const button = el("button", { type: "button", "aria-pressed": "false", "aria-label": this.exampleName(example) }, drawPixels(example.pixels, 32));
    button.addEventListener("click", () => this.pick(index));
    return button;
  }

  // Largest drop first.
  worstExamples() {
    return this.source.examples.map((example, index) => ({ index, drop: example.drop })).filter(({ drop }) => drop >= 0.01)
      .sort((one, other) => other.drop - one.drop).map(({ index }) => index);
  }

  async pick(index) {
    this.own = null;
    this.index = index;
    const example = this.source.examples[index];
    byId("example").value = index;
    [...byId("thumbs").children].forEach((button, place) => button.setAttribute("aria-pressed", String(place === index)));
    this.clear();
    if (!example) { byId("preview").replaceChildren(); return; }
    if (example.pixels) byId("preview").replaceChildren(drawPixels(example.pixels, 112));
    else if (example.image) await this.showImage(await this.backend.image(example.id));
    else byId("preview").replaceChildren(el("p", { class: "reading" }, `${this.exampleName(example)}. Only the logits were recorded.`));
  }

  async showImage(blob) {
    const image = el("img", { alt: "the input", class: "photo" });
    image.src = URL.createObjectURL(blob);
    image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
    byId("preview").replaceChildren(image);
  }

  async useFile(file) {
    if (!file) return;
    this.own = { body: file, type: file.type };
    this.clear();
    await this.showImage(file);
  }

  useText(text) {
    this.own = text ? { body: text, type: "text/plain" } : null;
    this.clear();
  }

  async showWorse() {
    const worst = this.worstExamples();
    await this.pick(worst[this.worst % worst.length]);
    this.worst += 1;
    this.deadline.range(this.deadline.low, this.deadline.high, this.deadline.high);
    await this.go();
  }

  // The deadlines that make a difference to the model that runs: the recorded one, or the server's.
  fitDeadline() {
    const recorded = this.source.recorded && !this.own, times = (recorded ? this.source : this.info).milliseconds, last = times.at(-1);
    if (this.fitted === times) return;
    this.fitted = times;
    this.deadline.range(times[0] / 2, recorded ? 3 * last : Math.min(Math.max(40 * last, 50), this.info.longest_ms), Infinity);
  }

  clear() {
    this.run.abort();
    this.fitDeadline();
    this.events = [];
    this.rules = this.own ? this.info.rules : this.source.rules;
    this.classes = this.own ? this.info.classes : this.source.classes;
    this.truth = this.own ? null : this.source.examples[this.index]?.label ?? null;
    this.panels = this.rules.map((rule, index) => new RulePanel(rule, LOOKS[this.rules.length === 1 ? 1 : index]));
    byId("rules").replaceChildren(...this.panels.map((panel) => panel.element));
    this.chart = new LineChart({
      label: "Probability at each exit", format: percent, x: "exit",
      series: this.rules.map((rule, index) => ({ name: ruleName(rule), css: LOOKS[this.rules.length === 1 ? 1 : index] })),
    });
    byId("trajectory").replaceChildren(
      el("ul", { class: "legend" }, ...this.rules.map((rule, index) =>
        el("li", { class: LOOKS[this.rules.length === 1 ? 1 : index] }, el("span", { class: "key" }), ruleName(rule)))),
      this.chart.element);
    byId("stages").replaceChildren();
    byId("think-status").textContent = "Press Go.";
    byId("other-rule").textContent = ruleName(this.rules.at(-1));
    byId("other-rule-words").textContent = /^product/.test(this.rules.at(-1)) ? "combines all exits so far." : "is the rule of this server.";
  }

  async go() {
    this.clear();
    const run = (this.run = new AbortController()), deadline = this.deadline.value;
    const arrived = [];
    let over = false, failure = null, awaken = () => {};
    const add = (event) => { arrived.push(event); awaken(); };
    const status = byId("think-status");
    status.textContent = "Running …";
    if (status.getBoundingClientRect().top > innerHeight - 200) status.scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
    if (this.source.recorded && !this.own) {
      try { recordedEvents(this.source, this.source.examples[this.index], deadline).forEach(add); } catch (error) { failure = error; }
      over = true;
    } else {
      const input = this.own ?? { source: this.source.id, row: this.source.examples[this.index].id };
      const onEvent = ({ name, data }) => { if (name === "exit" && data.exit > (arrived.at(-1)?.exit ?? 0)) add(data); };
      const onState = (state) => { if (state === "reconnecting") status.textContent = "The connection was lost: trying again …"; };
      this.backend.think({ ...input, deadline }, onEvent, { signal: run.signal, onState })
        .catch((error) => { failure = error; }).finally(() => { over = true; awaken(); });
    }
    for (let next = 0; !run.signal.aborted;) {
      if (next < arrived.length) {
        this.show(arrived[next], deadline);
        next += 1;
        if (!calm.matches && (next < arrived.length || !over)) await wait(PACE, run.signal);
      } else if (over) break;
      else await new Promise((resolve) => { awaken = resolve; });
    }
    if (run.signal.aborted) return;
    if (failure) byId("think-status").textContent = failure.message;
  }

  show(event, deadline) {
    this.events.push(event);
    const name = (label) => this.classes[label] ?? `class ${label}`;
    const followed = this.truth ?? event.rules[this.rules.at(-1)].label;
    this.panels.forEach((panel, index) => panel.show(event.rules[this.rules[index]], this.order(), this.truth, name));
    byId("trajectory-title").textContent = `Probability of ${this.truth == null ? "the answer" : "the true class"}: ${name(followed)}`;
    const lines = this.rules.map((rule) =>
      this.events.map(({ exit, rules }) => [exit, new Map(rules[rule].bars).get(followed) ?? 0]));
    const exits = this.own ? this.info.exits : this.source.exits;
    this.chart.update(lines, [1, exits], ["1", String(exits)]);
    const slower = calm.matches ? "" : " Shown slower than it ran.";
    byId("think-status").textContent = `Exit ${event.exit} of ${exits} after ${duration(event.elapsed_ms)} of ${duration(deadline)}` +
      (event.reason ? `: ${REASONS[event.reason] ?? event.reason}${event.deadline_met ? "" : ", late"}.${slower}` : " …");
    this.table(name, exits);
  }

  // The classes to show, in the same order for all rules: all of a few, or those that were most probable so far.
  order() {
    const known = this.classes.length;
    if (known <= 10) return Array.from({ length: known }, (_, label) => label);
    const peaks = new Map(this.truth == null ? [] : [[this.truth, 2]]);
    for (const { rules } of this.events) for (const rule of this.rules) for (const [label, value] of rules[rule].bars) {
      if (!(peaks.get(label) >= value)) peaks.set(label, value);
    }
    return [...peaks].sort((one, other) => other[1] - one[1]).slice(0, MOST_BARS).map(([label]) => label);
  }

  table(name, exits) {
    const longest = Math.max(...this.events.map((event) => event.stage_ms));
    const sets = this.rules.filter((rule) => this.events[0].rules[rule].set);
    const column = (text, css = "") => el("th", { scope: "col", class: css }, text);
    const head = el("tr", {}, column("exit"), column("stage"), column("so far"),
      ...this.rules.map((rule) => column(ruleName(rule), "words")),
      ...sets.map((rule) => column(sets.length > 1 ? `set, ${ruleName(rule)}` : "set")));
    const rows = this.events.map((event) => {
      const bar = el("span", { class: "time" });
      bar.style.width = `${(4 * event.stage_ms) / longest}rem`;
      const judge = (label) => (this.truth == null ? "" : label === this.truth ? "right" : "wrong");
      return el("tr", {}, el("th", { scope: "row" }, `${event.exit} of ${exits}`),
        el("td", { class: "stage" }, bar, duration(event.stage_ms)), el("td", {}, duration(event.elapsed_ms)),
        ...this.rules.map((rule) => event.rules[rule].label).map((label) => el("td", { class: `words ${judge(label)}` }, name(label))),
        ...sets.map((rule) => el("td", {}, String(event.rules[rule].set[0]))));
    });
    byId("stages").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
  }
}
