// What a chat is asked with: the controls, and the request that they make.

import { copy, h, store, stored } from "./dom.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", help: "0 always takes the likeliest token.", type: "range", min: 0, max: 2, step: 0.05, start: 0.7, always: true },
  { name: "max_tokens", label: "Max tokens", help: "Where an answer is cut off.", type: "number", min: 1, step: 1, start: 512, always: true },
  { name: "top_p", label: "Top p", help: "Only the likeliest tokens that together have this share.", type: "range", min: 0.01, max: 1, step: 0.01, start: 1 },
  { name: "top_k", label: "Top k", help: "Only so many of the likeliest tokens; 0 is all.", type: "number", min: 0, step: 1, start: 0 },
  { name: "min_p", label: "Min p", help: "Only tokens with this share of the likeliest one's probability.", type: "range", min: 0, max: 1, step: 0.01, start: 0 },
  { name: "seed", label: "Seed", help: "The same seed gives the same answer; empty is another each time.", type: "number", step: 1, start: "" },
  { name: "stop", label: "Stop at", help: "Texts that end the answer, one a line.", type: "lines", start: "" },
];
const PENALTIES = [
  { name: "repetition_penalty", label: "Repetition", help: "Above 1, what has been said is less likely.", type: "range", min: 0.5, max: 2, step: 0.05, start: 1 },
  { name: "presence_penalty", label: "Presence", help: "Taken from each token that has been said.", type: "range", min: -2, max: 2, step: 0.1, start: 0 },
  { name: "frequency_penalty", label: "Frequency", help: "Taken once for each time that it has been said.", type: "range", min: -2, max: 2, step: 0.1, start: 0 },
];
const ALL = [...FIELDS, ...PENALTIES];
const STARTS = { system: "", alternatives: "5", shade: "", ...Object.fromEntries(ALL.map((field) => [field.name, String(field.start)])) };

export class Settings {
  #inputs = {};
  #values;
  #onShade;

  /** `requestBody()`: the request that would be sent now. `onShade(is)`: tokens are to be coloured, or not. */
  constructor({ requestBody, onShade }) {
    this.#values = { ...STARTS, ...JSON.parse(stored("settings") ?? "{}") };
    this.#onShade = onShade;
    const curl = h("button", { type: "button", class: "quiet" }, "Copy as curl");
    curl.addEventListener("click", () => copy(asCurl(requestBody()), curl));
    const reset = h("button", { type: "button", class: "quiet", onclick: () => this.#reset() }, "Reset");
    const isWide = window.matchMedia("(min-width: 900px)").matches;
    this.element = h("aside", { class: "settings", "aria-label": "Settings of the chat" },
      h("details", { open: isWide }, h("summary", null, "Settings"),
        h("div", { class: "fields" },
          this.#system(),
          FIELDS.map((field) => this.#field(field)),
          h("details", { class: "inner" }, h("summary", null, "Penalties"), PENALTIES.map((field) => this.#field(field))),
          this.#alternatives(),
          this.#shade(),
          h("div", { class: "row" }, curl, reset))));
    onShade(this.#values.shade === "on");
  }

  /** Fields of a request's body; what says nothing is left out. */
  get body() {
    const body = {};
    for (const field of ALL) {
      const value = this.#values[field.name].trim();
      if (!field.always && (value === "" || value === String(field.start))) continue;
      if (field.type === "lines") body[field.name] = value.split("\n").filter((line) => line !== "");
      else if (value !== "" && Number.isFinite(Number(value))) body[field.name] = Number(value);
    }
    if (this.#values.alternatives !== "off") {
      body.logprobs = true;
      body.top_logprobs = Number(this.#values.alternatives);
    }
    return body;
  }

  get system() {
    return this.#values.system;
  }

  #keep(name, value) {
    this.#values[name] = value;
    store("settings", JSON.stringify(this.#values));
  }

  #reset() {
    for (const [name, value] of Object.entries(STARTS)) {
      this.#keep(name, value);
      for (const input of this.#inputs[name]) {
        if (input.type === "checkbox") input.checked = value === "on";
        else input.value = value;
      }
    }
    this.#onShade(false);
  }

  #system() {
    const area = h("textarea", { id: "set-system", rows: 3, placeholder: "Say how the model should answer" });
    area.value = this.#values.system;
    area.addEventListener("input", () => this.#keep("system", area.value));
    this.#inputs.system = [area];
    return h("div", { class: "field" }, h("label", { for: area.id }, "System prompt"), area);
  }

  #field(field) {
    const id = `set-${field.name}`;
    const help = h("small", { id: `${id}-help` }, field.help);
    const limits = { min: field.min, max: field.max, step: field.step, "aria-describedby": help.id };
    if (field.type === "lines") {
      const area = h("textarea", { id, rows: 2, "aria-describedby": help.id });
      this.#bind(field.name, [area]);
      return h("div", { class: "field" }, h("label", { for: id }, field.label), area, help);
    }
    const box = h("input", { id, type: "number", inputmode: "decimal", ...limits });
    const slider = field.type === "range" && h("input", { type: "range", "aria-label": field.label, ...limits });
    this.#bind(field.name, slider ? [box, slider] : [box]);
    return h("div", { class: "field" }, h("div", { class: "row" }, h("label", { for: id }, field.label), box), slider, help);
  }

  #bind(name, inputs) {
    this.#inputs[name] = inputs;
    for (const input of inputs) {
      input.value = this.#values[name];
      input.addEventListener("input", () => {
        this.#keep(name, input.value);
        for (const other of inputs) if (other !== input && input.value !== "") other.value = input.value;
      });
    }
  }

  #alternatives() {
    const select = h("select", { id: "set-alternatives" },
      h("option", { value: "off" }, "don't ask"), [0, 1, 3, 5, 10, 20].map((count) => h("option", { value: count }, count === 0 ? "the token's own" : `and ${count} likeliest`)));
    this.#bind("alternatives", [select]);
    return h("div", { class: "field" }, h("div", { class: "row" }, h("label", { for: select.id }, "Log-probabilities"), select), h("small", null, "Point at a token of an answer, or tap it, to see what else was likely."));
  }

  #shade() {
    const box = h("input", { type: "checkbox", id: "set-shade" });
    box.checked = this.#values.shade === "on";
    box.addEventListener("change", () => {
      this.#keep("shade", box.checked ? "on" : "");
      this.#onShade(box.checked);
    });
    this.#inputs.shade = [box];
    return h("label", { class: "check", for: box.id }, box, " Shade unlikely tokens");
  }
}

function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -sN ${location.origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json' -H "Authorization: Bearer $HEADRACE_API_KEY" \\\n  -d '${json}'`;
}
