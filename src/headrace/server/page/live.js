// What the engine does now, and did in the last minutes.

import { Chart } from "./chart.js";
import { bytes, h, number, percent, seconds } from "./dom.js";

const TTFT = "time_to_first_token_seconds";
const REASONS = { stop: "ended by themselves", length: "cut off at their length", abort: "ended from outside", timeout: "out of time", error: "failed" };

export class Live {
  #history;
  #tiles = {};
  #charts;
  #facts = h("dl", { class: "facts-list" });
  #isShown = false;

  constructor(root, history) {
    this.#history = history;
    const tile = (name, label) => {
      this.#tiles[name] = { value: h("b", null, "–"), note: h("small", null, "\u00a0") };
      return h("div", { class: "card tile" }, h("span", null, label), this.#tiles[name].value, this.#tiles[name].note);
    };
    this.#charts = {
      tokens: new Chart({ title: "Tokens per second", note: "all requests", format: number, top: 10, series: [{ name: "Output", line: 1 }, { name: "Prompt", line: 2 }] }),
      first: new Chart({ title: "Time to first token", note: "of the last 15 s", format: seconds, top: 0.05, series: [{ name: "Mean", line: 1 }, { name: "95%", line: 2 }] }),
      requests: new Chart({ title: "Requests", note: "sequences", format: number, whole: true, top: 4, series: [{ name: "Running", line: 1 }, { name: "Waiting", line: 2 }] }),
      blocks: new Chart({ title: "KV blocks", note: "share of the device's", format: percent, top: 0.1, series: [{ name: "Used", line: 1 }, { name: "Cached", line: 3 }] }),
    };
    const spans = h("select", { id: "span", onchange: (event) => this.#setSpan(Number(event.target.value)) },
      [[60, "1 minute"], [120, "2 minutes"], [300, "5 minutes"]].map(([value, text]) => h("option", { value, selected: value === 120 }, text)));
    root.append(
      h("header", { class: "head" }, h("h2", null, "Live"), h("div", { class: "row" }, h("label", { for: "span" }, "Show the last"), spans)),
      h("div", { class: "tiles" }, tile("output", "Output tokens / s"), tile("first", "Time to first token"), tile("running", "Running"), tile("waiting", "Waiting"), tile("blocks", "KV blocks used"), tile("hits", "Prompt found in cache")),
      h("div", { class: "charts" }, Object.values(this.#charts).map((chart) => chart.element)),
      h("section", { class: "card", "aria-label": "Since the start" }, h("h3", null, "Since the start"), this.#facts),
    );
    history.listen(() => this.#isShown && this.#update());
  }

  show() {
    this.#isShown = true;
    if (this.#history.last) this.#update();
  }

  hide() {
    this.#isShown = false;
  }

  #setSpan(value) {
    for (const chart of Object.values(this.#charts)) chart.span = value;
    this.#update();
  }

  #update() {
    const values = this.#history.last;
    if (!values) return;
    const history = this.#history;
    const get = (name) => values.get(name) ?? 0;
    const output = history.rate("step_tokens_total{kind=generation}");
    const prompt = history.rate("step_tokens_total{kind=context}");
    const mean = history.mean(TTFT);
    const high = history.quantile(TTFT, 0.95);
    const total = get("kv_cache_max_blocks") || 1;
    const none = "No request in this time. Send one from Chat, or with any OpenAI client.";
    this.#charts.tokens.show([output, prompt], "Measuring…");
    this.#charts.first.show([mean, high], none);
    this.#charts.requests.show([history.gauge("num_requests_running"), history.gauge("num_requests_waiting")], none);
    this.#charts.blocks.show(["used", "cached"].map((state) => history.series((sample) => (sample.values.get(`kv_cache_${state}_blocks`) ?? 0) / (sample.values.get("kv_cache_max_blocks") || 1))), none);
    this.#tile("output", number(last(output) ?? 0), `${number(last(prompt) ?? 0)} prompt tokens\u00a0/\u00a0s`);
    this.#tile("first", seconds(last(mean)), last(mean) === null ? "no request of late" : `95% within ${seconds(last(high))}`);
    this.#tile("running", number(get("num_requests_running")), `of at most ${number(get("max_num_active_requests"))}`);
    this.#tile("waiting", number(get("num_requests_waiting")), get("request_queue_time_seconds_count") ? `${seconds(get("request_queue_time_seconds_sum") / get("request_queue_time_seconds_count"))} on average` : "nobody has waited");
    this.#tile("blocks", percent(get("kv_cache_used_blocks") / total), `${percent(get("kv_cache_cached_blocks") / total)} cached, ${percent(get("kv_cache_free_blocks") / total)} free`);
    this.#tile("hits", percent(get("kv_cache_hit_rate")), "of all prompt tokens");
    this.#list(values, get);
  }

  #tile(name, value, note) {
    this.#tiles[name].value.textContent = value;
    this.#tiles[name].note.textContent = note;
  }

  #list(values, get) {
    const facts = [["Requests accepted", number(get("requests_accepted_total"))]];
    for (const [reason, words] of Object.entries(REASONS)) facts.push([`… ${words}`, number(get(`requests_total{finish_reason=${reason}}`))]);
    for (const [name, value] of values) {
      const code = /^request_error_total\{http_code=(\d+)\}$/.exec(name)?.[1];
      if (code && value) facts.push([`Answers with status ${code}`, number(value)]);
    }
    facts.push(
      ["Prompt tokens computed", number(get("step_tokens_total{kind=context}"))],
      ["Output tokens", number(get("step_tokens_total{kind=generation}"))],
      ["Steps", number(get("steps_total"))],
      ["Last step", seconds(get("iteration_latency_seconds"))],
      ["Requests paused for want of blocks", number(get("num_requests_preempted_total"))],
      ["Stalls", number(get("engine_stalls_total"))],
      ["Steps without a CUDA graph that should have one", number(get("eager_fallbacks_total"))],
      ["Evicted blocks", number(get("kv_cache_evicted_blocks_total"))],
      ["To and from the host", `${bytes(get("kv_cache_offload_bytes_total"))} down, ${bytes(get("kv_cache_onboard_bytes_total"))} up`],
      ["Memory of the runtime's process", bytes(get("cpu_memory_usage_bytes"))],
    );
    this.#facts.replaceChildren(...facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
  }
}

function last(series) {
  return series.at(-1)?.[1] ?? null;
}
