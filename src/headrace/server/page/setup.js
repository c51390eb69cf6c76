// What the server settled on: the model, its limits, memory, and every setting.

import { getJson } from "./api.js";
import { bytes, copy, count, h, number, seconds } from "./dom.js";

export class Setup {
  #body = h("div", { class: "stack" });
  #isLoaded = false;

  constructor(root) {
    root.append(h("header", { class: "head" }, h("h2", null, "Setup")), this.#body);
  }

  async show() {
    if (this.#isLoaded) return;
    try {
      this.#render(await getJson("/server_info"));
      this.#isLoaded = true;
    } catch (error) {
      this.#body.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
  }

  hide() {}

  /** Another key, another server: read again. */
  forget() {
    this.#isLoaded = false;
  }

  #render(info) {
    const kv = info.kv_cache;
    const facts = [
      ["Model", info.model],
      ["Architecture", info.model_type],
      ["Name in the API", info.served_model_name],
      ["Longest sequence", `${number(info.max_seq_len)} tokens`],
      ["Most sequences in a step", number(info.max_batch_size)],
      ["Most tokens in a step", number(info.max_num_tokens)],
      ["KV\u00a0cache", `${number(kv.max_tokens)} tokens in ${number(kv.num_blocks)} blocks of ${kv.tokens_per_block}`],
      ["Prefix reuse", kv.block_reuse ? `from ${count(kv.reuse_granularity, "token")}` : "off"],
      ["Start took", seconds(info.startup_s)],
      ["Headrace", info.version],
    ];
    this.#body.replaceChildren(
      h("section", { class: "card", "aria-label": "Model" }, h("h3", null, "Model"), h("dl", { class: "facts-list" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value)))))),
      memoryOf(info.memory),
      settingsOf(info),
    );
  }
}

function memoryOf(memory) {
  const rows = memory?.rows ?? [];
  if (!rows.length) return "";
  const total = rows.reduce((sum, row) => sum + row.bytes, 0) || 1;
  return h("section", { class: "card", "aria-label": "Memory" },
    h("h3", null, "Memory"), h("small", { class: "muted" }, memory.device ?? ""),
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Memory plan" }, h("table", { class: "memory" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Use"), h("th", { scope: "col", class: "end" }, "Size"), h("th", { scope: "col", class: "meter" }, h("span", { class: "sr" }, "Share")), h("th", { scope: "col" }, "Note"))),
      h("tbody", null, rows.map((row) => {
        const bar = h("i");
        bar.style.width = `${(100 * row.bytes) / total}%`;
        return h("tr", null, h("th", { scope: "row" }, row.use, row.tier && row.tier !== "device" ? h("small", null, ` ${row.tier}`) : ""), h("td", { class: "end" }, bytes(row.bytes)), h("td", { class: "meter" }, h("span", null, bar)), h("td", { class: "muted" }, row.note));
      })))));
}

/** All settings with a filter. Nested ones have dotted names, as `--set` takes them. */
function settingsOf(info) {
  const all = [...flat(info.configuration, ""), ...flat(info.server, "")].sort(([one], [other]) => one.localeCompare(other));
  const body = h("tbody");
  const shown = h("small", { class: "muted", role: "status" });
  const rows = all.map(([name, value]) => ({ name, element: h("tr", null, h("th", { scope: "row" }, h("code", null, name)), h("td", null, h("code", { class: value === null || value === false ? "off" : null }, typeof value === "string" ? value || '""' : JSON.stringify(value)))) }));
  const filter = h("input", { type: "search", id: "filter", placeholder: "for example kv_cache", autocomplete: "off", spellcheck: "false" });
  const apply = () => {
    const wanted = filter.value.trim().toLowerCase();
    const kept = rows.filter((row) => row.name.toLowerCase().includes(wanted));
    body.replaceChildren(...kept.map((row) => row.element));
    shown.textContent = kept.length ? `${kept.length} of ${rows.length} settings` : `None of ${rows.length} settings has “${filter.value}” in its name: clear the filter.`;
  };
  filter.addEventListener("input", apply);
  apply();
  const button = h("button", { type: "button", class: "quiet" }, "Copy as JSON");
  button.addEventListener("click", () => copy(JSON.stringify({ configuration: info.configuration, server: info.server }, null, 2), button));
  return h("section", { class: "card", "aria-label": "Configuration" },
    h("div", { class: "row spread" }, h("h3", null, "Configuration"), button),
    h("div", { class: "row" }, h("label", { for: "filter" }, "Filter"), filter, shown),
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Settings" }, h("table", { class: "settings-table" }, h("thead", { class: "sr" }, h("tr", null, h("th", null, "Setting"), h("th", null, "Value"))), body)));
}

function flat(values, prefix) {
  return Object.entries(values ?? {}).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]]);
}
