// The KV cache: a map of its blocks by tier and layer group, and the top of the prefix tree.

import { getJson } from "./api.js";
import { bytes, count, h, number, percent } from "./dom.js";

const PERIOD_S = 2;
const MAX_HEIGHT = 264;
const TIERS = { device: "Device", host: "Host", disk: "Disk" };

export class Cache {
  #timer = 0;
  #pools = h("div", { class: "pools" });
  #tree = h("div", { class: "tree-box" });
  #error = h("p", { class: "error", role: "alert", hidden: true });
  #maps = new Map();
  #told = "";

  constructor(root) {
    root.append(
      h("header", { class: "head" }, h("h2", null, "KV cache"),
        h("ul", { class: "legend" }, h("li", { class: "kv-used" }, h("i"), "Used by requests"), h("li", { class: "kv-cached" }, h("i"), "Cached, reusable"), h("li", { class: "kv-free" }, h("i"), "Free"))),
      this.#error,
      this.#pools,
      h("section", { class: "card", "aria-label": "Prefix tree" }, h("h3", null, "Prefix tree"), this.#tree),
    );
  }

  show() {
    this.#load();
    this.#timer ||= setInterval(() => this.#load(), PERIOD_S * 1000);
  }

  hide() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  async #load() {
    if (document.hidden) return;
    let map;
    try {
      map = await getJson("/kv_cache/map");
    } catch (error) {
      this.#error.textContent = error.message;
      this.#error.hidden = false;
      return;
    }
    this.#error.hidden = true;
    this.#showPools(map);
    const told = JSON.stringify(map.prefixes);
    if (told !== this.#told) this.#tree.replaceChildren(...treeOf(map)); // what is looked at keeps its place
    this.#told = told;
  }

  #showPools(map) {
    const several = new Set(map.pools.map((pool) => pool.section)).size > 1;
    const known = new Set();
    for (const pool of map.pools) {
      const name = `${pool.section}/${pool.tier}/${pool.group}`;
      known.add(name);
      let view = this.#maps.get(name);
      if (!view) {
        view = new PoolView(pool, { several, tokensPerBlock: map.tokens_per_block });
        this.#maps.set(name, view);
        this.#pools.append(view.element);
      }
      view.show(pool);
    }
    for (const [name, view] of this.#maps) {
      if (!known.has(name)) {
        view.element.remove();
        this.#maps.delete(name);
      }
    }
    if (!map.pools.length) this.#pools.replaceChildren(h("p", { class: "card vacant" }, "This engine tells of no KV blocks."));
  }
}

class PoolView {
  #pool = null;
  #size = { cell: 0, columns: 1 };

  constructor(pool, { several, tokensPerBlock }) {
    this.canvas = h("canvas", { role: "img" });
    this.under = h("p", { class: "under muted" });
    this.bar = h("div", { class: "share", "aria-hidden": "true" }, h("i", { class: "kv-used" }), h("i", { class: "kv-cached" }));
    this.counts = h("p", { class: "counts" });
    const window_ = pool.window ? `window of ${number(pool.window)} tokens` : pool.kind === "recurrent" ? "states" : "all tokens";
    const kind = pool.kind === "recurrent" ? "recurrent" : pool.kind === "heads" ? "attention" : pool.kind;
    this.note = `${count(pool.num_layers, "layer")}, ${kind}, ${window_}, ${pool.dtype}; blocks of ${tokensPerBlock} tokens, ${bytes(pool.block_bytes)} each`;
    this.element = h("section", { class: "card pool", "aria-label": `${TIERS[pool.tier]}, group ${pool.group}` },
      h("h3", null, `${TIERS[pool.tier]} · group ${pool.group}${several ? ` · rank ${pool.section}` : ""}`),
      h("small", { class: "muted" }, this.note), this.bar, this.counts, this.canvas, this.under);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#rest());
    new ResizeObserver(() => this.#draw()).observe(this.element);
    window.addEventListener("themechange", () => this.#draw());
  }

  show(pool) {
    this.#pool = pool;
    const [used, cached] = this.bar.children;
    used.style.width = `${(100 * pool.num_used) / (pool.num_total || 1)}%`;
    cached.style.width = `${(100 * pool.num_cached) / (pool.num_total || 1)}%`;
    const share = (value) => percent(value / (pool.num_total || 1));
    this.counts.replaceChildren(
      ...[["Used", pool.num_used, "used"], ["Cached", pool.num_cached, "cached"], ["Free", pool.num_free, "free"]].map(([name, value, state]) =>
        h("span", { "data-state": state, "data-count": value }, `${name} `, h("b", null, number(value)), ` ${share(value)}`)),
      h("span", { "data-state": "total", "data-count": pool.num_total }, "of ", h("b", null, number(pool.num_total)), pool.num_pinned ? `, ${number(pool.num_pinned)} pinned` : ""),
    );
    this.canvas.hidden = !pool.used.length;
    this.canvas.setAttribute("aria-label", `${number(pool.num_used)} used, ${number(pool.num_cached)} cached and ${number(pool.num_free)} free blocks`);
    this.#rest();
    this.#draw();
  }

  #rest() {
    const { used, num_total: total, blocks_per_cell: size } = this.#pool;
    this.under.textContent = !used.length
      ? total ? "Too many blocks to draw; the counts are exact." : "This pool has no blocks."
      : size === 1 ? "Each square is a block." : `Each square is ${size} blocks next to each other.`;
  }

  #point(event) {
    const { cell, columns } = this.#size;
    const at = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
    const { used, cached, num_total: total, blocks_per_cell: size } = this.#pool;
    if (at >= used.length) return this.#rest();
    const first = at * size + 1;
    const last = Math.min(total, first + size - 1);
    const free = last - first + 1 - used[at] - cached[at];
    this.under.textContent = first === last
      ? `Block ${first}: ${used[at] ? "used" : cached[at] ? "cached" : "free"}`
      : `Blocks ${number(first)} to ${number(last)}: ${used[at]} used, ${cached[at]} cached, ${free} free`;
  }

