// A small Markdown: paragraphs, headings, lists, quotes, tables, code, bold, italics, links. It never makes text: it finds
// ranges of the source, and `leaf(parent, start, end)` puts them in, so that each token's place is known.

import { h } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Top-level blocks in order, each with the range [from, to) of the source that it is made of. */
export function blocksOf(source) {
  const lines = linesOf(source);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const begin = at;
    const block = blockAt(source, lines, at);
    at = block.next;
    if (block.kind !== "blank") blocks.push({ ...block, from: lines[begin].start, to: lines[at - 1].end });
  }
  return blocks;
}

function linesOf(source) {
  const lines = [];
  for (let start = 0; start <= source.length; ) {
    const found = source.indexOf("\n", start);
    const end = found < 0 ? source.length : found;
    lines.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

function blockAt(source, lines, at) {
  const { text, start, end } = lines[at];
  if (!text.trim()) return { kind: "blank", next: at + 1 };
  const fence = FENCE.exec(text);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(text);
  if (heading) return { kind: "heading", level: heading[1].length, start: start + heading[0].length, end, next: at + 1 };
  if (RULE.test(text)) return { kind: "rule", next: at + 1 };
  if (ITEM.test(text)) return listAt(lines, at);
  if (QUOTE.test(text)) return quoteAt(lines, at);
  if (text.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1].text) && lines[at + 1].text.includes("-")) {
    return tableAt(lines, at);
  }
  let next = at + 1;
  while (next < lines.length && continuesParagraph(lines[next].text)) next += 1;
  return { kind: "paragraph", lines: lines.slice(at, next), next };
}

function continuesParagraph(text) {
  return text.trim() && !FENCE.test(text) && !HEADING.test(text) && !RULE.test(text) && !ITEM.test(text) && !QUOTE.test(text);
}

function codeAt(lines, at, fence) {
  let next = at + 1;
  const closing = new RegExp(`^ {0,3}\\${fence[2][0]}{${fence[2].length},}\\s*$`);
  while (next < lines.length && !closing.test(lines[next].text)) next += 1;
  const first = lines[at + 1];
  const start = first && next > at + 1 ? first.start : lines[at].end;
  const end = next > at + 1 ? lines[next - 1].end : start;
  return { kind: "code", language: fence[3].trim(), start, end, next: Math.min(next + 1, lines.length) };
}

/** Items with what is indented below them; a deeper item makes a list of its own. */
function listAt(lines, at) {
  const items = [];
  const ordered = ITEM.exec(lines[at].text)[2] !== undefined;
  const first = Number(ITEM.exec(lines[at].text)[2] ?? 1);
  let next = at;
  for (; next < lines.length; next += 1) {
    const { text, start, end } = lines[next];
    const item = ITEM.exec(text);
    if (item && !RULE.test(text)) {
      if (!item[1] && (item[2] !== undefined) !== ordered) break;
      items.push({ depth: Math.min(Math.floor(item[1].replace(/\t/g, "    ").length / 2), 6), ordered: item[2] !== undefined, lines: [{ start: start + item[0].length, end }] });
    } else if (text.trim() && (/^\s/.test(text) || lines[next - 1].text.trim())) {
      if (!continuesParagraph(text)) break;
      items.at(-1).lines.push({ start: start + text.length - text.trimStart().length, end });
    } else if (text.trim() || !(lines[next + 1] && (ITEM.test(lines[next + 1].text) || /^\s+\S/.test(lines[next + 1].text)))) {
      break;
    }
  }
  return { kind: "list", ordered, first, items, next };
}

function quoteAt(lines, at) {
  let next = at;
  const inner = [];
  for (; next < lines.length && QUOTE.test(lines[next].text); next += 1) {
    const marker = QUOTE.exec(lines[next].text)[0].length;
    inner.push({ start: lines[next].start + marker, end: lines[next].end });
  }
  return { kind: "quote", lines: inner, next };
}

function tableAt(lines, at) {
  const rows = [cellsOf(lines[at])];
  let next = at + 2;
  for (; next < lines.length && lines[next].text.includes("|"); next += 1) rows.push(cellsOf(lines[next]));
  return { kind: "table", rows, next };
}

function cellsOf({ text, start }) {
  const cells = [];
  const trimmed = text.trimEnd();
  let from = /^\s*\|/.exec(trimmed)?.[0].length ?? 0;
  while (from < trimmed.length) {
    const bar = trimmed.indexOf("|", from);
    const to = bar < 0 ? trimmed.length : bar;
    const part = trimmed.slice(from, to);
    cells.push({ start: start + from + (part.length - part.trimStart().length), end: start + from + part.trimEnd().length });
    from = to + 1;
  }
  return cells.map(({ start: first, end }) => ({ start: first, end: Math.max(first, end) }));
}

