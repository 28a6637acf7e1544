// The view of health: the findings of the checks in each selected run, and the steps that they span.
import { api, el, fill } from "./dom.js";

const MOST = 8;

export class Health {
  constructor(app) { this.app = app; this.node = el("div", { class: "health" }); this.boxes = new Map(); }

  show() {
    const runs = this.app.selected().slice(0, MOST);
    this.boxes = new Map(runs.map((run) => [run.id, el("section", {}, el("h2", { text: run.id }), el("p", { class: "quiet", text: "checking …" }))]));
    fill(this.node, [...this.boxes.values()], this.app.selected().length > MOST ? el("p", { class: "quiet", text: `Only the first ${MOST} of the selected runs are checked.` }) : null);
    this.stamps = new Map();
    this.update();
  }

  async update() {
    for (const run of this.app.selected().slice(0, MOST)) {
      const box = this.boxes.get(run.id);
      if (!box || this.stamps.get(run.id) === run.changed) continue;
      let found;
      try { found = await api("health", { run: run.id }); } catch (error) { found = { state: "failed", error: error.message }; }
      if (found.state === "running") continue;
      this.stamps.set(run.id, run.changed);
      fill(box, el("h2", { text: run.id }), found.state === "failed" ? el("p", { class: "warn", text: found.error }) : this.findings(found.result));
    }
    if (this.node.isConnected && [...this.boxes.keys()].some((id) => !this.stamps.has(id))) { clearTimeout(this.timer); this.timer = setTimeout(() => this.update(), 400); }
  }

  findings({ findings, step, early }) {
    if (!findings.length) return early ? el("p", { class: "quiet", text: `Too early to say whether something is wrong, at step ${step}.` }) : el("p", { class: "correct", text: `Nothing is wrong up to step ${step}.` });
    const rows = findings.map((finding) => {
      const until = finding.until ?? step, first = 100 * (finding.since / step), width = Math.max(0.7, 100 * ((until - finding.since) / step));
      const bar = el("div", { class: "track" }, el("div", { class: finding.problem ? "bar problem" : "bar", style: { left: `${Math.min(99, first)}%`, width: `${Math.min(width, 100 - Math.min(99, first))}%` } }));
      const lead = `steps ${finding.since} to ${finding.until ?? "now"}`;
      return el("article", { class: finding.until === null ? "finding" : "finding over" },
        el("div", { class: "finding-head" }, el("strong", { text: finding.name.replaceAll("_", " ") }), el("span", { class: "quiet", text: lead }), el("span", { class: finding.problem && finding.until === null ? "incorrect" : "quiet", text: finding.until !== null ? "over" : finding.problem ? "now" : "good to know" })),
        bar, el("p", { text: `${finding.what}; ${finding.why}.` }),
        finding.change.length || finding.also ? el("p", {}, el("span", { class: "quiet", text: "Try " }), finding.change.flatMap((line, i) => [i ? " or " : "", el("code", { text: line })]), finding.also ? `${finding.change.length ? "; " : ""}${finding.also}` : "") : null);
    });
    return el("div", { class: "findings" }, el("p", { class: "quiet", text: `${step} steps, from left to right` }), rows);
  }
}
