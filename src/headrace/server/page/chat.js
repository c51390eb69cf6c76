// A conversation with the model, streamed.

import { ApiError, stream } from "./api.js";
import { announce, copy, count, h, number, seconds } from "./dom.js";
import { blocksOf, render } from "./markdown.js";
import { Settings } from "./settings.js";
import { Alignment, close, leafOf, watchTokens } from "./tokens.js";

const STARTERS = ["What is a headrace, and what is it for?", "Write a haiku about a river.", "List three uses of a water wheel."];
const PAINT_S = 0.06;
const ENDS = {
  stop: "finished",
  length: "cut off at max tokens: raise it in the settings",
  timeout: "cut off by the time limit",
  abort: "ended by the server",
  tool_calls: "waits for a tool",
  stopped: "stopped by you",
};

export class Chat {
  #turns = [];
  #controller = null;
  #model = "";
  #sticks = true;

  constructor(root) {
    this.settings = new Settings({
      requestBody: () => this.#request(this.#turns.filter((turn) => turn.isKept)),
      onShade: (is) => root.classList.toggle("shaded", is),
    });
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.box = h("textarea", { id: "message", rows: 1, placeholder: "Ask the model something", autocomplete: "off" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "stop", hidden: true, onclick: () => this.#controller?.abort() }, "Stop");
    this.clear = h("button", { type: "button", class: "quiet small", hidden: true, onclick: () => this.#clear() }, "New chat");
    const form = h("form", { class: "composer" },
      h("label", { for: "message", class: "sr" }, "Message"),
      h("div", { class: "write" }, this.box, this.send, this.stop),
      h("small", { class: "hint" }, "Enter sends, Shift and Enter begin a new line"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.box.addEventListener("input", () => this.#grow());
    this.log.addEventListener("scroll", () => {
      this.#sticks = this.log.scrollTop + this.log.clientHeight > this.log.scrollHeight - 40;
    });
    watchTokens(this.log, (span) => this.#turns[span.closest(".turn").dataset.turn]?.alignment.tokens[span.dataset.token]);
    root.append(h("div", { class: "talk" }, this.log, form), this.settings.element);
    this.settings.element.append(this.clear);
    this.#showEmpty();
  }

  set model(name) {
    if (name === this.#model) return;
    this.#model = name;
    if (!this.#turns.length) this.#showEmpty();
  }

  /** In words why nobody can be asked, or "" when the model can be. */
  set obstacle(text) {
    this.box.disabled = this.send.disabled = text !== "";
    this.box.placeholder = text || "Ask the model something";
    for (const button of this.log.querySelectorAll(".starters button")) button.disabled = text !== "";
  }

  #showEmpty() {
    this.log.replaceChildren(h("div", { class: "empty" },
      h("h2", null, this.#model ? `Talk to ${this.#model}` : "Talk to the model"),
      h("p", null, "What you write goes to this server and nowhere else, and stays on this page until you reload it."),
      h("ul", { class: "starters" }, STARTERS.map((text) => h("li", null, h("button", { type: "button", class: "quiet", disabled: this.box.disabled, onclick: () => this.#ask(text) }, text))))));
  }

  #clear() {
    this.#controller?.abort();
    close();
    this.#turns = [];
    this.clear.hidden = true;
    this.#showEmpty();
    this.box.focus();
  }

  #grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight + 2, 200)}px`;
  }

  #request(turns) {
    const messages = turns.map((turn) => ({ role: turn.role, content: turn.text }));
    if (this.settings.system.trim()) messages.unshift({ role: "system", content: this.settings.system });
    return { model: this.#model, messages, ...this.settings.body, stream: true, stream_options: { include_usage: true }, return_timing: true };
  }

  async #ask(text) {
    if (!text.trim() || this.#controller || this.box.disabled) return;
    if (!this.#turns.length) this.log.replaceChildren();
    this.box.value = "";
    this.#grow();
    this.#add(new Turn("user", text, "You"));
    await this.#answer();
  }

  #add(turn) {
    turn.element.dataset.turn = this.#turns.length;
    this.#turns.push(turn);
    this.log.append(turn.element);
    this.clear.hidden = false;
    this.#sticks = true;
    this.#follow();
    return turn;
  }

  async #answer() {
    const asked = this.#turns.filter((turn) => turn.isKept);
    const turn = this.#add(new Turn("assistant", "", this.#model || "Model"));
    const controller = (this.#controller = new AbortController());
    this.#busy(true);
    announce("The model answers.");
    try {
      for await (const event of stream("/v1/chat/completions", this.#request(asked), controller.signal)) {
        turn.take(event);
        turn.paintSoon(() => this.#follow());
      }
      turn.end();
    } catch (error) {
      if (error.name === "AbortError") turn.end("stopped");
      else turn.fail(error instanceof ApiError ? error.message : `Something went wrong on this page: ${error.message}`);
    }
    turn.actions(
      () => this.#again(turn),
      (button) => copy(turn.text, button),
    );
    announce(turn.error || `The answer is complete: ${count(turn.numTokens, "token")}.`);
    if (this.#controller === controller) {
      this.#controller = null;
      this.#busy(false);
      if (window.matchMedia("(pointer: fine)").matches) this.box.focus();
    }
    this.#follow();
  }

  /** The same question once more; the last answer goes. */
  #again(turn) {
    const at = this.#turns.indexOf(turn);
    if (this.#controller || at < 0) return;
    for (const gone of this.#turns.splice(at)) gone.element.remove();
    this.#answer();
  }

  #busy(is) {
    this.send.hidden = is;
    this.stop.hidden = !is;
    if (is) this.stop.focus();
  }

  #follow() {
    if (this.#sticks) this.log.scrollTop = this.log.scrollHeight;
  }
}

class Turn {
  #blocks = [];
  #timer = 0;
  #begun = performance.now();
  #first = 0;
  #last = 0;
  #finish = "";
  #usage = null;
  #calls = [];

  constructor(role, text, name) {
    this.role = role;
    this.text = text;
    this.reasoning = "";
    this.error = "";
    this.alignment = new Alignment();
    this.body = h("div", { class: "body" });
    this.thought = h("div", { class: "thought" });
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", null, "Reasoning"), this.thought);
    this.footer = h("footer");
    this.element = h("article", { class: `turn ${role}` }, h("h2", null, name), this.thinking, this.body, this.footer);
    if (role === "user") this.body.append(text);
    else this.element.classList.add("running");
  }

  /** Part of what later questions build on. */
  get isKept() {
    return this.text !== "" && !this.error;
  }

  get numTokens() {
    return this.#usage?.completion_tokens ?? this.alignment.tokens.length;
  }

  take(event) {
    const choice = event.choices?.[0];
    if (event.usage) this.#usage = event.usage;
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (content || thought || calls) {
      this.#last = performance.now();
      this.#first ||= this.#last;
    }
    this.text += content ?? "";
    this.reasoning += thought ?? "";
    for (const call of calls ?? []) {
      const known = (this.#calls[call.index] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    this.alignment.push(choice.logprobs?.content ?? [], this.reasoning + this.text);
    if (choice.finish_reason) this.#finish = choice.finish_reason;
  }

  paintSoon(then) {
    this.#timer ||= setTimeout(() => {
      this.#timer = 0;
      this.paint();
      then();
    }, PAINT_S * 1000);
  }

  /** Blocks that have not changed keep their elements: only the end of a text grows. */
  paint() {
    const source = this.text;
    const blocks = blocksOf(source);
    const leaf = leafOf(source, this.alignment, this.reasoning.length);
    let same = 0;
    while (same < blocks.length - 1 && same < this.#blocks.length - 1 && isSame(blocks[same], this.#blocks[same])) same += 1;
    while (this.body.childNodes.length > same) this.body.lastChild.remove();
    for (const block of blocks.slice(same)) this.body.append(render(source, block, leaf));
    this.#blocks = blocks;
    for (const call of this.#calls.filter(Boolean)) {
      this.body.append(h("figure", { class: "code" }, h("figcaption", null, `calls ${call.name}`), h("pre", { tabindex: "0" }, h("code", null, call.arguments))));
    }
    if (this.reasoning) {
      this.thinking.hidden = false;
      this.thought.replaceChildren();
      leafOf(this.reasoning, this.alignment, 0)(this.thought, 0, this.reasoning.length);
    }
  }

  end(finish = this.#finish) {
    clearTimeout(this.#timer);
    this.#finish = finish;
    this.paint();
    this.element.classList.remove("running");
    if (!this.text && !this.reasoning && !this.#calls.length) this.body.append(h("p", { class: "muted" }, finish === "stopped" ? "Stopped before the first token." : "The model ended its answer without a word."));
    if (this.alignment.tokens.length) {
      this.body.tabIndex = 0;
      this.body.setAttribute("aria-label", "Answer; with the arrow keys you go through its tokens");
    }
    this.footer.append(h("span", { class: "facts" }, this.#facts().join(" · ")));
  }

  fail(message) {
    this.error = message;
    this.end("");
    this.body.querySelector(".muted")?.remove();
    this.footer.replaceChildren(h("p", { class: "error", role: "alert" }, message));
  }

  #facts() {
    const facts = [];
    const tokens = this.numTokens;
    if (tokens) facts.push(count(tokens, "token"));
    const decode = this.#usage?.timing ? this.#usage.timing.decode_ms / 1000 : (this.#last - this.#first) / 1000;
    if (tokens > 1 && decode > 0) facts.push(`${number((tokens - 1) / decode)} a second`);
    if (this.#first) facts.push(`first after ${seconds((this.#first - this.#begun) / 1000)}`);
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    if (this.#usage) facts.push(`prompt ${count(this.#usage.prompt_tokens, "token")}${cached ? `, ${cached} of them cached` : ""}`);
    if (ENDS[this.#finish]) facts.push(ENDS[this.#finish]);
    return facts;
  }

  actions(again, copied) {
    const button = h("button", { type: "button", class: "quiet small" }, "Copy");
    button.addEventListener("click", () => copied(button));
    this.footer.append(h("span", { class: "acts" }, this.text && button, h("button", { type: "button", class: "quiet small again", onclick: again }, this.error ? "Try again" : "Ask again")));
  }
}

function isSame(one, other) {
  return one.kind === other.kind && one.from === other.from && one.to === other.to;
}