/** The element of a block. */
export function render(source, block, leaf) {
  const put = (parent, start, end) => inline(source, start, end, parent, leaf);
  switch (block.kind) {
    case "heading": {
      const element = h(`h${Math.min(block.level + 2, 6)}`);
      put(element, block.start, block.end);
      return element;
    }
    case "rule":
      return h("hr");
    case "code": {
      const code = h("code");
      leaf(code, block.start, block.end);
      return h("figure", { class: "code" }, h("figcaption", null, block.language || "text"), h("pre", { tabindex: "0" }, code));
    }
    case "list":
      return renderList(block, put);
    case "quote":
      return withLines(h("blockquote"), block.lines, put);
    case "table":
      return renderTable(block, put);
    default:
      return withLines(h("p"), block.lines, put);
  }
}

function withLines(element, lines, put) {
  lines.forEach(({ start, end }, at) => {
    if (at) element.append(h("br"));
    put(element, start, end);
  });
  return element;
}

function renderList(block, put) {
  const list = h(block.ordered ? "ol" : "ul", block.ordered && block.first !== 1 ? { start: block.first } : null);
  const stack = [{ list, depth: block.items[0].depth }];
  for (const item of block.items) {
    while (stack.length > 1 && item.depth < stack.at(-1).depth) stack.pop();
    if (item.depth > stack.at(-1).depth && stack.at(-1).list.lastElementChild) {
      const below = h(item.ordered ? "ol" : "ul");
      stack.at(-1).list.lastElementChild.append(below);
      stack.push({ list: below, depth: item.depth });
    }
    stack.at(-1).list.append(withLines(h("li"), item.lines, put));
  }
  return list;
}

function renderTable(block, put) {
  const row = (cells, tag) =>
    h("tr", null, cells.map(({ start, end }) => {
      const cell = h(tag);
      put(cell, start, end);
      return cell;
    }));
  const [head, ...body] = block.rows;
  return h("div", { class: "scroll", tabindex: "0" }, h("table", null, h("thead", null, row(head, "th")), h("tbody", null, body.map((cells) => row(cells, "td")))));
}

const SPAN = /(`+)|(\*\*|__)(?=\S)|(\*|_)(?=[^\s*_])|(~~)(?=\S)|\[|\\(?=[\\`*_{}[\]()#+\-.!|~>])/g;

function inline(source, start, end, parent, leaf) {
  let plain = start;
  SPAN.lastIndex = start;
  for (let found = SPAN.exec(source); found && found.index < end; found = SPAN.exec(source)) {
    const mark = found[0];
    const resume = SPAN.lastIndex;
    const span = spanAt(source, found, end);
    if (!span) {
      SPAN.lastIndex = resume;
      continue;
    }
    if (found.index > plain) leaf(parent, plain, found.index);
    if (span.element) {
      if (mark[0] === "`") leaf(span.element, span.start, span.end);
      else inline(source, span.start, span.end, span.element, leaf);
      parent.append(span.element);
    }
    plain = SPAN.lastIndex = span.next;
  }
  if (end > plain) leaf(parent, plain, end);
}

/** What begins at a marker, if it also ends before `end`. */
function spanAt(source, found, end) {
  const mark = found[0];
  const inner = found.index + mark.length;
  if (mark === "\\") return { next: inner };
  if (mark === "[") return linkAt(source, inner, end);
  if (mark[0] === "_" && /\w/.test(source[found.index - 1] ?? " ")) return null;
  let close = source.indexOf(mark, inner);
  while (close >= 0 && close < end && (/\s/.test(source[close - 1]) || (mark.length === 1 && mark !== "`" && source[close + 1] === mark))) {
    if (mark[0] === "`") break;
    close = source.indexOf(mark, close + 1);
  }
  if (close < 0 || close + mark.length > end || close === inner) return null;
  if (mark[0] === "_" && /\w/.test(source[close + mark.length] ?? " ")) return null;
  const tag = mark[0] === "`" ? "code" : mark === "~~" ? "s" : mark.length === 2 ? "strong" : "em";
  return { element: h(tag), start: inner, end: close, next: close + mark.length };
}

function linkAt(source, inner, end) {
  const close = source.indexOf("](", inner);
  if (close < 0 || close >= end) return null;
  const last = source.indexOf(")", close);
  if (last < 0 || last >= end) return null;
  const url = source.slice(close + 2, last).trim();
  if (!/^https?:\/\/\S+$/i.test(url)) return null;
  return {
    element: h("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }),
    start: inner,
    end: close,
    next: last + 1,
  };
}
