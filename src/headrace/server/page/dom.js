// Elements and numbers. All text comes in as text nodes: nothing on this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Keys of `props` that begin with "on" are listeners, `class` and `aria-*` are attributes, others too. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function icon(path) {
  return svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: path }));
}

export const byId = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 1,234 or 12.3 or 0.042: three digits that matter, and no more. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return whole.format(value);
  return value.toFixed(size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1%";
  return `${Number(value.toFixed(value < 10 ? 1 : 0))}%`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${(value / 60).toFixed(1)} min`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? whole.format(value) : value.toFixed(1)} ${units[at]}`;
}

/** 1 block, 2 blocks. */
export function count(value, noun, plural = `${noun}s`) {
  return `${whole.format(value)} ${value === 1 ? noun : plural}`;
}

export function announce(text) {
  byId("announcer").textContent = text;
}

/** Settings of this tab (or, with `localStorage`, of this browser); a browser that keeps nothing has none. */
export function stored(name, store = sessionStorage) {
  try {
    return store.getItem(`headrace.${name}`);
  } catch {
    return null;
  }
}

export function store(name, value, target = sessionStorage) {
  try {
    if (value === null) target.removeItem(`headrace.${name}`);
    else target.setItem(`headrace.${name}`, value);
  } catch {
    // Nothing is kept then.
  }
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Can't copy here";
  }
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}
