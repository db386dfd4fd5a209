import { wait } from "./dom.js";

// A refusal of the server: trying again does not help.
export class Refusal extends Error {
  constructor(status, problem) {
    super([problem.error, problem.expected && `expected: ${problem.expected}`, problem.fix].filter(Boolean).join("; "));
    this.status = status;
  }
}

async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const fields = Object.fromEntries(text.slice(0, end).split("\n").map((line) => {
        const colon = line.indexOf(":");
        return [line.slice(0, colon), line.slice(colon + 1).trimStart()];
      }));
      if (fields.data) onEvent({ id: Number(fields.id), name: fields.event, data: JSON.parse(fields.data) });
    }
  }
}

// Server-sent events by fetch, which can send a token as EventSource cannot. A stream that breaks before its event "end" is
// opened again, after the last event, with growing pauses.
export async function follow(open, onEvent, { signal, onState = () => {}, after = 0, tries = Infinity }) {
  let last = after, failures = 0, ended = false;
  while (!ended && !signal.aborted) {
    try {
      const response = await open(last);
      onState("connected");
      await readEvents(response, (event) => {
        failures = 0;
        ended ||= event.name === "end";
        if (event.name === "error") throw new Refusal(500, event.data);
        if (event.id) last = event.id;
        if (!signal.aborted) onEvent(event);
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal) throw error;
    }
    if (ended || signal.aborted) return;
    failures += 1;
    if (failures > tries) throw new Error("The connection to the server was lost.");
    onState("reconnecting");
    await wait(Math.min(250 * 2 ** failures, 8000), signal);
  }
}
