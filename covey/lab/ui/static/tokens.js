// The view of tokens: one rollout, whose tokens are coloured by a value such as advantage or ratio.
import { api, el, fill, number, select, start, state, style, textBlock } from "./dom.js";
import { parts } from "./groups.js";

const RECORDED = { advantage: "advantage", sampler_logp: "log-prob (sampler)" };
const AGAIN = { ratio: "ratio", entropy: "entropy", kl: "KL", clipped: "clip", gradient: "gradient" };
const CENTRE = { ratio: 1, advantage: 0, gradient: 0, kl: 0 };
const MOST = 20000;

export class Tokens {
  constructor(groups) {
    this.groups = groups; this.timer = 0;
    this.node = el("section", { class: "tokens" });
  }

  async show(run, step, line) {
    clearTimeout(this.timer);
    let found;
    try { found = await api("rollout", { run, step, line }); } catch (error) { fill(this.node, this.back(), el("p", { class: "warn", text: error.message })); return; }
    this.found = found;
    const by = state.get("by", "advantage"), choices = { ...RECORDED, ...AGAIN };
    this.facts = el("p", { class: "facts", "aria-live": "polite", text: "Point at a token, or move to it with Tab, to see its numbers." });
    fill(this.node, this.back(),
      el("header", { class: "controls" }, el("span", { class: "field strong", text: `step ${step}, line ${line}` }), select("Colour by", choices, by, (value) => state.set({ by: value }, { replace: true })), this.again(run, step, line)),
      el("p", { class: "parts" }, [["reward", number(found.reward, 3)], ["advantage", number(found.advantage, 3)], ["tokens", found.ids.length], ["finish", found.finish || "?"], ["policy version", found.policy_version ?? "–"]].map(([name, value]) => el("span", {}, el("span", { class: "quiet", text: `${name} ` }), String(value)))),
      parts(found.parts), this.missing(by), el("h2", { text: "Prompt" }), textBlock(found.prompt), el("h2", { text: "Completion" }), this.legend(by), this.facts, this.cells(by),
      el("details", {}, el("summary", { text: "Completion as text" }), textBlock(found.text)));
    if (found.explain.state === "running") this.timer = setTimeout(() => this.show(run, step, line), 1000);
  }

  back() { return el("button", { type: "button", text: "‹ Back to the group", on: { click: () => state.set({ line: "" }) } }); }

  again(run, step, line) {
    const now = this.found.explain.state;
    if (now === "done") return el("span", { class: "quiet", text: this.found.explained ? "the step was trained again" : "the step did not train on this rollout" });
    if (now === "running") return el("span", { class: "quiet", role: "status", text: "training the step again …" });
    return el("span", { class: "field" }, el("button", { type: "button", id: "again", text: "Train the step again", title: "As covey explain does, from the nearest checkpoint", on: { click: async () => {
      try { await start("explain", { run, step }); } catch (error) { this.groups.app.notes([error.message]); }
      this.show(run, step, line);
    } } }), now === "failed" ? el("span", { class: "warn", text: this.found.explain.error }) : null);
  }

  missing(by) {
    const lacking = [...this.found.missing];
    if (AGAIN[by] && !this.found.explained) lacking.push(`${AGAIN[by]} of each token: "Train the step again" computes it from a checkpoint`);
    if (by === "advantage" && !this.found.explained) return el("p", { class: "quiet", text: `The run records one advantage for the whole rollout.${lacking.length ? ` It does not record ${lacking.join("; ")}.` : ""}` });
    return lacking.length ? el("p", { class: "warn", text: `The run does not record ${lacking.join("; ")}.` }) : null;
  }

  values(by) {
    const { explained, ids } = this.found;
    if (by === "sampler_logp") return this.found.sampler_logp;
    if (explained) return explained[by] ?? [];
    return by === "advantage" ? ids.map(() => this.found.advantage) : [];
  }

  legend(by) {
    const values = this.values(by).filter((value, i) => typeof value === "number" && this.found.trained[i]);
    if (by === "clipped") return el("p", { class: "quiet", text: "Marked: the ratio is clipped at its low or high bound, so the token has no gradient of the surrogate." });
    if (!values.length) return null;
    const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const scale = low === high ? [number(low)] : [`${number(low)} `, el("span", { class: CENTRE[by] === undefined ? "scale one" : "scale" }), ` ${number(high)}`];
    return el("p", { class: "quiet" }, `${{ ...RECORDED, ...AGAIN }[by]} `, scale, this.found.trained.every(Boolean) ? "" : "; dimmed tokens are not trained");
  }

  cells(by) {
    const { ids, texts, trained } = this.found, values = this.values(by), paint = painter(by, values, trained);
    const cells = ids.slice(0, MOST).map((id, i) => el("span", { class: trained[i] ? "token" : "token untrained", "data-i": i, tabindex: ids.length <= 2000 ? "0" : null, style: { background: trained[i] ? paint(values[i]) : "transparent" }, text: texts[i] === "" ? "∅" : texts[i].replaceAll("\n", "⏎\n") }));
    const point = (event) => { const i = event.target.dataset?.i; if (i !== undefined) this.facts.textContent = this.describe(Number(i)); };
    return el("div", { class: "cells", dir: "ltr", on: { pointerover: point, focusin: point, click: point } }, cells, ids.length > MOST ? el("p", { class: "quiet", text: `… ${(ids.length - MOST).toLocaleString("en")} more tokens` }) : null);
  }

  describe(i) {
    const { ids, texts, trained, sampler_logp: logp, explained } = this.found;
    const rows = [`token ${i + 1}: id ${ids[i]}, ${JSON.stringify(texts[i])}`];
    if (!trained[i]) return `${rows[0]}, not trained`;
    if (logp.length) rows.push(`probability ${(100 * Math.exp(logp[i])).toPrecision(3)}%`);
    for (const name of ["advantage", ...Object.keys(AGAIN)]) { const value = explained?.[name]?.[i]; if (value !== null && value !== undefined) rows.push(`${AGAIN[name] ?? name} ${typeof value === "number" ? number(value, 3) : value}`); }
    return rows.join(", ");
  }
}

// Blue above the middle value, orange below it; a single hue for values without a middle.
function painter(by, values, trained) {
  const known = values.filter((value, i) => typeof value === "number" && trained[i]);
  const mark = `color-mix(in srgb, ${style("--arm-3")} 55%, transparent)`;
  if (by === "clipped") return (value) => (value ? mark : "transparent");
  const middle = CENTRE[by], most = known.reduce((a, b) => Math.max(a, Math.abs(b - (middle ?? 0))), 1e-9);
  const hues = ["--arm-7", "--arm-0", "--arm-1"].map(style);
  return (value) => {
    if (typeof value !== "number") return "transparent";
    const away = value - (middle ?? 0), share = Math.round(65 * Math.min(1, Math.abs(away) / most));
    const positive = by === "gradient" ? away < 0 : away > 0;
    return `color-mix(in srgb, ${hues[middle === undefined ? 0 : positive ? 1 : 2]} ${share}%, transparent)`;
  };
}
