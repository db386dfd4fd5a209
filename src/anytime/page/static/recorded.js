import { wait } from "./dom.js";
import { Refusal } from "./events.js";

// What a server would have sent for a recorded example, up to a deadline.
export function recordedEvents(source, example, deadline) {
  const times = source.milliseconds;
  const reached = times.filter((time) => time <= deadline).length;
  if (!reached) throw new Refusal(422, { error: `not even the first exit fits into ${deadline.toPrecision(2)} ms`, fix: "allow more time" });
  return times.slice(0, reached).map((time, index) => ({
    exit: index + 1,
    elapsed_ms: time,
    stage_ms: time - (times[index - 1] ?? 0),
    deadline_met: true,
    reason: index + 1 < reached ? null : reached === times.length ? "finished" : "forecast",
    rules: Object.fromEntries(source.rules.map((rule) => [rule, {
      label: example.answers[rule][index],
      fell_back: Boolean(example.fell_back[rule][index]),
      bars: example.bars.map((label, place) => [label, example.p[rule][index][place]]),
      set: example.sets[rule]?.[index],
    }])),
  }));
}

const nearest = (values, wanted) =>
  values.reduce((best, each, index) => (Math.abs(Math.log(each / wanted)) < Math.abs(Math.log(values[best] / wanted)) ? index : best), 0);

// The page without a server: the same methods as Server, from the document in the file.
export class Recorded {
  constructor(stored) {
    this.stored = stored;
    this.offline = true;
  }

  async info() {
    const { load } = this.stored;
    return {
      name: "recorded answers", exits: load.exits, texts: false, images: false, demo: true, rules: this.stored.sources[0].rules,
      sources: this.stored.sources.map((source) => source.id),
      load: { most_rate: load.rates.at(-1), least_rate: load.rates[0], deadlines_ms: [load.deadlines[0], load.deadlines.at(-1)], recorded: true },
    };
  }

  async source(id) {
    return this.stored.sources.find((source) => source.id === id);
  }

  async startLoad(settings) {
    this.settings = settings;
  }

  async stopLoad() {
    this.settings = null;
  }

  async followLoad(onEvent, { signal, onState }) {
    const { load } = this.stored;
    onState("connected");
    for (let turn = 0; this.settings && !signal.aborted && turn * load.seconds < this.settings.seconds; turn += 1) {
      const rate = nearest(load.rates, this.settings.rate), deadline = nearest(load.deadlines, this.settings.deadline);
      const systems = Object.entries(load.runs[rate][deadline]).map(([name, slices]) =>
        [name, Object.fromEntries(load.columns.map((column, index) => [column, slices[turn % slices.length][index]]))]);
      onEvent({ id: turn + 1, name: "slice", data: {
        at: (turn + 1) * load.seconds, rate: load.rates[rate], deadline_ms: load.deadlines[deadline], ...Object.fromEntries(systems) } });
      await wait(1000 * load.seconds, signal);
    }
    this.settings = null;
  }

  async cards() {
    return this.stored.cards;
  }

  get report() {
    return this.stored.report;
  }
}
