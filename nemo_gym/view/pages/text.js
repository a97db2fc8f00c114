// Texts of models and tools as they are: control characters made visible, long ones cut with a way to the rest.

import { append, el } from "./dom.js";
import { whole } from "./format.js";

// Terminal sequences, control and bidi characters, invisible ones, halves of surrogate pairs. Joiners stay: emoji need them.
const HIDDEN =
  /\u001b\[[0-9;?]{0,40}[@-~]|\u001b\][^\u0007\u001b]{0,300}(?:\u0007|\u001b\\)?|[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udfff]|[\u{e0000}-\u{e007f}]/gu;
const SHORT_NAMES = new Map([
  ["\u202e", "RLO"],
  ["\u202d", "LRO"],
  ["\u202a", "LRE"],
  ["\u202b", "RLE"],
  ["\u202c", "PDF"],
  ["\u2066", "LRI"],
  ["\u2067", "RLI"],
  ["\u2068", "FSI"],
  ["\u2069", "PDI"],
  ["\u200b", "ZWSP"],
  ["\u200e", "LRM"],
  ["\u200f", "RLM"],
  ["\ufeff", "BOM"],
  ["\u00ad", "SHY"],
  ["\u0000", "NUL"],
  ["\u0007", "BEL"],
  ["\u0008", "BS"],
  ["\r", "CR"],
]);
const FIRST_CHARACTERS = 8000;
const FIRST_LINES = 120;
const SHORT_JSON = 80;
const DEEPEST_SHOWN = 40;

// Nodes for `text`: what would be invisible or change the text around it is a marked label instead.
export function visibleNodes(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match[0] === "\r" && text[match.index + 1] === "\n") continue;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(hiddenLabel(match[0]));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function hiddenLabel(found) {
  const code = `U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  const isSequence = found.startsWith("\u001b");
  const label = isSequence ? `ESC${found.slice(1).replace(/[^\x20-\x7e]/g, "·")}` : SHORT_NAMES.get(found) || code;
  return el(
    "span.hidden-character",
    { title: isSequence ? "a terminal escape sequence" : `an invisible character, ${code}` },
    label,
  );
}

// One line of text, for names, cells and messages.
export function plain(text) {
  return visibleNodes(String(text));
}

// A name that may be broken where its parts end.
export function breakable(name) {
  return String(name)
    .split(/(?<=[_/.:-])/)
    .slice(0, 200)
    .map((part) => [visibleNodes(part), document.createElement("wbr")]);
}

// A block of text. `wholeLength` is how long it was where the server cut it, `rest` leads to the whole, `render` makes nodes of
// text, `least` characters are shown in any case.
export function textBlock(
  text,
  { wholeLength = null, render = visibleNodes, className = "text", rest = null, least = 0 } = {},
) {
  const box = el(`div.${className}`, { dir: "auto" });
  const cutAt = Math.min(text.length, Math.max(placeToCut(text), least));
  const show = (until) => {
    box.replaceChildren();
    append(box, render(text.slice(0, until)));
    if (until < text.length) box.append(moreButton(text.length - until, () => show(text.length)));
    else if (wholeLength !== null) box.append(cutNote(text.length, wholeLength, rest));
  };
  show(cutAt);
  return box;
}

function placeToCut(text) {
  let place = -1;
  for (let line = 0; line < FIRST_LINES; line += 1) {
    place = text.indexOf("\n", place + 1);
    if (place < 0) break;
  }
  const byLines = place < 0 ? text.length : place;
  let cut = Math.min(byLines, FIRST_CHARACTERS);
  if (text.length - cut < 500) cut = text.length;
  const last = text.charCodeAt(cut - 1);
  return cut < text.length && last >= 0xd800 && last < 0xdc00 ? cut - 1 : cut; // never within a surrogate pair
}

function moreButton(left, show) {
  return el(
    "div.more",
    null,
    el("button.quiet", { type: "button", onclick: show }, `Show all (${whole(left)} more characters)`),
  );
}

function cutNote(shown, length, rest) {
  return el("p.note", null, `Cut here: ${whole(shown)} of ${whole(length)} characters are shown. `, rest);
}

// JSON with colours for keys and values. The text is made by JSON.stringify, so a simple pattern finds its parts.
const JSON_PART = /("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?|\b(true|false|null)\b|(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)/g;

export function jsonNodes(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(JSON_PART)) {
    if (match.index > end) nodes.push(...visibleNodes(text.slice(end, match.index)));
    const [found, quoted, colon, word] = match;
    const kind =
      quoted === undefined ? (word === undefined ? "number" : "word") : colon === undefined ? "string" : "key";
    nodes.push(el(`span.json-${kind}`, null, visibleNodes(quoted === undefined ? found : quoted)));
    if (colon !== undefined) nodes.push(colon);
    end = match.index + found.length;
  }
  if (end < text.length) nodes.push(...visibleNodes(text.slice(end)));
  return nodes;
}

export function jsonBlock(value) {
  let text;
  try {
    text = indented(value);
  } catch {
    text = String(value);
  }
  return textBlock(text === undefined ? "undefined" : text, { render: jsonNodes, className: "code" });
}

// What is short, and short lists of numbers, stay on one line.
function indented(value) {
  const text = JSON.stringify(value, null, 2);
  if (text && text.length < SHORT_JSON) return text.replace(/\n\s*/g, " ");
  return (
    text &&
    text.replace(/\[\n\s{1,400}([^[\]{}"]{1,100})\n\s{1,400}\]/g, (_, inside) => `[${inside.replace(/\s+/g, " ")}]`)
  );
}

// Indentation grows with the square of the depth: what is nested more deeply than anybody reads stays as it is.
function isFlat(text) {
  let [depth, deepest] = [0, 0];
  for (const [sign] of text.matchAll(/[[\]{}]/g)) {
    depth += sign === "[" || sign === "{" ? 1 : -1;
    deepest = Math.max(deepest, depth);
  }
  return deepest <= DEEPEST_SHOWN;
}

// A text that holds JSON is shown with line breaks, any other as it is.
export function prettyBlock(text, options) {
  if (/^\s*[[{]/.test(text) && text.length < 200000 && isFlat(text)) {
    try {
      return textBlock(indented(JSON.parse(text)), { ...options, render: jsonNodes, className: "code" });
    } catch {
      /* not JSON: as it is */
    }
  }
  return textBlock(text, { ...options, className: "code" });
}
