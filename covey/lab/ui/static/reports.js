// The view of comparisons: a report for each, which is written from its runs when it is opened.
import { el, fill, state } from "./dom.js";

export class Reports {
  constructor(app) { this.app = app; this.node = el("div"); this.shown = null; }

  show() { this.shown = null; this.update(); }

  update() {
    const found = this.app.comparisons, key = JSON.stringify(found);
    if (key === this.shown) return;
    this.shown = key;
    fill(this.node, el("h2", { text: "Comparisons" }),
      found.length ? el("ul", { class: "reports" }, found.map((each) => el("li", {}, el("a", { href: `/report?comparison=${encodeURIComponent(each.id)}`, target: "_blank", rel: "noopener", text: each.id }), el("span", { class: "quiet", text: ` ${each.runs} runs ` }),
        el("button", { type: "button", class: "small", text: "Show its runs together", on: { click: () => state.set({ view: "curves", seeds: "1", run: this.app.runs.filter((run) => run.id.startsWith(`${each.id}/`)).map((run) => run.id) }) } }))))
        : el("p", { class: "quiet", text: "There is no comparison in these folders. Start one with covey compare." }));
  }
}
