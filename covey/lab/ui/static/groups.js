// The view of groups: the prompts of a step, the rollouts of a group, and the tokens of one.
import { api, debounce, el, fill, number, select, state, textBlock } from "./dom.js";
import { Tokens } from "./tokens.js";

const SORTS = { order: "file order", reward: "lowest reward", spread: "largest spread", length: "longest" };
const FILTERS = { all: "all", mixed: "rewards differ", flat: "rewards equal", correct: "all correct", wrong: "none correct", cut: "some cut off", unscored: "some unscored" };
const PART = /^(objective\/parts\/)/;

export class Groups {
  constructor(app) {
    this.app = app; this.timer = 0;
    this.controls = el("div", { class: "controls" });
    this.list = el("ol", { class: "groups" });
    this.detail = el("div", { class: "detail" });
    this.status = el("p", { class: "quiet", role: "status" });
    this.columns = el("div", { class: "split" }, el("div", {}, this.status, this.list), this.detail);
    this.tokens = new Tokens(this);
    this.node = el("div", {}, this.controls, this.columns, this.tokens.node);
  }

  get run() { return this.app.selected()[0]; }

  async show() {
    const run = this.run;
    if (!run) { fill(this.controls); fill(this.columns, el("p", { class: "quiet", text: "There is no run to show." })); return; }
    if (this.known !== `${run.id} ${run.changed}`) {
      try { this.details = await api("details", { run: run.id }); } catch (error) { this.app.notes([error.message]); return; }
      this.known = `${run.id} ${run.changed}`;
    }
    this.app.notes(this.details.notes.map((note) => `${run.id}: ${note}`));
    this.steps = this.details.steps;
    const step = this.step = Number(state.get("step")) || this.steps[this.steps.length - 1];
    this.bar(run, step);
    const line = state.get("line");
    this.columns.hidden = Boolean(line) || !this.steps.length; this.tokens.node.hidden = !line;
    if (!this.steps.length) { this.app.notes([...this.details.notes, "This run has no saved rollouts: save.rollouts is false, or no step has ended yet."]); return; }
    if (line) { this.tokens.show(run.id, step, Number(line)); return; }
    this.load();
    if (state.get("group")) this.open(state.get("group")); else fill(this.detail, el("p", { class: "quiet", text: "Choose a group to read its completions." }));
  }

  bar(run, step) {
    const place = this.steps.indexOf(step);
    const go = (turn) => { const next = this.steps[place + turn]; if (next !== undefined) state.set({ step: next, group: "", line: "", start: "" }); };
    this.go = go;
    fill(this.controls,
      el("span", { class: "field strong", text: run.id }),
      el("span", { class: "field" }, el("button", { type: "button", text: "‹", "aria-label": "Previous step", disabled: place <= 0, on: { click: () => go(-1) } }),
        el("label", {}, "step ", el("input", { id: "step", type: "number", value: step ?? "", min: this.steps[0], max: this.steps[this.steps.length - 1], on: { change: (event) => this.jump(Number(event.target.value)) } })),
        el("span", { class: "quiet", text: this.steps.length ? `of ${this.steps[0]} to ${this.steps[this.steps.length - 1]}` : "" }),
        el("button", { type: "button", text: "›", "aria-label": "Next step", disabled: place < 0 || place >= this.steps.length - 1, on: { click: () => go(1) } })),
      select("Sort", SORTS, state.get("sort", "order"), (value) => state.set({ sort: value === "order" ? "" : value, start: "" })),
      select("Show", FILTERS, state.get("filter", "all"), (value) => state.set({ filter: value === "all" ? "" : value, start: "" })),
      el("input", { id: "search", type: "search", placeholder: "Search prompts and completions", "aria-label": "Search prompts and completions", value: state.get("q"), on: { input: debounce((event) => this.search(event.target.value), 300) } }));
    if (this.searching) { const box = this.controls.querySelector("#search"); box.focus(); this.searching = false; }
  }

  search(words) { this.searching = true; state.set({ q: words, start: "", group: "" }, { replace: true }); }

  jump(wanted) {
    if (!this.steps.length) return;
    const near = this.steps.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    state.set({ step: near, group: "", line: "", start: "" });
  }

  async load() {
    clearTimeout(this.timer);
    const query = { run: this.run.id, step: this.step, sort: state.get("sort"), filter: state.get("filter"), search: state.get("q"), start: state.get("start") };
    let found;
    try { found = await api("groups", query); } catch (error) { fill(this.list); this.status.textContent = error.message; return; }
    const seen = found.total ? `Groups ${found.start + 1} to ${found.start + found.groups.length} of ${found.total}` : "No group";
    const some = found.total === found.all ? "" : ` (${found.all} in the step)`;
    this.status.textContent = `${seen}${some}, ${found.rollouts.toLocaleString("en")} rollouts${found.partial ? `; reading, ${Math.round(100 * found.read)} %` : ""}${found.searched ? "" : "; the search took too long and stopped"}`;
    if (found.notes.length) this.app.notes(found.notes);
    this.found = found.groups;
    const chosen = state.get("group");
    fill(this.list, found.groups.map((group) => this.row(group, group.prompt_id === chosen)), this.pages(found));
    if (found.partial && this.node.isConnected && !state.get("line")) this.timer = setTimeout(() => this.load(), 30);
  }

