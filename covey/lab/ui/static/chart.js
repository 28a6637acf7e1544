// A line chart on a canvas: bands, a cursor by mouse or keyboard, and zoom by dragging.
import { el, number, style } from "./dom.js";

const PAD = { left: 52, right: 14, top: 8, bottom: 22 };
const MOST_NAMED = 10;

export function ticks(low, high, count, least = 0) {
  const rough = Math.max(least, (high - low) / Math.max(1, count)), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? power;
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + 1e-9 * step; n += 1) found.push(n * step);
  return found;
}

const charts = new WeakMap(), waiting = new Set();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect: { width, height } } of entries) {
    const chart = charts.get(target), box = target.getBoundingClientRect();
    Object.assign(chart, { size: width ? { width, height } : null, stale: true, seen: box.top < innerHeight && box.bottom > 0 });
    chart.drawNow();
  }
});
const sights = new IntersectionObserver((entries) => { for (const entry of entries) { const chart = charts.get(entry.target); chart.seen = entry.isIntersecting; chart.drawNow(); } });

export class Chart {
  constructor({ title, help = "", percent = false, healthy = null, onZoom = () => {}, onReset = () => {} }) {
    Object.assign(this, { title, percent, healthy, lines: [], cursor: null, log: false, drag: null });
    this.canvas = el("canvas", { class: "plot", tabindex: "0", role: "img" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.last = el("span", { class: "last" });
    this.node = el("figure", { class: "panel" },
      el("figcaption", { title: help }, el("span", { class: "name", text: title }), this.last),
      el("div", { class: "plotbox" }, this.canvas, this.tip));
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => { this.move(at(event)); });
    this.canvas.addEventListener("pointerleave", () => { this.drag = null; this.move(null); });
    this.canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.drag = at(event); });
    this.canvas.addEventListener("pointerup", (event) => {
      const from = this.drag, to = at(event);
      this.drag = null;
      if (from !== null && Math.abs(to - from) > 8) onZoom(...[from, to].map((p) => this.unscaled(p)).sort((a, b) => a - b));
    });
    this.canvas.addEventListener("dblclick", onReset);
    this.canvas.addEventListener("keydown", (event) => this.key(event, onReset));
    this.canvas.addEventListener("blur", () => this.move(null));
    sizes.observe(this.canvas); sights.observe(this.canvas);
    charts.set(this.canvas, this);
  }

  // Charts are drawn once a frame, and only those in sight; the others are drawn when they are scrolled to.
  later() {
    this.stale = true;
    if (!waiting.size) requestAnimationFrame(() => { const due = [...waiting]; waiting.clear(); for (const chart of due) chart.drawNow(); });
    waiting.add(this);
  }
  drawNow() { if (this.stale && this.size && this.seen) { this.stale = false; this.draw(); } }

  set(lines, { log = false, between = null } = {}) {
    this.lines = lines.filter((line) => line.x.length);
    Object.assign(this, { log, between });
    const first = this.lines[0], value = first ? first.y[first.y.length - 1] : null;
    this.last.textContent = this.lines.length === 1 ? this.shown(value) : "";
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.lines.map((line) => `${line.name} ${this.shown(line.y[line.y.length - 1])}`).slice(0, 5).join(", ") || "no data"}`);
    this.later();
  }

  shown(value) { return this.percent && value !== null ? `${(100 * value).toFixed(1)}%` : number(value); }
  value(y) { return this.log ? Math.log10(Math.max(y, 1e-12)) : y; }

  range() {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const line of this.lines) {
      x0 = Math.min(x0, line.x[0]); x1 = Math.max(x1, line.x[line.x.length - 1]);
      for (const part of [line.y, line.low, line.high]) {
        for (const y of part ?? []) {
          if (this.log && !(y > 0)) continue;
          const v = this.value(y);
          if (v < y0) y0 = v;
          if (v > y1) y1 = v;
        }
      }
    }
    if (this.between) [x0, x1] = [Math.max(x0, this.between[0]), Math.min(x1, this.between[1])];
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const flat = y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1)); // a smoothed constant varies by rounding errors
    if (flat && y1 === 0 && !this.log) return { x0, x1, y0: -0.06, y1: 1.06 }; // around zero, only larger values matter
    const gap = flat ? Math.abs(y1) * 0.1 || 0.5 : 0.06 * (y1 - y0);
    return { x0, x1, y0: y0 - gap, y1: y1 + gap };
  }

  draw() {
    const box = this.size, scale = devicePixelRatio || 1;
    this.canvas.width = box.width * scale; this.canvas.height = box.height * scale;
    const g = this.canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "11px system-ui, sans-serif";
    if (!this.lines.length) { g.fillStyle = style("--quiet"); g.fillText("no data", PAD.left, box.height / 2); return; }
    this.view = this.range();
    this.axes(g);
    g.save();
    g.beginPath(); g.rect(PAD.left - 4, PAD.top - 4, this.inner().width + 8, this.inner().height + 8); g.clip();
    this.bounds(g);
    for (const line of this.lines) this.band(g, line);
    for (const line of this.lines) this.stroke(g, line);
    if (this.cursor !== null) this.mark(g);
    g.restore();
  }

  inner() { return { width: this.size.width - PAD.left - PAD.right, height: this.size.height - PAD.top - PAD.bottom }; }
  px(x) { return PAD.left + ((x - this.view.x0) / (this.view.x1 - this.view.x0)) * this.inner().width; }
  py(y) { return PAD.top + (1 - (this.value(y) - this.view.y0) / (this.view.y1 - this.view.y0)) * this.inner().height; }
  unscaled(p) { return this.view.x0 + ((p - PAD.left) / this.inner().width) * (this.view.x1 - this.view.x0); }

  axes(g) {
    const { x0, x1, y0, y1 } = this.view;
    g.strokeStyle = style("--grid"); g.fillStyle = style("--quiet"); g.lineWidth = 1;
    g.textAlign = "right"; g.textBaseline = "middle";
    for (const y of ticks(y0, y1, 4)) {
      const p = PAD.top + (1 - (y - y0) / (y1 - y0)) * this.inner().height;
      g.beginPath(); g.moveTo(PAD.left, p); g.lineTo(this.size.width - PAD.right, p); g.stroke();
      g.fillText(this.shown(this.log ? 10 ** y : Number(y.toPrecision(12))), PAD.left - 6, p);
    }
    g.textAlign = "center"; g.textBaseline = "top";
    const whole = this.lines.every((line) => [line.x[0], line.x[line.x.length - 1]].every(Number.isInteger)); // so that no tick is at step 1.5
    for (const x of ticks(x0, x1, Math.max(2, this.inner().width / 90), whole ? 1 : 0)) {
      g.fillText(x >= 1e5 ? number(x, 3) : Number(x.toPrecision(12)).toLocaleString("en"), this.px(x), this.size.height - PAD.bottom + 6);
    }
  }

  bounds(g) {
    g.strokeStyle = style("--incorrect"); g.lineWidth = 1; g.setLineDash([2, 4]);
    for (const bound of this.healthy ?? []) {
      if (bound === null || this.value(bound) < this.view.y0 || this.value(bound) > this.view.y1) continue;
      g.beginPath(); g.moveTo(PAD.left, this.py(bound)); g.lineTo(this.size.width, this.py(bound)); g.stroke();
    }
    g.setLineDash([]);
  }

  band(g, line) {
    if (!line.low) return;
    g.beginPath();
    line.x.forEach((x, i) => g.lineTo(this.px(x), this.py(line.high[i])));
    for (let i = line.x.length - 1; i >= 0; i -= 1) g.lineTo(this.px(line.x[i]), this.py(line.low[i]));
    g.globalAlpha = 0.13; g.fillStyle = line.colour; g.fill(); g.globalAlpha = 1;
  }

  stroke(g, line) {
    g.beginPath();
    let down = false;
    line.x.forEach((x, i) => {
      if (line.y[i] === null || (this.log && !(line.y[i] > 0))) { down = false; return; }
      if (down) g.lineTo(this.px(x), this.py(line.y[i])); else g.moveTo(this.px(x), this.py(line.y[i]));
      down = true;
    });
    g.strokeStyle = line.colour; g.lineWidth = line.faint ? 1 : 1.8; g.globalAlpha = line.faint ? 0.35 : 1;
    g.setLineDash(line.dash ?? []); g.stroke(); g.setLineDash([]); g.globalAlpha = 1;
    if (line.dots || line.x.length === 1) for (const [i, x] of line.x.entries()) { g.beginPath(); g.arc(this.px(x), this.py(line.y[i]), 3, 0, 7); g.fillStyle = line.colour; g.fill(); }
  }

  move(p) {
    if (!this.lines.length || !this.view) return;
    this.cursor = p === null ? null : this.unscaled(p);
    this.later();
    this.tip.hidden = this.cursor === null;
    if (this.cursor === null) return;
    const rows = this.near().sort((a, b) => b.y - a.y), left = p > this.size.width / 2;
    const at = rows.length ? rows[0].x : this.cursor;
    this.tip.replaceChildren(el("div", { class: "quiet", text: Number(at.toPrecision(7)).toLocaleString("en") }),
      ...rows.slice(0, MOST_NAMED).map((row) => el("div", {}, el("span", { class: "key", style: { background: row.line.colour } }), `${this.shown(row.y)}  ${row.line.name}`)),
      ...(rows.length > MOST_NAMED ? [el("div", { class: "quiet", text: `and ${rows.length - MOST_NAMED} more` })] : []));
    this.tip.style.setProperty("left", left ? "auto" : `${p + 14}px`);
    this.tip.style.setProperty("right", left ? `${this.size.width - p + 14}px` : "auto");
  }

  near() {
    return this.lines.filter((line) => !line.faint).map((line) => {
      let low = 0, high = line.x.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] < this.cursor) low = middle; else high = middle; }
      const i = Math.abs(line.x[low] - this.cursor) <= Math.abs(line.x[high] - this.cursor) ? low : high;
      return { line, i, x: line.x[i], y: line.y[i] };
    });
  }

  mark(g) {
    g.strokeStyle = style("--line"); g.lineWidth = 1;
    if (this.drag !== null) { g.fillStyle = style("--link"); g.globalAlpha = 0.12; g.fillRect(this.drag, 0, this.px(this.cursor) - this.drag, this.size.height); g.globalAlpha = 1; }
    const rows = this.near(), x = rows.length ? this.px(rows[0].x) : this.px(this.cursor);
    g.beginPath(); g.moveTo(x, 0); g.lineTo(x, this.size.height); g.stroke();
    for (const row of rows) { g.beginPath(); g.arc(this.px(row.x), this.py(row.y), 3.5, 0, 7); g.fillStyle = row.line.colour; g.fill(); }
  }

  key(event, onReset) {
    if (event.key === "Escape") { onReset(); return; }
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!turn || !this.lines.length) return;
    event.preventDefault();
    const line = this.lines[0], rows = this.cursor === null ? null : this.near()[0];
    const i = rows ? Math.min(line.x.length - 1, Math.max(0, rows.i + turn)) : line.x.length - 1;
    this.move(this.px(line.x[i]));
  }
}
