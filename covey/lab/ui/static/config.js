// The view of settings: those of one run, or the differences of several; and the environment of each run.
import { api, el, fill, state } from "./dom.js";

const MOST = 12;

export class Config {
  constructor(app) { this.app = app; this.node = el("div"); }

  async show() {
    const runs = this.app.selected().slice(0, MOST);
    const found = await Promise.all(runs.map((run) => api("details", { run: run.id }).catch((error) => ({ run: run.id, settings: {}, environment: {}, notes: [error.message] }))));
    this.app.notes(found.flatMap((each) => each.notes.map((note) => `${each.run}: ${note}`)));
    const names = [...new Set(found.flatMap((each) => Object.keys(each.settings)))].sort();
    const differ = (name) => new Set(found.map((each) => each.settings[name])).size > 1;
    const only = found.length > 1 && state.get("all") !== "1", shown = names.filter((name) => !only || differ(name));
    fill(this.node,
      found.length > 1 ? el("label", { class: "field check" }, el("input", { type: "checkbox", checked: only, on: { change: (event) => state.set({ all: event.target.checked ? "" : "1" }) } }), el("span", { text: "Only differences" })) : null,
      el("p", { class: "quiet", text: found.length > 1 ? `${names.filter(differ).length} of ${names.length} settings differ between ${found.length} runs` : `${names.length} settings` }),
      this.table("setting", shown, found, (each, name) => each.settings[name] ?? "not set", differ),
      el("h2", { text: "Environment" }),
      this.table("", ["started", "command", "device", "seed", "platform", "reward", "packages", "git"], found, (each, name) => written(each.environment[name]), () => false),
      this.app.selected().length > MOST ? el("p", { class: "quiet", text: `Only the first ${MOST} of the selected runs are shown.` }) : null);
  }

  table(title, names, found, value, differ) {
    return el("div", { class: "scroll texts", tabindex: "0" }, el("table", { class: "settings" },
      el("thead", {}, el("tr", {}, el("th", { text: title }), found.map((each) => el("th", { text: each.run })))),
      el("tbody", {}, names.map((name) => el("tr", { class: found.length > 1 && differ(name) ? "differs" : "" }, el("th", { text: name }), found.map((each) => el("td", { dir: "auto" }, el("code", { text: value(each, name) }))))))));
  }
}

function written(value) {
  if (value === undefined || value === null) return "not recorded";
  if (Array.isArray(value)) return value.join(" ");
  return typeof value === "object" ? Object.entries(value).map(([name, each]) => `${name} ${each}`).join(", ") : String(value);
}
