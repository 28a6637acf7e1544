// The step explorer: one small step, computed by the objective code that trains.
import { api, debounce, el, fill, number, select } from "./dom.js";

const START = { algorithm: "grpo", rewards: [1, 0, 0, 1, 0, 0], lengths: [4, 8, 6, 5, 7, 3], drift: 0.3 };
const MOST = 16, LONGEST = 16;
const CLIP = { low: "clipped at the low bound", high: "clipped at the high bound", dual: "clipped by the dual bound" };
const WORDS = { clip_low: "Clip below 1 −", clip_high: "Clip above 1 +", beta: "KL coefficient β", drift: "Policy moved since sampling" };

// An entry of the legend: a token with a bar, stripes or a ratio, and what it means.
function sample(bar, text, kind = "", ratio = "") {
  return el("li", {}, el("span", { class: `legend-token ${kind}`, "aria-hidden": "true" }, bar ? el("i", { class: bar, style: { height: "32%" } }) : null, el("small", { text: ratio })), el("span", { text }));
}

// `fixed` lists the choices of a page with precomputed results: name -> label and pairs.
export class Explorer {
  constructor(compute = (query) => api("explore", query), fixed = null) {
    this.compute = compute; this.fixed = fixed; this.asked = structuredClone(START); this.given = {};
    this.chosen = Object.fromEntries(Object.entries(fixed ?? {}).map(([name, { choices }]) => [name, choices[0][0]]));
    this.controls = el("div", { class: "controls" }); this.picture = el("div", { class: "step-picture" });
    this.status = el("p", { class: "quiet", role: "status" });
    this.node = el("div", { class: "explorer" },
      el("p", { text: "One optimizer step on one group of completions. Change a reward, the clip range or the algorithm to see how the gradient of each token changes." }),
      this.controls, this.status, this.picture,
      el("ul", { class: "token-legend", "aria-label": "Legend" }, sample("up", "the step makes the token likelier"), sample("down", "the step makes it less likely"), sample("", "clipped", "clipped"), sample("", "ratio of the token's probabilities, now to sampling, as the algorithm uses it", "", "1.35")),
      el("p", { class: "quiet", text: "The height of a bar is minus the gradient of the loss with respect to the token's log-probability, relative to the largest one in the picture." }));
    this.changed = debounce(() => this.ask(), 15);
  }

  show() { if (!this.answer) this.ask(); }

  question() { return this.fixed ? { ...this.chosen } : { algorithm: this.asked.algorithm, rewards: this.asked.rewards.join(), lengths: this.asked.lengths.join(), drift: this.asked.drift, ...this.given }; }

  async ask() {
    if (!this.answer) this.status.textContent = "starting torch …";
    const asked = this.last = this.question();
    try {
      const answer = await this.compute(asked);
      if (asked !== this.last) return;
      this.answer = answer; this.status.textContent = `loss ${number(answer.loss, 4)}`;
    } catch (error) { this.status.textContent = error.message; return; }
    this.bar(); this.draw();
  }

  bar() {
    if (this.fixed) {
      fill(this.controls, Object.entries(this.fixed).map(([name, { label, choices }]) => select(label, choices, this.chosen[name], (value) => { this.chosen[name] = value; this.changed(); })));
      return;
    }
    const { algorithms, options } = this.answer, key = JSON.stringify([this.answer.algorithm, this.asked.rewards.length]);
    if (key === this.drawn) return;
    this.drawn = key;
    const names = Object.fromEntries(algorithms.map((name) => [name, name]));
    fill(this.controls, select("Algorithm", names, this.asked.algorithm, (value) => { this.asked.algorithm = value; this.given = {}; this.changed(); }),
      this.slider("Group size", 2, MOST, 1, this.asked.rewards.length, (value) => this.resize(value)),
      this.slider(WORDS.drift, 0, 1, 0.05, this.asked.drift, (value) => { this.asked.drift = value; this.changed(); }),
      Object.entries(options).map(([name, usual]) => { const most = name === "beta" ? 0.5 : Math.max(0.6, usual); const step = usual && usual < 0.01 ? usual / 4 : 0.01; return this.slider(WORDS[name], 0, usual && usual < 0.01 ? usual * 40 : most, step, this.given[name] ?? usual, (value) => { this.given[name] = value; this.changed(); }); }));
  }

  slider(label, low, high, step, value, act) {
    const shown = el("output", { text: number(value, 3) });
    return el("label", { class: "field" }, el("span", { text: label }), el("input", { type: "range", min: low, max: high, step, value, "data-name": label, on: { input: (event) => { shown.textContent = number(Number(event.target.value), 3); act(Number(event.target.value)); } } }), shown);
  }

  resize(count) {
    const { rewards, lengths } = this.asked;
    while (rewards.length < count) { rewards.push(rewards.length % 3 ? 0 : 1); lengths.push(START.lengths[rewards.length % START.lengths.length]); }
    rewards.length = lengths.length = count;
    this.changed();
  }

  draw() {
    const rows = this.answer.rows, most = Math.max(1e-12, ...rows.flatMap((row) => row.gradient.map(Math.abs)));
    const focus = document.activeElement?.dataset?.focus;
    fill(this.picture, el("div", { class: "step-row head" }, el("span", { text: "reward" }), el("span", { text: "advantage" }), el("span", { text: "tokens" })), rows.map((row, i) => {
      const first = row.advantage[0]; // equal values have exactly this mean
      const mean = first + row.advantage.reduce((sum, value) => sum + (value - first), 0) / row.advantage.length;
      const reward = el("input", { type: "number", min: 0, max: 1, step: 0.1, value: row.reward, disabled: Boolean(this.fixed), "aria-label": `Reward of completion ${i + 1}`, "data-focus": `r${i}`, on: { input: (event) => { if (event.target.value === "") return; this.asked.rewards[i] = Number(event.target.value); this.changed(); } } });
      const length = (turn) => { this.asked.lengths[i] = Math.min(LONGEST, Math.max(1, this.asked.lengths[i] + turn)); this.changed(); };
      return el("div", { class: "step-row" }, el("span", { class: "reward" }, reward),
        el("span", { class: mean >= 0 ? "correct" : "incorrect", text: `${mean >= 0 ? "+" : ""}${number(mean, 3)}` }),
        el("span", { class: "step-tokens" }, row.gradient.map((slope, t) => this.token(row, slope, t, most)),
          this.fixed ? null : el("button", { type: "button", class: "small", text: "−", "aria-label": `Shorten completion ${i + 1}`, on: { click: () => length(-1) } }), this.fixed ? null : el("button", { type: "button", class: "small", text: "+", "aria-label": `Lengthen completion ${i + 1}`, on: { click: () => length(1) } })));
    }));
    if (focus) this.picture.querySelector(`[data-focus="${focus}"]`)?.focus();
  }

  token(row, slope, t, most) {
    const size = Math.round(38 * (Math.abs(slope) / most)), up = slope < 0, clip = CLIP[row.clipped[t]];
    const told = `token ${t + 1}: ratio ${number(row.ratio[t], 3)}, advantage ${number(row.advantage[t], 3)}, gradient ${number(slope, 3)}${clip ? `, ${clip}` : ""}`;
    return el("span", { class: clip ? "step-token clipped" : "step-token", title: told, role: "img", "aria-label": told, "data-gradient": slope },
      el("i", { class: up ? "up" : "down", style: { height: `${size}%` } }), el("small", { text: number(row.ratio[t], 3) }));
  }
}