  /** As large as the cells may be for all to fit. */
  #draw() {
    const pool = this.#pool;
    const width = Math.floor(this.element.clientWidth - 32);
    if (!pool?.used.length || width < 60) return;
    let cell = 16;
    while (cell > 4 && Math.ceil(pool.used.length / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell -= 1;
    const columns = Math.floor(width / cell);
    const height = Math.ceil(pool.used.length / columns) * cell;
    this.#size = { cell, columns };
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(this.element);
    const colours = ["--kv-used", "--kv-cached", "--kv-free"].map((name) => style.getPropertyValue(name));
    const side = cell - (cell > 6 ? 2 : 1);
    pool.used.forEach((used, at) => {
      const blocks = Math.min(pool.blocks_per_cell, pool.num_total - at * pool.blocks_per_cell);
      const left = (at % columns) * cell;
      const top = Math.floor(at / columns) * cell;
      let down = side;
      for (const [colour, share] of [[colours[0], used / blocks], [colours[1], pool.cached[at] / blocks], [colours[2], 1]]) {
        const part = Math.min(down, share === 1 ? side : Math.ceil(side * share));
        if (part <= 0) continue;
        pen.fillStyle = colour;
        pen.fillRect(left, top + down - part, side, part);
        down -= part;
      }
    });
  }
}

function treeOf(map) {
  if (!map.block_reuse) return [h("p", { class: "vacant" }, "Prefix reuse is off (kv_cache_config.enable_block_reuse): nothing is kept after a request.")];
  if (!map.prefixes.some((prefix) => prefix.parent >= 0)) {
    return [h("p", { class: "vacant" }, `Nothing is cached yet. Prefixes appear once a request has filled a block of ${map.tokens_per_block} tokens, or has ended.`)];
  }
  const below = map.prefixes.map(() => []);
  map.prefixes.forEach((prefix, at) => prefix.parent >= 0 && below[prefix.parent].push(at));
  const longest = Math.max(...map.prefixes.map((prefix) => prefix.start + prefix.num_tokens));
  const list = (places, missing) =>
    h("ul", null, places.map((at) => h("li", null, row(map.prefixes[at], longest), (below[at].length || map.prefixes[at].num_below > 0) && list(below[at], map.prefixes[at].num_below - below[at].length))),
      missing > 0 && h("li", { class: "more" }, `and ${count(missing, "branch", "branches")} more`));
  const spaces = map.prefixes.flatMap((prefix, at) => (prefix.parent < 0 && below[at].length ? [at] : []));
  const parts = spaces.map((at) => h("div", { class: "space" }, h("h4", null, spaceName(map.prefixes[at], map)), list(below[at], map.prefixes[at].num_below - below[at].length)));
  const notes = [];
  if (map.num_hidden) notes.push(map.is_own_only ? `${count(map.num_hidden, "namespace")} of other API keys or conversations not shown.` : `${count(map.num_hidden, "more namespace")} not shown.`);
  if (!map.has_text) notes.push("Texts are hidden; a name stands for a prefix until the server restarts. The server shows texts when it is started with --show_cached_text.");
  return [...parts, ...notes.map((note) => h("p", { class: "muted" }, note))];
}

function spaceName(space, map) {
  const parts = [space.is_private ? "One conversation's or request's own" : space.is_own ? (map.is_own_only ? "Of your API key" : "Shared by all") : space.is_salted ? `Salt ${space.name}` : "Shared"];
  if (space.adapter) parts.push(`adapter ${space.adapter}`);
  return parts.join(" · ");
}

function row(prefix, longest) {
  const reach = h("i");
  reach.style.marginLeft = `${(100 * prefix.start) / longest}%`;
  reach.style.width = `${Math.max((100 * prefix.num_tokens) / longest, 1)}%`;
  return h("div", { class: "prefix" },
    h("code", { class: "name" }, prefix.name),
    h("span", { class: "length", title: `tokens ${prefix.start + 1} to ${prefix.start + prefix.num_tokens}` }, count(prefix.num_tokens, "token")),
    h("span", { class: "reach", "aria-hidden": "true" }, reach),
    h("span", { class: "where" },
      prefix.num_holders > 0 && h("em", { class: "held" }, prefix.num_holders === 1 ? "in use" : `in use ×${prefix.num_holders}`),
      prefix.on_tier.map((blocks, tier) => blocks > 0 && h("em", null, `${count(blocks, "block")}${tier ? ` on ${Object.keys(TIERS)[tier]}` : ""}`))),
    prefix.text && h("q", { title: prefix.text }, prefix.text.replaceAll("\n", "⏎")));
}
