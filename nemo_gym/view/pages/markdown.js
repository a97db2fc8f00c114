// Markdown and code, on request: nodes made from text, with no way for a text to become markup, a link or a request.

import { el } from "./dom.js";
import { visibleNodes } from "./text.js";

const CODE_WORDS = new Set(
  (
    "and as assert async await bool break case catch char class const continue def default del do double elif else " +
    "enum except export extends false False final finally float fn for from func function global if impl import in int interface is " +
    "lambda let long match mut new nil None nonlocal not null or package pass private protected pub public raise return self static " +
    "string struct super switch this throw true True try type typeof undefined union use using val var void while with yield"
  ).split(" "),
);
const CODE_PART =
  /(#[^\n]{0,2000}|\/\/[^\n]{0,2000}|--\s[^\n]{0,2000})|("(?:[^"\\\n]|\\.){0,2000}"|'(?:[^'\\\n]|\\.){0,2000}'|`[^`\n]{0,2000}`)|(\b\d[\w.]{0,60})|([A-Za-z_]\w{0,100})/g;
const INLINE_PART =
  /(`{1,3})([^`]{1,500})\1(?!`)|(\*\*|__)(?=\S)([^*_\n]{1,500})\3|([*_])(?=\S)([^*_\n]{1,500})\5(?!\w)|(!?)\[([^\]\n]{0,500})\]\(([^)\s]{0,2000})\)/g;
const LONGEST_PARAGRAPH = 20000;

export function codeNodes(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(CODE_PART)) {
    const [found, comment, quoted, number, word] = match;
    if (word !== undefined && !CODE_WORDS.has(word)) continue;
    const kind =
      comment !== undefined ? "comment" : quoted !== undefined ? "string" : number !== undefined ? "number" : "word";
    if (match.index > end) nodes.push(...visibleNodes(text.slice(end, match.index)));
    nodes.push(el(`span.code-${kind}`, null, visibleNodes(found)));
    end = match.index + found.length;
  }
  if (end < text.length) nodes.push(...visibleNodes(text.slice(end)));
  return nodes;
}

function inlineNodes(text) {
  if (text.length > LONGEST_PARAGRAPH) return visibleNodes(text);
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE_PART)) {
    if (match.index > end) nodes.push(...visibleNodes(text.slice(end, match.index)));
    nodes.push(inlineNode(match));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(...visibleNodes(text.slice(end)));
  return nodes;
}

function inlineNode(match) {
  const [, , code, , strong, , emphasis, bang, label, target] = match;
  if (code !== undefined) return el("code", null, visibleNodes(code));
  if (strong !== undefined) return el("strong", null, visibleNodes(strong));
  if (emphasis !== undefined) return el("em", null, visibleNodes(emphasis));
  // Where a link leads is shown and never followed: it is whatever the model wrote.
  return el(
    "span.md-link",
    null,
    bang ? "image: " : "",
    visibleNodes(label),
    el("span.md-target", null, " (", visibleNodes(target), ")"),
  );
}

export function markdownNodes(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const [node, next] = blockAt(lines, at);
    if (node) blocks.push(node);
    at = next;
  }
  return [el("div.markdown", null, blocks)];
}

function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,40})/.exec(line);
  if (fence) return fencedBlock(lines, at, fence);
  const heading = /^(#{1,6})\s+(.*)$/.exec(line);
  if (heading)
    return [
      el(
        "p.md-heading",
        { role: "heading", "aria-level": Math.min(6, heading[1].length + 3) },
        inlineNodes(heading[2]),
      ),
      at + 1,
    ];
  if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) return [el("hr"), at + 1];
  if (isTableRow(line) && isRuler(lines[at + 1] || "")) return tableBlock(lines, at);
  if (/^\s*>/.test(line)) return quotedBlock(lines, at);
  if (listMark(line)) return listBlock(lines, at);
  return paragraph(lines, at);
}

function fencedBlock(lines, at, fence) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
  const language = fence[2] ? el("span.code-language", null, fence[2]) : null;
  return [el("div.code", null, language, codeNodes(lines.slice(at + 1, end).join("\n"))), end + 1];
}

function isTableRow(line) {
  return line.length < 5000 && line.includes("|");
}

function isRuler(line) {
  return isTableRow(line) && /^[\s:|-]+$/.test(line);
}

function tableBlock(lines, at) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => cell.trim());
  const head = el(
    "tr",
    null,
    cells(lines[at]).map((cell) => el("th", null, inlineNodes(cell))),
  );
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && isTableRow(lines[end]) && lines[end].trim(); end += 1) {
    rows.push(
      el(
        "tr",
        null,
        cells(lines[end]).map((cell) => el("td", null, inlineNodes(cell))),
      ),
    );
  }
  return [el("table", null, el("thead", null, head), el("tbody", null, rows)), end];
}

function quotedBlock(lines, at) {
  let end = at;
  while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s*>\s?/, ""));
  return [
    el(
      "blockquote",
      null,
      inner.map((line, place) => [place ? el("br") : null, inlineNodes(line)]),
    ),
    end,
  ];
}

function listMark(line) {
  return /^(\s{0,20})([-*+]|\d{1,4}[.)])\s+(.*)$/.exec(line);
}

function listBlock(lines, at) {
  const items = [];
  const isNumbered = /\d/.test(listMark(lines[at])[2]);
  let end = at;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const mark = listMark(lines[end]);
    if (mark) items.push(el(`li.level-${Math.min(4, Math.floor(mark[1].length / 2))}`, null, inlineNodes(mark[3])));
    else if (/^\s/.test(lines[end])) items.at(-1).append(" ", ...inlineNodes(lines[end].trim()));
    else break;
  }
  return [el(isNumbered ? "ol" : "ul", null, items), end];
}

function paragraph(lines, at) {
  let end = at + 1;
  while (
    end < lines.length &&
    lines[end].trim() &&
    !/^\s{0,3}(`{3,}|~{3,}|#{1,6}\s|>)/.test(lines[end]) &&
    !listMark(lines[end])
  )
    end += 1;
  const parts = lines.slice(at, end).map((line, place) => [place ? el("br") : null, inlineNodes(line)]);
  return [el("p", null, parts), end];
}
