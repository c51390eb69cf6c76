// Where each token stands in the text, and what the model thought of it.

import { byId, h, percent } from "./dom.js";

const GAP = 8;

/** Finds the places of tokens as they come. Tokens that aren't in the text (markers, end tokens) have no place. */
export class Alignment {
  #decoder = new TextDecoder("utf-8", { fatal: false });
  #held = [];
  #waiting = [];
  #at = 0;

  constructor() {
    this.tokens = [];
    this.places = [];
  }

  /** `entries`: of `logprobs.content`. `text`: all of it up to now. */
  push(entries, text) {
    for (const entry of entries) {
      this.tokens.push(entry);
      this.#held.push(this.tokens.length - 1);
      const piece = this.#decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      if (piece) {
        this.#waiting.push({ tokens: this.#held, piece });
        this.#held = [];
      }
    }
    this.#settle(text);
  }

  #settle(text) {
    while (this.#waiting.length) {
      const { tokens, piece } = this.#waiting[0];
      if (text.startsWith(piece, this.#at)) {
        for (const token of tokens) this.places.push({ token, start: this.#at, end: this.#at + piece.length });
        this.#at += piece.length;
      } else if (piece.startsWith(text.slice(this.#at))) {
        return; // the rest of it may still come
      }
      this.#waiting.shift();
    }
  }

  /** The first place that ends behind `start`. */
  after(start) {
    let low = 0;
    let high = this.places.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.places[middle].end <= start) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** A `leaf` of markdown.js: the text with a span for each token that is known. `offset` is where the text begins. */
export function leafOf(source, alignment, offset) {
  return (parent, start, end) => {
    let at = start;
    for (let next = alignment.after(start + offset); next < alignment.places.length; next += 1) {
      const place = alignment.places[next];
      const from = Math.max(place.start - offset, at);
      const to = Math.min(place.end - offset, end);
      if (from >= end) break;
      if (from >= to) continue;
      if (from > at) parent.append(source.slice(at, from));
      const span = h("span", { class: "token", "data-token": place.token }, source.slice(from, to));
      span.style.setProperty("--doubt", doubt(alignment.tokens[place.token].logprob).toFixed(2));
      parent.append(span);
      at = to;
    }
    if (at < end) parent.append(source.slice(at, end));
  };
}

/** 0 where the model was sure, 1 where it would hardly have said this. */
function doubt(logprob) {
  return Math.min(1, Math.max(0, -logprob / 4));
}

/** A token as it can be read: blanks at its ends and line ends are seen. */
export function shown(text) {
  if (text === "") return "(nothing)";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));
}

/** Shows the alternatives of tokens within `root`, whose spans `tokenOf` knows. */
export function watchTokens(root, tokenOf) {
  let pinned = null;
  const show = (span) => {
    const entry = tokenOf(span);
    if (entry) open(span, entry);
  };
  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest?.(".token");
    if (span && !pinned) show(span);
  });
  root.addEventListener("pointerout", (event) => {
    if (!pinned && event.target.closest?.(".token")) close();
  });
  root.addEventListener("click", (event) => {
    const span = event.target.closest?.(".token");
    mark(pinned, false);
    pinned = span && span !== pinned ? span : null;
    if (pinned) {
      mark(pinned, true);
      show(pinned);
    } else {
      close();
    }
  });
  root.addEventListener("keydown", (event) => {
    const body = event.target.closest?.(".body");
    if (event.key === "Escape" && pinned) {
      mark(pinned, false);
      pinned = null;
      close();
    }
    if (!body || event.target !== body || !["ArrowRight", "ArrowLeft"].includes(event.key)) return;
    const spans = [...body.querySelectorAll(".token")];
    if (!spans.length) return;
    const now = spans.indexOf(pinned);
    const step = event.key === "ArrowRight" ? 1 : -1;
    mark(pinned, false);
    pinned = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.min(spans.length - 1, Math.max(0, now + step))];
    mark(pinned, true);
    pinned.scrollIntoView({ block: "nearest" });
    show(pinned);
    event.preventDefault();
  });
  root.addEventListener("focusout", () => {
    mark(pinned, false);
    pinned = null;
    close();
  });
  root.addEventListener("scroll", close, { passive: true });
}

function mark(span, on) {
  span?.classList.toggle("marked", on);
}

function open(span, entry) {
  const tip = byId("tip");
  tip.replaceChildren(...contents(entry));
  tip.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(GAP, box.left + box.width / 2 - width / 2), window.innerWidth - width - GAP);
  const above = box.top - height - GAP;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > GAP ? above : Math.min(box.bottom + GAP, window.innerHeight - height - GAP)}px`;
}

export function close() {
  byId("tip").hidden = true;
}

function contents(entry) {
  const share = Math.exp(entry.logprob);
  const others = entry.top_logprobs ?? [];
  const isListed = others.some((one) => one.token === entry.token && one.logprob === entry.logprob);
  const rows = isListed ? others : [...others, entry];
  const rest = 1 - rows.reduce((sum, one) => sum + Math.exp(one.logprob), 0);
  return [
    h("p", { class: "tip-head" }, h("code", null, shown(entry.token)), h("span", null, `${percent(share)} · log-probability ${entry.logprob.toFixed(3).replace("-", "−")}`)),
    others.length
      ? h("ol", { class: "options" }, rows.map((one) => option(one, one.token === entry.token && one.logprob === entry.logprob)), rest > 0.0005 && h("li", { class: "rest" }, h("span", null, "all others"), bar(rest), h("b", null, percent(rest))))
      : h("p", { class: "muted" }, "Choose how many alternatives to ask for in the settings."),
  ];
}

function option(one, isChosen) {
  const share = Math.exp(one.logprob);
  return h("li", { class: isChosen ? "chosen" : null }, h("code", null, shown(one.token)), bar(share), h("b", null, percent(share)));
}

function bar(share) {
  const drawn = h("i");
  drawn.style.setProperty("--share", share.toFixed(4));
  return drawn;
}
