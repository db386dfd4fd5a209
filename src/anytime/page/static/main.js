import { byId } from "./dom.js";
import { LoadView } from "./load.js";
import { ModelView } from "./model.js";
import { Recorded } from "./recorded.js";
import { Server } from "./server.js";
import { ThinkView } from "./think.js";

const VIEWS = ["think", "load", "model"];
const tabs = VIEWS.map((name) => byId(`tab-${name}`));

function showView(name, views) {
  VIEWS.forEach((each, index) => {
    byId(`view-${each}`).hidden = each !== name;
    tabs[index].setAttribute("aria-selected", String(each === name));
    tabs[index].tabIndex = each === name ? 0 : -1;
  });
  history.replaceState(null, "", `#${name}`);
  if (name === "model") views.model?.open();
  else views.model?.close();
}

function setTheme() {
  const root = document.documentElement;
  try {
    const stored = localStorage.getItem("anytime-theme");
    if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  } catch { /* a file may have no storage */ }
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("anytime-theme", root.dataset.theme); } catch { /* likewise */ }
  });
}

function setTabs(views) {
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => showView(VIEWS[index], views));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = event.key === "Home" ? 0 : event.key === "End" ? VIEWS.length - 1 : step && (index + step + VIEWS.length) % VIEWS.length;
      if (next === undefined) return;
      event.preventDefault();
      tabs[next].focus();
      showView(VIEWS[next], views);
    });
  });
}

async function begin() {
  const stored = byId("recorded"), views = {};
  const backend = stored ? new Recorded(JSON.parse(stored.textContent)) : new Server();
  setTheme();
  setTabs(views);
  const wanted = location.hash.slice(1);
  showView(VIEWS.includes(wanted) ? wanted : "think", views);
  const info = await backend.info();
  byId("facts").textContent = backend.offline ? "Recorded answers: this file works without a server. For your own model, run anytime serve."
    : `${info.name}: a model with ${info.exits} exits and ${info.classes.length} classes, served here.`;
  byId("links").hidden = Boolean(backend.offline);
  byId("metadata").setAttribute("href", `v2/models/${info.name}`);
  const load = new LoadView(backend, info), think = new ThinkView(backend, info);
  load.prepare();
  views.model = new ModelView(backend, info);
  if (!byId("view-model").hidden) views.model.open();
  await think.start();
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  byId("notice").textContent = error.message;
  byId("notice").hidden = false;
});
