import { byId, duration, el, LogSlider, percent } from "./dom.js";
import { LineChart } from "./draw.js";

const KEPT = 40; // points per line: what is older is dropped, so the memory of the page does not grow
const SECONDS = 60;
const SYSTEMS = ["anytime", "all_exits"];
const NOTES = {
  none: "This server generates no traffic: start it with anytime serve --demo.",
  recorded: "Simulated with the stage times of an MSDNet on one core, for the nearest recorded rate and deadline; both systems " +
    "get the same requests. Three seconds are recorded, and repeat.",
  live: "The server sends the traffic to itself, for a minute at most. Both systems get the same inputs at the same times and " +
    "take turns of half a second, so that neither slows the other; each turn begins with an empty queue, which favours the one " +
    "that falls behind.",
};
const NAMES = { anytime: "anytime", all_exits: "run all exits" };

export class LoadView {
  constructor(backend, info) {
    Object.assign(this, { backend, info, run: null, points: [], sums: null });
    const changed = () => { if (this.run) this.restart(); };
    this.rate = new LogSlider("rate", (value) => `${Math.round(value)}`, changed);
    this.deadline = new LogSlider("load-deadline", duration, changed);
    byId("load-go").addEventListener("click", () => (this.run ? this.stop() : this.start()));
  }

  prepare() {
    const { most_rate: most, least_rate: least = 10, deadlines_ms: [low, high], recorded } = this.info.load;
    this.rate.range(least, most, 300);
    this.deadline.range(Math.max(low, 1), Math.min(high, 200), recorded ? 10 : Math.max(4 * this.info.milliseconds.at(-1), 5));
    this.exits = this.info.exits;
    byId("load-go").disabled = !this.info.demo;
    byId("load-note").textContent = !this.info.demo ? NOTES.none : recorded ? NOTES.recorded : NOTES.live;
    const series = SYSTEMS.map((name, index) => ({ name: NAMES[name], css: ["s2", "s1"][index] }));
    const share = (label) => new LineChart({ label, series, format: percent, x: "seconds" });
    const ticks = this.exits <= 8 ? Array.from({ length: this.exits + 1 }, (_, exit) => exit) : [0, this.exits / 2, this.exits];
    const exit = (value) => String(Number(value.toFixed(1)));
    this.charts = {
      in_time: share("Answered in time"),
      exit: new LineChart({ label: "Mean exit of answers in time", series, max: this.exits, ticks, format: exit, x: "seconds" }),
      correct: share("Correct and in time, of all requests"),
      refused: share("Refused"),
    };
    byId("charts").replaceChildren(...Object.values(this.charts).map((chart) =>
      el("figure", { class: "panel" }, el("h2", {}, chart.label), chart.element)));
    this.show();
  }

  settings(seconds = SECONDS) {
    return { rate: this.rate.value, deadline: this.deadline.value, seconds };
  }

  async start() {
    const run = (this.run = new AbortController());
    this.points = [];
    this.sums = null;
    byId("load-go").textContent = "Stop";
    byId("load-status").textContent = "Starting …";
    try {
      await this.backend.startLoad(this.settings());
      await this.backend.followLoad(({ name, data }) => { if (name === "slice") this.add(data); }, {
        signal: run.signal,
        onState: (state) => {
          byId("load-status").textContent = state === "connected" ? "Running." : "The connection was lost: trying again …";
        },
      });
      if (this.run === run) this.ended("Ended.");
    } catch (error) {
      if (this.run === run) this.ended(error.message);
    }
  }

  // A change of a slider: the traffic goes on with the new settings.
  restart() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { if (this.run) this.backend.startLoad(this.settings()).catch(() => {}); }, 150);
  }

  async stop() {
    const run = this.run;
    this.ended("Stopped.");
    run.abort();
    await this.backend.stopLoad().catch(() => {});
  }

  ended(words) {
    this.run = null;
    byId("load-go").textContent = "Start";
    byId("load-status").textContent = words;
  }

  add(slice) {
    this.points.push(slice);
    if (this.points.length > KEPT) this.points.shift();
    this.sums ??= Object.fromEntries(SYSTEMS.map((name) => [name, {}]));
    for (const name of SYSTEMS) {
      for (const [key, count] of Object.entries(slice[name])) {
        if (count != null) this.sums[name][key] = (this.sums[name][key] ?? 0) + count; // without labels nothing is correct or wrong
      }
    }
    byId("load-status").textContent = "Running.";
    this.charts.correct.element.parentElement.hidden = slice.anytime.correct == null;
    this.show();
  }

  show() {
    const measures = {
      in_time: (count) => (count.sent ? count.in_time / count.sent : null),
      exit: (count) => (count.in_time ? count.exits / count.in_time : null),
      correct: (count) => (count.sent && count.correct != null ? count.correct / count.sent : null),
      refused: (count) => (count.sent ? count.refused / count.sent : null),
    };
    const first = this.points[0]?.at ?? 0, last = Math.max(this.points.at(-1)?.at ?? 1, first + 1);
    for (const [key, chart] of Object.entries(this.charts)) {
      const lines = SYSTEMS.map((name) => this.points.map((slice) => [slice.at, measures[key](slice[name])]));
      chart.update(lines, [first, last], [first.toFixed(0), last.toFixed(0)]);
    }
    const columns = { requests: (count) => String(count.sent) };
    const words = (measure, format) => (count) => { const value = measure(count); return value == null ? "–" : format(value); };
    columns["in time"] = words(measures.in_time, percent);
    columns["mean exit"] = words(measures.exit, (value) => value.toFixed(2));
    columns["correct in time"] = words(measures.correct, percent);
    columns.refused = words(measures.refused, percent);
    const head = el("tr", {}, el("td"), ...Object.keys(columns).map((text) => el("th", { scope: "col" }, text)));
    const rows = SYSTEMS.map((name) => el("tr", {}, el("th", { scope: "row" }, NAMES[name]),
      ...Object.values(columns).map((column) => el("td", {}, column(this.sums?.[name] ?? { sent: 0 })))));
    byId("totals").replaceChildren(el("caption", {}, "Sums since the start"), el("thead", {}, head), el("tbody", {}, ...rows));
  }
}
