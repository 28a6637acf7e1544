// Elements, requests and the state of the page. Text always becomes a text node, never markup.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [kind, act] of Object.entries(value)) node.addEventListener(kind, act);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "value" || name === "checked" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const fill = (node, ...children) => node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
export const byId = (id) => document.getElementById(id);

export async function api(path, query = {}, options = {}) {
  const address = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value !== undefined && value !== "") address.set(name, value);
  const reply = await fetch(`/api/${path}?${address}`, options);
  const data = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
  if (!reply.ok) throw new Error(data.error);
  return data;
}
export const start = (path, query) => api(path, query, { method: "POST", headers: { "X-Covey": "1" } });

// The part of the address after # stores the state of the page, so that a link restores it.
export const state = {
  read: () => new URLSearchParams(location.hash.slice(1)),
  get: (name, usual = "") => state.read().get(name) ?? usual,
  all: (name) => state.read().getAll(name),
  set(changes, { replace = false } = {}) {
    const now = state.read();
    for (const [name, value] of Object.entries(changes)) {
      now.delete(name);
      for (const each of Array.isArray(value) ? value : [value]) if (each !== "" && each !== null && each !== undefined) now.append(name, each);
    }
    const address = `#${now}`;
    if (address === location.hash) return;
    if (replace) { history.replaceState(null, "", address); dispatchEvent(new HashChangeEvent("hashchange")); }
    else location.hash = address;
  },
};

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// Charts read colours hundreds of times, so they are cached until the colour scheme changes.
const styles = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => styles.clear());
export function style(name) {
  if (!styles.get(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}
export const COLOURS = 8;
export const colour = (place) => style(`--arm-${place % COLOURS}`);
export const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
export const dash = (place) => DASHES[Math.floor(place / COLOURS) % DASHES.length];

export function debounce(act, wait = 120) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => act(...given), wait); };
}

// A text that may be cut off, with the number of characters that are left out.
export function textBlock(cut, props = {}) {
  const more = cut.more ? `\n… ${cut.more.toLocaleString("en")} more characters` : "";
  return el("pre", { class: "text", dir: "auto", ...props, text: (cut.text || "(nothing)") + more });
}

// Choices are { value: text }, or pairs if values look like numbers, which an object would sort.
export function select(label, choices, value, act) {
  const options = (Array.isArray(choices) ? choices : Object.entries(choices)).map(([key, text]) => el("option", { value: key, selected: key === value, text }));
  return el("label", { class: "field" }, el("span", { text: label }), el("select", { on: { change: (event) => act(event.target.value) } }, options));
}
