"use strict";
// Draws the charts from the data embedded in the page, in the colours of its style sheet.
const data = JSON.parse(document.getElementById("chart-data").textContent);
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MARKS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down"];
const COLOURS = 8;
// An explicit list: some default buttons open other sites.
const CONFIG = { displaylogo: false, responsive: true,
                 modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const place = (arm) => data.arms.indexOf(arm);
const colour = (arm) => style(`--arm-${place(arm) % COLOURS}`);
const faint = (arm, share) => colour(arm) + Math.round(255 * share).toString(16).padStart(2, "0");
const narrow = () => window.innerWidth < 640;
// Plotly reads markup in labels, so names are escaped.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function layout(x, y, more) {
  const axis = { gridcolor: style("--grid"), linecolor: style("--line"), zeroline: false,
                 automargin: true, fixedrange: narrow() };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x",
           font: { color: style("--text"), family: getComputedStyle(document.body).fontFamily },
           hoverlabel: { bgcolor: style("--panel"), font: { color: style("--text") } },
           modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--text") },
           showlegend: false, margin: { l: 48, r: 12, t: 28, b: 40 },
           xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: y } }, ...more };
}

function curveTraces(axis) {
  const traces = [];
  for (const curve of data.curves) {
    const tint = colour(curve.arm), name = plain(curve.arm);
    for (const line of curve.lines) {
      traces.push({ x: line.x[axis], y: line.accuracy, mode: "lines", hoverinfo: "skip",
                    line: { color: faint(curve.arm, 0.45), width: 1,
                            dash: line.state === "done" ? "solid" : "dot" } });
    }
    const x = curve.x[axis];
    if (curve.lines.length > 1 && x.length) {
      traces.push({ x: [...x, ...x.slice().reverse()], y: [...curve.high, ...curve.low.slice().reverse()],
                    fill: "toself", fillcolor: faint(curve.arm, 0.13), line: { width: 0 },
                    mode: "lines", hoverinfo: "skip" });
    }
    traces.push({ x, y: curve.mean, name, mode: "lines+markers",
                  marker: { symbol: MARKS[place(curve.arm) % MARKS.length], size: 7, color: tint },
                  line: { color: tint, width: 2.5, dash: DASHES[Math.floor(place(curve.arm) / COLOURS)] },
                  hovertemplate: `${name}: %{y:${data.by === "reward" ? ".3f" : ".1%"}}<extra></extra>` });
  }
  return traces;
}

function drawCurves() {
  if (!document.getElementById("chart-curves")) return;  // no run was evaluated
  const chosen = document.querySelector("input[name=axis]:checked").value;
  const shares = data.by === "reward"
    ? { title: { text: "held-out mean reward" } }
    : { tickformat: ".0%", rangemode: "tozero", title: { text: "held-out accuracy" } };
  const percent = { yaxis: { ...layout("", "").yaxis, ...shares } };
  Plotly.react("chart-curves", curveTraces(chosen), layout(data.axes[chosen], "", percent), CONFIG);
}

function drawHealth() {
  Object.entries(data.health).forEach(([panel, trends], number) => {
    const traces = trends.map((trend) => ({
      x: trend.steps, y: trend.values, name: plain(trend.arm), mode: "lines",
      line: { color: colour(trend.arm), width: 1.75, dash: DASHES[place(trend.arm) % DASHES.length] },
      hovertemplate: `${plain(trend.arm)}: %{y:.4~g}<extra></extra>` }));
    const shape = layout("", "", { margin: { l: 44, r: 8, t: 4, b: 24 } });
    Plotly.react(`chart-health-${number}`, traces, shape, { ...CONFIG, displayModeBar: false });
  });
}

function draw() { drawCurves(); drawHealth(); }

for (const input of document.querySelectorAll("input[name=axis]")) {
  input.addEventListener("change", drawCurves);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
