// The server's metrics over time: scraped once a second, kept for five minutes in this tab.

import { getText } from "./api.js";

const PERIOD_S = 1;
const KEPT_S = 300;
const PREFIX = "trtllm_";
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const COMMON = new Set(["model_name", "engine_type"]);

/** Values by `name` or `name{label=value,...}`, without the prefix and the labels that all series have. */
export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const labels = [...(found[2] ?? "").matchAll(LABEL)].filter(([, name]) => !COMMON.has(name)).map(([, name, value]) => `${name}=${value}`);
    const name = found[1].startsWith(PREFIX) ? found[1].slice(PREFIX.length) : found[1];
    values.set(labels.length ? `${name}{${labels.sort().join(",")}}` : name, Number(found[3]));
  }
  return values;
}

export class History {
  #listeners = new Set();
  #timer = 0;
  #isBusy = false;

  constructor() {
    /** Oldest first: { at, values }, `at` in seconds of this page's clock. */
    this.samples = [];
    this.error = null;
  }

  get last() {
    return this.samples.at(-1)?.values;
  }

  listen(listener) {
    this.#listeners.add(listener);
  }

  start() {
    this.#timer ||= setInterval(() => this.#scrape(), PERIOD_S * 1000);
    this.#scrape();
  }

  stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  async #scrape() {
    if (document.hidden || this.#isBusy) return;
    this.#isBusy = true;
    try {
      const values = parse(await getText("/metrics"));
      const at = performance.now() / 1000;
      if ((this.last?.get("steps_total") ?? 0) > (values.get("steps_total") ?? 0)) this.samples = []; // another start of the server
      this.samples.push({ at, values });
      while (this.samples[0].at < at - KEPT_S - 60) this.samples.shift();
      this.error = null;
    } catch (error) {
      this.error = error;
    } finally {
      this.#isBusy = false;
    }
    for (const listener of this.#listeners) listener(this);
  }

  /** The sample that is `span` seconds older than the one at `index`, or the oldest. */
  #before(index, span) {
    let earlier = index;
    while (earlier > 0 && this.samples[index].at - this.samples[earlier].at < span - PERIOD_S / 4) earlier -= 1;
    return this.samples[earlier];
  }

  /** By sample: [seconds ago, value]. */
  series(value) {
    const now = this.samples.at(-1)?.at ?? 0;
    return this.samples.map((sample, index) => [sample.at - now, value(sample, index)]);
  }

  gauge(name) {
    return this.series(({ values }) => values.get(name) ?? null);
  }

  /** A counter's growth per second over the last `span` seconds. */
  rate(name, span = 3) {
    return this.series((sample, index) => {
      const before = this.#before(index, span);
      return sample === before ? null : ((sample.values.get(name) ?? 0) - (before.values.get(name) ?? 0)) / (sample.at - before.at);
    });
  }

  /** The mean of what a histogram took in over the last `span` seconds; null where that is nothing. */
  mean(name, span = 15) {
    return this.series((sample, index) => {
      const before = this.#before(index, span);
      const grown = (suffix) => (sample.values.get(name + suffix) ?? 0) - (before.values.get(name + suffix) ?? 0);
      return grown("_count") > 0 ? grown("_sum") / grown("_count") : null;
    });
  }

  /** A quantile of it, as exact as the buckets are. */
  quantile(name, share, span = 15) {
    return this.series((sample, index) => quantileBetween(this.#before(index, span).values, sample.values, name, share));
  }
}

function quantileBetween(before, after, name, share) {
  const buckets = [];
  for (const [key, value] of after) {
    if (key.startsWith(`${name}_bucket{le=`)) buckets.push([Number(key.slice(`${name}_bucket{le=`.length, -1).replace("+Inf", "Infinity")), value - (before.get(key) ?? 0)]);
  }
  buckets.sort((one, other) => one[0] - other[0]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, counted] of buckets) {
    if (counted >= share * total) return bound === Infinity ? low : low + ((bound - low) * (share * total - below)) / Math.max(counted - below, 1);
    [low, below] = [bound, counted];
  }
  return low;
}
