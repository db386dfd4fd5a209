import { byId, el } from "./dom.js";
import { follow, Refusal } from "./events.js";

// The server that this page came from. A token is asked for when the server demands it, and is kept in memory only.
export class Server {
  #token = null;
  #asking = null;

  async ask(path, options = {}) {
    for (;;) {
      const headers = { ...options.headers, ...(this.#token && { Authorization: `Bearer ${this.#token}` }) };
      const response = await fetch(`page/${path}`, { ...options, headers, cache: "no-store" });
      if (response.ok) return response;
      const problem = await response.json().catch(() => ({ error: `status ${response.status}` }));
      if (response.status !== 401) throw new Refusal(response.status, problem);
      const refused = Boolean(this.#token);
      this.#token = null;
      await (this.#asking ??= this.askToken(refused).finally(() => { this.#asking = null; }));
    }
  }

  askToken(refused) {
    const form = byId("token-form"), input = byId("token");
    byId("token-error").textContent = refused ? "The server did not accept this token." : "";
    form.hidden = false;
    input.focus();
    return new Promise((resolve) => {
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.#token = input.value;
        input.value = "";
        form.hidden = true;
        resolve();
      }, { once: true });
    });
  }

  async info() {
    return (await this.ask("info")).json();
  }

  async source(id) {
    return (await this.ask(`source/${encodeURIComponent(id)}`)).json();
  }

  async image(row) {
    return (await this.ask(`image/${row}`)).blob();
  }

  // `input` is an example of a source, or a body with its type.
  think({ source, row, body, type, deadline }, onEvent, options) {
    const query = new URLSearchParams({ deadline: `${deadline.toFixed(3)}ms`, ...(body == null && { source, row }) });
    const headers = body == null ? {} : { "Content-Type": type };
    const open = () => this.ask(`think?${query}`, { method: "POST", body, headers, signal: options.signal });
    return follow(open, onEvent, { ...options, tries: 3 });
  }

  async startLoad({ rate, deadline, seconds }) {
    const query = new URLSearchParams({ rate: rate.toFixed(1), deadline: `${deadline.toFixed(3)}ms`, seconds });
    const response = await this.ask(`load?${query}`, { method: "POST" });
    this.after = (await response.json()).after;
  }

  async stopLoad() {
    await this.ask("load/stop", { method: "POST" });
  }

  followLoad(onEvent, options) {
    const open = (after) => this.ask("load", { headers: { "Last-Event-ID": String(after) }, signal: options.signal });
    return follow(open, onEvent, { ...options, after: this.after });
  }

  async cards() {
    const card = await (await this.ask("model")).json();
    return [{ title: null, ...card }];
  }

  // A link cannot send a token: with one, the report is saved instead of opened.
  async saveReport() {
    const address = URL.createObjectURL(await (await this.ask("report")).blob());
    el("a", { href: address, download: "report.html" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  get report() {
    return this.#token ? "#report" : "page/report";
  }
}
