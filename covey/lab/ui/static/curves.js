// The view of curves: panels of metrics, overlaid for all selected runs.
import { Chart } from "./chart.js";
import { api, colour, dash, debounce, el, fill, number, percent, select, state } from "./dom.js";

const USUAL = ["objective/scores", "objective/verifiable_correct_rate", "policy/entropy_avg", "val/sequence_lengths", "objective/kl_avg",
  "policy/approxkl_avg", "policy/clipfrac_avg", "optim/grad_norm", "rollout/zero_variance_groups", "loss/policy_avg",
  "rollout/stop_rate", "time/total"];
const SHARES = new Set(["objective/verifiable_correct_rate", "policy/clipfrac_avg", "rollout/zero_variance_groups", "rollout/stop_rate"]);
const AXES = { step: "steps", tokens: "sampled tokens", "time/from_scratch": "seconds" };
const POINTS = 400; // a panel has no more pixels
const ASKED = 100; // runs in one request
const POLLED = 4; // partly read runs that one request continues to read
const HELD_OUT = "held-out accuracy", HELD_OUT_REWARD = "held-out reward";
const ESTIMATES = { [HELD_OUT]: "greedy", [HELD_OUT_REWARD]: "reward" };

export class Curves {
  constructor(app) {
    this.app = app; this.data = new Map(); this.stamps = new Map(); this.charts = new Map(); this.timer = 0;
    this.panels = el("div", { class: "panels" });
    this.evaluations = el("section", { class: "evaluations" });
    this.controls = this.bar();
    this.legend = el("ul", { class: "legend" });
    this.node = el("div", {}, this.controls, this.legend, this.panels, this.evaluations);
  }