  pages(found) {
    if (found.total <= found.page) return null;
    const button = (text, to) => el("button", { type: "button", text, disabled: to < 0 || to >= found.total, on: { click: () => state.set({ start: to || "", group: "" }) } });
    return el("li", { class: "pages" }, button("Previous", found.start - found.page), button("Next", found.start + found.page));
  }

  row(group, on) {
    const strip = el("span", { class: "strip", "aria-hidden": "true" }, group.rewards.map((reward) => el("i", { style: { background: shade(reward, group.rewards) } })));
    return el("li", {}, el("button", { type: "button", class: on ? "group on" : "group", "aria-expanded": String(on), on: { click: () => state.set({ group: on ? "" : group.prompt_id }) } },
      el("span", { class: "prompt-line", dir: "auto", text: group.prompt || "(empty prompt)" }), strip,
      el("small", { text: `${group.correct} of ${group.size} correct · mean ${number(group.mean, 3)} ± ${number(group.spread, 2)} · ${group.length.toFixed(0)} tokens${group.cut ? ` · ${group.cut} cut off` : ""}` })));
  }

  async open(id) {
    let group;
    try { group = await api("group", { run: this.run.id, step: this.step, prompt_id: id }); } catch (error) { fill(this.detail, el("p", { class: "warn", text: error.message })); return; }
    fill(this.detail, el("h2", { text: "Prompt" }), textBlock(group.prompt), el("p", {}, el("span", { class: "quiet", text: "target " }), el("code", { text: group.target.text || "none" })),
      el("h2", { text: `${group.rollouts.length + group.left_out} rollouts` }), group.rollouts.map((each) => this.rollout(each)),
      group.left_out ? el("p", { class: "quiet", text: `${group.left_out} more rollouts are left out` }) : null);
    if (innerWidth <= 1000) this.detail.scrollIntoView({ block: "start" });
  }

  rollout(each) {
    const mark = each.success === true ? "correct" : each.success === false ? "incorrect" : "quiet";
    const word = each.reward === null ? "not scored" : each.success ? "✓ correct" : "✗ incorrect";
    return el("article", { class: "rollout" },
      el("header", {}, el("span", { class: mark, text: word }), el("span", { text: `reward ${number(each.reward, 3)}` }),
        el("span", { text: `advantage ${each.advantage === null ? "– (not trained)" : number(each.advantage, 3)}` }), el("span", { class: "quiet", text: `${each.tokens} tokens, ${each.finish || "?"}` }),
        el("button", { type: "button", class: "small", text: "Tokens", on: { click: () => state.set({ line: each.line }) } })),
      parts(each.parts), each.turns.length ? each.turns.map(turn) : textBlock(each.text), each.error ? el("p", { class: "warn", text: `environment: ${each.error}` }) : null);
  }

  key(event) {
    if (event.key === "[") this.go?.(-1);
    if (event.key === "]") this.go?.(1);
    if (event.key === "Escape" && state.get("line")) state.set({ line: "" });
    else if (event.key === "Escape") state.set({ group: "" });
    if ((event.key === "j" || event.key === "k") && this.found?.length) {
      const place = this.found.findIndex((group) => group.prompt_id === state.get("group")), next = this.found[Math.max(0, place + (event.key === "j" ? 1 : -1))];
      if (next) { state.set({ group: next.prompt_id }); }
    }
  }
}

export function parts(values) {
  const rows = Object.entries(values);
  return rows.length ? el("p", { class: "parts" }, rows.map(([name, value]) => el("span", {}, el("span", { class: "quiet", text: `${name.replace(PART, "")} ` }), number(value, 3)))) : null;
}

export function turn(each) {
  const own = each.role === "assistant";
  return el("div", { class: own ? "turn" : "turn dim" }, el("p", { class: "quiet", text: `${each.role}, ${each.stop - each.start} tokens${own ? "" : ", not trained"}${each.reward === null ? "" : `, turn reward ${number(each.reward, 3)}`}` }),
    textBlock(each.text), each.calls.map((call) => el("pre", { class: "text call", text: call })));
}

function shade(reward, all) {
  if (reward === null) return "var(--line)";
  const known = all.filter((each) => each !== null), low = Math.min(...known, 0), high = Math.max(...known, 1);
  const share = Math.round(100 * ((reward - low) / (high - low)));
  return `color-mix(in srgb, var(--correct) ${share}%, var(--incorrect))`;
}
