// The page: the list of runs, the views, the keys, and a request for news every two seconds.
import { ago, api, byId, colour, debounce, el, fill, number, percent, state } from "./dom.js";
import { Config } from "./config.js";
import { Curves } from "./curves.js";
import { Explorer } from "./explorer.js";
import { Groups } from "./groups.js";
import { Health } from "./health.js";
import { Reports } from "./reports.js";

const EVERY = 2000, LIVE = 60;
const KEYS = [["/", "filter the runs"], ["1 … 6", "choose a view"], ["[  ]", "previous or next step"], ["j  k", "next or previous group"],
  ["Enter", "open the group; arrows move in a chart"], ["Esc", "back, or the whole run"], ["?", "this list"]];

class App {
  constructor() {
    this.runs = []; this.comparisons = []; this.registry = {};
    this.views = { curves: new Curves(this), groups: new Groups(this), health: new Health(this), config: new Config(this), reports: new Reports(this), explorer: new Explorer() };
    this.titles = { curves: "Curves", groups: "Groups", health: "Health", config: "Settings", reports: "Comparisons", explorer: "Step explorer" };
  }

  async start() {
    addEventListener("hashchange", () => this.show());
    document.addEventListener("keydown", (event) => this.key(event));
    byId("filter").addEventListener("input", debounce(() => this.list(), 60));
    byId("all").addEventListener("click", () => this.select(this.shown().map((run) => run.id)));
    byId("none").addEventListener("click", () => this.select([]));
    byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.list(); this.show(); });
    if (innerWidth <= 760) byId("runs-box").open = false;
    const [, registry] = await Promise.all([this.refresh(), api("metrics")]);
    this.registry = registry;
    this.show();
    setInterval(() => this.refresh().then(() => this.view.update?.()), EVERY);
  }

  async refresh() {
    try {
      const found = await api("runs");
      const known = new Map(this.runs.map((run) => [run.id, run.place]));
      let next = Math.max(-1, ...known.values()) + 1;
      this.runs = found.runs.map((run) => ({ ...run, place: known.get(run.id) ?? next++ }));
      this.comparisons = found.comparisons; this.roots = found.roots;
      byId("live").textContent = this.runs.some((run) => run.age !== null && run.age < LIVE) ? "● live" : "";
    } catch { byId("live").textContent = "no connection to the server"; }
    this.list();
  }

  get view() { return this.views[state.get("view", "curves")] ?? this.views.curves; }

  // The runs that the charts show; the newest if none is chosen.
  selected() {
    const byId = new Map(this.runs.map((run) => [run.id, run])), found = [...new Set(state.all("run"))].map((id) => byId.get(id)).filter(Boolean);
    return found.length ? found : this.runs.slice(0, 1);
  }
  select(ids) { state.set({ run: ids, from: "", to: "", group: "", line: "" }); }
  shown() {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    return this.runs.filter((run) => words.every((word) => `${run.id} ${run.algorithm} ${run.task} ${run.model}`.toLowerCase().includes(word)));
  }
  metric(name) {
    if (this.registry[name]) return this.registry[name];
    const key = Object.keys(this.registry).find((each) => each.endsWith("*") && name.startsWith(each.slice(0, -1)));
    return this.registry[key];
  }

  list() {
    const chosen = new Set(this.selected().map((run) => run.id)), shown = this.shown();
    byId("runs-summary").textContent = `${this.runs.length === 1 ? "1 run" : `${this.runs.length} runs`}, ${chosen.size} shown`;
    if (!this.runs.length) { fill(byId("runs"), el("li", { class: "quiet", text: `There are no runs in ${(this.roots ?? []).join(", ")}. Start one with covey train.` })); return; }
    const focus = document.activeElement?.closest?.("#runs li")?.dataset.id;
    fill(byId("runs"), shown.map((run) => this.row(run, chosen.has(run.id))));
    if (focus) [...byId("runs").children].find((row) => row.dataset.id === focus)?.querySelector("input").focus();
  }

  row(run, on) {
    const live = run.age !== null && run.age < LIVE, steps = run.steps ? `${run.step ?? 0} / ${run.steps}` : `${run.step ?? 0}`;
    const facts = [`step ${steps}`, run.reward !== null && run.reward !== undefined ? `reward ${number(run.reward, 3)}` : "",
      run.greedy_now !== null ? `greedy ${percent(run.greedy_before)} → ${percent(run.greedy_now)}` : "", live ? "" : ago(run.age)].filter(Boolean).join(" · ");
    const toggle = (event) => {
      const ids = this.selected().map((each) => each.id);
      this.select(event.target.checked ? [...ids, run.id] : ids.filter((id) => id !== run.id));
    };
    return el("li", { "data-id": run.id, class: on ? "on" : "" },
      el("input", { type: "checkbox", checked: on, "aria-label": `Show ${run.id}`, on: { change: toggle } }),
      el("button", { type: "button", class: "run", title: "Show only this run", on: { click: () => this.select([run.id]) } },
        el("span", { class: "name" }, el("span", { class: "key", style: { background: on ? colour(run.place) : "transparent" } }), run.id, live ? el("span", { class: "dot", title: "written to less than a minute ago", text: " ●" }) : null),
        el("small", { text: facts }), run.missing.length ? el("small", { class: "warn", text: `no ${run.missing.join(", ")}` }) : null));
  }

  show() {
    const now = state.get("view", "curves");
    fill(byId("tabs"), Object.entries(this.titles).map(([name, title]) => el("button", { type: "button", class: "tab", "aria-current": name === now ? "page" : null, text: title, on: { click: () => state.set({ view: name, group: "", line: "" }) } })));
    byId("tabs").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.list(); this.notes([]);
    const view = this.view;
    if (byId("main").firstChild !== view.node) fill(byId("main"), view.node);
    view.show();
  }

  notes(lines) { fill(byId("notes"), lines.slice(0, 6).map((text) => el("p", { class: "warn", text }))); }

  key(event) {
    if (event.target.matches("input:not([type=checkbox]):not([type=range]), textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const names = Object.keys(this.titles), place = Number(event.key);
    if (event.key === "/") { event.preventDefault(); byId("runs-box").open = true; byId("filter").focus(); }
    else if (event.key === "?") this.help();
    else if (place >= 1 && place <= names.length) state.set({ view: names[place - 1], group: "", line: "" });
    else this.view.key?.(event);
  }

  help() {
    const box = byId("help");
    fill(box, el("h2", { text: "Keys" }), el("dl", {}, KEYS.flatMap(([key, text]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text })])),
      el("form", { method: "dialog" }, el("button", { text: "Close" })));
    box.querySelector("button").addEventListener("click", (event) => { event.preventDefault(); box.close(); });
    box.showModal();
  }
}

new App().start();