  // The controls are made only once, because a slider that is replaced while it is dragged stops moving.
  bar() {
    const add = el("input", { list: "metric-names", placeholder: "Add a metric", "aria-label": "Add a metric", on: { change: (event) => {
      if (event.target.value) state.set({ metric: [...new Set([...state.all("metric"), event.target.value])] });
      event.target.value = "";
    } } });
    this.smooth = el("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02,
      on: { input: debounce((event) => state.set({ smooth: event.target.value === "0" ? "" : event.target.value }, { replace: true }), 20) } });
    this.axis = select("Over", AXES, "step", (value) => state.set({ x: value === "step" ? "" : value, from: "", to: "" }));
    this.boxes = { log: this.box("log", "Log scale"), seeds: this.box("seeds", "Join seeds") };
    this.whole = el("button", { type: "button", text: "Whole run", on: { click: () => this.zoom("", "") } });
    return el("div", { class: "controls" }, el("label", { class: "field" }, el("span", { text: "Smoothing" }), this.smooth), this.axis, Object.values(this.boxes),
      el("span", { class: "field" }, add, this.names = el("datalist", { id: "metric-names" })), this.whole);
  }

  show() {
    this.smooth.value = state.get("smooth", "0");
    this.axis.querySelector("select").value = state.get("x", "step");
    for (const [name, box] of Object.entries(this.boxes)) box.querySelector("input").checked = state.get(name) === "1";
    this.whole.hidden = !state.get("from");
    this.update(true);
  }

  box(name, label) {
    return el("label", { class: "field check" }, el("input", { type: "checkbox", on: { change: (event) => state.set({ [name]: event.target.checked ? "1" : "" }, { replace: true }) } }), el("span", { text: label }));
  }

  zoom(from, to) { state.set({ from: from === "" ? "" : from.toPrecision(6), to: to === "" ? "" : to.toPrecision(6) }); }

  query(names) {
    const runs = this.app.selected().length;
    return { metrics: names.join(","), points: Math.max(80, Math.min(POINTS, Math.round(6000 / Math.max(1, runs)))),
      axis: state.get("x", "step"), from: state.get("from"), to: state.get("to") };
  }

  async update(all = false) {
    clearTimeout(this.timer);
    const runs = this.app.selected(), metrics = [...new Set([...USUAL, "sft/loss", ...this.parts(), ...state.all("metric")])];
    const query = this.query(metrics), key = JSON.stringify(query);
    const wanted = runs.filter((run) => this.stamps.get(run.id) !== `${run.changed}${key}` || this.data.get(run.id)?.partial);
    if (!wanted.length && !all) return;
    const changed = wanted.filter((run) => this.stamps.get(run.id) !== `${run.changed}${key}`);
    await this.fetch(changed.length ? changed : wanted.slice(0, POLLED), query, key);
    if (!this.node.isConnected) return;
    this.draw();
    const unread = this.app.selected().some((run) => this.data.get(run.id)?.partial);
    const more = [...this.parts()].some((name) => !metrics.includes(name));
    if (unread || more) this.timer = setTimeout(() => this.update(), 60);
  }

  async fetch(runs, query, key) {
    for (let first = 0; first < runs.length; first += ASKED) {
      const some = runs.slice(first, first + ASKED);
      try {
        const found = await api("series", { run: some.map((run) => run.id).join("\0"), ...query });
        found.runs.forEach((data, place) => { this.data.set(some[place].id, data); this.stamps.set(some[place].id, `${some[place].changed}${key}`); });
      } catch (error) { for (const run of some) this.data.set(run.id, { names: [], curves: {}, evaluations: [], notes: [error.message] }); }
    }
  }

  parts() {
    const names = new Set();
    for (const run of this.app.selected()) for (const name of this.data.get(run.id)?.names ?? []) if (name.startsWith("objective/parts/")) names.add(name);
    return [...names].slice(0, 8);
  }

  draw() {
    const runs = this.app.selected(), found = runs.map((run) => this.data.get(run.id)).filter(Boolean);
    const names = [...new Set(found.flatMap((data) => data.names))].sort();
    if (this.listed !== names.join()) { this.listed = names.join(); fill(this.names, names.map((name) => el("option", { value: name }))); }
    const shown = [...new Set([...state.all("metric"), ...USUAL, "sft/loss", ...this.parts()])].filter((name) => found.some((data) => data.curves[name]));
    if (found.some((data) => data.evaluations.length) && state.get("x", "step") === "step") shown.unshift(HELD_OUT, ...(found.some((data) => data.evaluations.some((row) => row.reward)) ? [HELD_OUT_REWARD] : []));
    if (this.drawn !== shown.join()) {
      this.charts = new Map(shown.map((name) => [name, this.charts.get(name) ?? this.chart(name)]));
      fill(this.panels, [...this.charts.values()].map((chart) => chart.node));
      this.drawn = shown.join();
    }
    const between = state.get("from") ? [Number(state.get("from")), Number(state.get("to"))] : null;
    for (const [name, chart] of this.charts) chart.set(ESTIMATES[name] ? this.heldOut(runs, ESTIMATES[name]) : this.lines(runs, name), { log: state.get("log") === "1" && !ESTIMATES[name], between });
    this.app.notes(runs.flatMap((run) => (this.data.get(run.id)?.notes ?? []).map((note) => `${run.id}: ${note}`)));
    fill(this.legend, runs.length > 1 ? this.groups(runs).map((group) => el("li", {}, el("span", { class: "key", style: { background: colour(group.place) } }), group.name)) : []);
    this.table(runs);
  }

  chart(name) {
    const entry = this.app.metric(name);
    const help = ESTIMATES[name] ? `${name} of greedy completions, with its 95 % interval` : [entry?.definition, entry?.unit && `Unit: ${entry.unit}`].filter(Boolean).join("\n");
    return new Chart({ title: name, help, percent: name === HELD_OUT || SHARES.has(name), healthy: entry?.healthy,
      onZoom: (from, to) => this.zoom(from, to), onReset: () => this.zoom("", "") });
  }

  groups(runs) {
    const joined = new Map();
    for (const run of runs) {
      const name = state.get("seeds") === "1" && run.comparison ? run.comparison : run.id;
      if (!joined.has(name)) joined.set(name, { name, runs: [], place: run.place });
      joined.get(name).runs.push(run);
    }
    return [...joined.values()];
  }

  lines(runs, name) {
    const smooth = Number(state.get("smooth", "0"));
    return this.groups(runs).flatMap((group) => {
      const curves = group.runs.map((run) => this.data.get(run.id)?.curves[name]).filter((curve) => curve?.x.length);
      if (!curves.length) return [];
      const curve = curves.length > 1 ? across(curves.map((each) => ({ ...each, mean: smoothed(each.mean, smooth) }))) : { ...curves[0], mean: smoothed(curves[0].mean, smooth) };
      const look = { name: group.name, colour: colour(group.place), dash: dash(group.place) };
      const raw = smooth && curves.length === 1 && runs.length <= 6 ? [{ ...look, dash: [], x: curves[0].x, y: curves[0].mean, faint: true }] : [];
      return [...raw, { ...look, x: curve.x, y: curve.mean, low: runs.length <= 6 || curves.length > 1 ? curve.low : undefined, high: curve.high }];
    });
  }

  heldOut(runs, key) {
    return runs.flatMap((run) => {
      const rows = (this.data.get(run.id)?.evaluations ?? []).filter((row) => row[key]);
      if (!rows.length) return [];
      const few = runs.length <= 4;
      return [{ name: run.id, colour: colour(run.place), dash: dash(run.place), dots: true, x: rows.map((row) => row.step), y: rows.map((row) => row[key].value),
        low: few ? rows.map((row) => row[key].low) : undefined, high: rows.map((row) => row[key].high) }];
    });
  }

  table(runs) {
    const rows = runs.flatMap((run) => (this.data.get(run.id)?.evaluations ?? []).slice(runs.length > 1 ? -1 : -12).map((row) => [run.id, row]));
    if (!rows.length) { fill(this.evaluations); return; }
    const head = ["run", "step", "greedy accuracy", "95 % interval", "reward", "best constant", "distinct answers", "tokens"];
    fill(this.evaluations, el("h2", { text: runs.length > 1 ? "Last evaluation of each run" : "Evaluations" }), el("div", { class: "scroll", tabindex: "0" }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { text })))),
      el("tbody", {}, rows.map(([id, row]) => el("tr", {}, el("th", { text: id }), el("td", { text: row.step }), el("td", { text: percent(row.greedy.value) }),
        el("td", { text: `${percent(row.greedy.low)} to ${percent(row.greedy.high)}` }), el("td", { text: number(row.reward?.value, 3) }), el("td", { text: percent(row.best_constant) }),
        el("td", { text: row.distinct_answers ?? "–" }), el("td", { text: row.mean_tokens?.toFixed(1) ?? "–" })))))));
  }
}

// An exponential moving average, corrected for the bias of its first values.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, count = 0;
  return values.map((value) => { sum = weight * sum + (1 - weight) * value; count = weight * count + (1 - weight); return sum / count; });
}

// The mean, lowest and highest value of several curves, at the points of the curve that has the most.
export function across(curves) {
  const x = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
  const rows = x.map((at) => curves.filter((c) => at >= c.x[0] && at <= c.x[c.x.length - 1]).map((c) => valueAt(c, at)));
  const some = x.map((_, i) => i).filter((i) => rows[i].length);
  return { x: some.map((i) => x[i]), mean: some.map((i) => rows[i].reduce((a, b) => a + b) / rows[i].length),
    low: some.map((i) => Math.min(...rows[i])), high: some.map((i) => Math.max(...rows[i])) };
}

function valueAt(curve, at) {
  let low = 0, high = curve.x.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (curve.x[middle] <= at) low = middle; else high = middle; }
  const span = curve.x[high] - curve.x[low];
  return span ? curve.mean[low] + ((at - curve.x[low]) / span) * (curve.mean[high] - curve.mean[low]) : curve.mean[low];
}
