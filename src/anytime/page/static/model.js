import { byId, el } from "./dom.js";
import { ruleName } from "./think.js";

const EVERY = 2000;

// The report card of the requests that the server has seen, asked for while the view is open.
export class ModelView {
  constructor(backend, info) {
    Object.assign(this, { backend, info, timer: null, shown: "" });
    byId("model-note").textContent = backend.offline ? "From the recorded logits."
      : "While somebody looks at this page, up to five inputs per second of those that the server is asked are run through all " +
        "exits in the background.";
    byId("model-traffic").hidden = backend.offline || !info.demo;
    byId("model-traffic").addEventListener("click", () => this.traffic());
    byId("report").addEventListener("click", (event) => {
      if (byId("report").getAttribute("href") !== "#report") return;
      event.preventDefault();
      backend.saveReport().catch((error) => { byId("model-status").textContent = error.message; });
    });
  }

  open() {
    this.close();
    this.timer = setInterval(() => this.refresh(), EVERY);
    return this.refresh();
  }

  close() {
    clearInterval(this.timer);
  }

  async traffic() {
    const run = new AbortController(), stop = setTimeout(() => run.abort(), 11_000);
    byId("model-traffic").disabled = true;
    try {
      const deadline = Math.min(Math.max(10 * this.info.milliseconds.at(-1), 20), this.info.load.deadlines_ms[1]);
      await this.backend.startLoad({ rate: 50, deadline, seconds: 10 });
      await this.backend.followLoad(() => {}, { signal: run.signal, onState: () => {} });
    } catch (error) {
      byId("model-status").textContent = error.message;
    }
    clearTimeout(stop);
    byId("model-traffic").disabled = false;
  }

  async refresh() {
    let cards;
    try {
      cards = await this.backend.cards();
    } catch (error) {
      byId("model-status").textContent = `No answer from the server: ${error.message}`;
      return;
    }
    const inputs = cards.reduce((sum, card) => sum + card.inputs, 0);
    byId("model-status").textContent = cards[0].inside ? "The answers come without logits, from exported stages or under a policy: there is nothing to compare."
      : inputs ? `${inputs} ${inputs === 1 ? "input" : "inputs"} so far.` : "No requests were seen yet: press Go in the first view, or send some.";
    const link = byId("report"), target = this.backend.report;
    link.hidden = !inputs || !target;
    if (target) link.setAttribute("href", target);
    const now = JSON.stringify(cards);
    if (now === this.shown) return;
    this.shown = now;
    byId("cards").replaceChildren(...cards.filter((card) => card.inputs).map((card) => el("div", {},
      card.title ? el("h2", {}, card.title) : null, el("div", { class: "card" }, ...card.properties.map(propertyCard)))));
  }
}

function propertyCard(property) {
  const rows = property.marks.map((mark) => el("tr", {},
    el("th", { scope: "row" }, ruleName(mark.rule)), el("td", {}, el("span", { class: `chip ${mark.grade}` }, mark.grade)),
    el("td", {}, mark.number, el("span", { class: "meaning" }, mark.meaning))));
  const head = el("tr", {}, ...["rule", "grade", "measured"].map((text) => el("th", { scope: "col" }, text)));
  return el("article", { class: "panel property" }, el("h3", {}, property.name), el("p", { class: "question" }, property.question),
    el("p", { class: "reading" }, property.scale),
    el("table", {}, el("thead", { class: "unseen" }, head), el("tbody", {}, ...rows)));
}
