// A conversation as a conversation: messages, folded reasoning, calls of tools beside what they returned.

import { el } from "./dom.js";
import { countOf, whole } from "./format.js";
import { entriesOf, isMapping, warningsOf } from "./items.js";
import { markdownNodes } from "./markdown.js";
import { jsonBlock, plain, prettyBlock, textBlock, visibleNodes } from "./text.js";

const IMAGE_DATA = /^data:image\/(png|jpeg|jpg|gif|webp);base64,/i;
const ROLE_NAMES = { system: "System", developer: "Developer", user: "User", assistant: "Assistant", tool: "Tool" };
const FIRST_ENTRIES = 200;

// `view` is {markdown, cut: Map of path to length, rest: () => node that leads to the whole record}.
export function conversationNode(record, view) {
  const entries = entriesOf(record);
  const box = el("div.conversation");
  const warnings = warningsOf(record).map((warning) =>
    el(`p.warning.warning-${warning.kind}`, null, plain(warning.text)),
  );
  box.append(...offeredTools(record));
  const paired = pairedOutputs(entries);
  const blocks = entries.filter((entry) => !paired.outputs.has(entry));
  let from = null;
  const show = (list) => {
    for (const entry of list) {
      if (entry.from !== from) box.append(el("p.part-of", null, entry.from === "prompt" ? "Prompt" : "Answer"));
      from = entry.from;
      box.append(entryNode(entry, view, paired.of.get(entry)));
    }
  };
  show(blocks.slice(0, FIRST_ENTRIES));
  if (blocks.length > FIRST_ENTRIES) {
    const more = el(
      "button",
      {
        type: "button",
        onclick: () => {
          more.remove();
          show(blocks.slice(FIRST_ENTRIES));
        },
      },
      `Show ${countOf(blocks.length - FIRST_ENTRIES, "more item")}`,
    );
    box.append(more);
  }
  if (!entries.length)
    box.append(el("p.note", null, "This record has no conversation. Its fields and its JSON are shown beside this."));
  box.append(...warnings);
  return box;
}

function offeredTools(record) {
  const tools =
    isMapping(record) && isMapping(record.responses_create_params) ? record.responses_create_params.tools : null;
  if (!Array.isArray(tools) || !tools.length) return [];
  const names = tools
    .map((tool) => (isMapping(tool) && typeof tool.name === "string" ? tool.name : isMapping(tool) ? tool.type : "?"))
    .join(", ");
  const fold = folded([`${countOf(tools.length, "tool")} offered: `, plain(names)], () => jsonBlock(tools));
  fold.classList.add("offered");
  return [fold];
}

// A fold whose content is made when it is opened for the first time.
export function folded(summary, content) {
  const fold = el(
    "details",
    {
      ontoggle: () => {
        if (fold.open && fold.children.length === 1) fold.append(content());
      },
    },
    el("summary", null, summary),
  );
  fold.fill = () => {
    if (fold.children.length === 1) fold.append(content());
  };
  return fold;
}

// The output of each call, by its id; the first one with that id after it.
function pairedOutputs(entries) {
  const waiting = new Map();
  const of = new Map();
  const outputs = new Set();
  for (const entry of entries) {
    if (entry.kind === "call" && entry.callId !== undefined) waiting.set(entry.callId, entry);
    if (entry.kind !== "output" || !waiting.has(entry.callId)) continue;
    of.set(waiting.get(entry.callId), entry);
    outputs.add(entry);
    waiting.delete(entry.callId);
  }
  return { of, outputs };
}

export function entryNode(entry, view, output) {
  const make = { message: messageNode, reasoning: reasoningNode, call: callNode, output: outputNode, other: otherNode }[
    entry.kind
  ];
  const node = make(entry, view, output);
  if (entry.status === "incomplete")
    node.append(el("p.warning.warning-incomplete", null, "Incomplete: this item was cut off"));
  if (entry.more) node.append(moreFold(entry.more));
  return node;
}

function moreFold(more) {
  const names = Object.keys(more).map((key) =>
    Array.isArray(more[key]) ? `${key} (${whole(more[key].length)})` : key,
  );
  const fold = folded(["more: ", plain(names.join(", "))], () => jsonBlock(more));
  fold.classList.add("item-more");
  return fold;
}

function messageNode(entry, view) {
  const known = entry.role in ROLE_NAMES ? entry.role : "other";
  return el(
    `article.item.item-${known}`,
    { "aria-label": `${entry.role} message` },
    el("header", null, ROLE_NAMES[entry.role] || plain(entry.role)),
    entry.parts.length ? entry.parts.map((part) => partNode(part, view)) : el("p.note", null, "empty"),
  );
}

function reasoningNode(entry, view) {
  const size = entry.parts.reduce((sum, part) => sum + (part.text || "").length, 0);
  const hasHidden = isMapping(entry.item) && typeof entry.item.encrypted_content === "string";
  const fold = folded(
    [
      el("span.item-title", null, "Reasoning"),
      el("span.note", null, ` ${countOf(size, "character")}${hasHidden ? ", partly encrypted" : ""}`),
    ],
    () =>
      el(
        "div",
        null,
        entry.parts.map((part) => partNode(part, view)),
      ),
  );
  return el("article.item.item-reasoning", { "aria-label": "reasoning" }, fold);
}

function callNode(entry, view, output) {
  const call = el(
    "div.call-side",
    null,
    el("header", null, "Calls ", el("code", null, plain(entry.name))),
    entry.parts.map((part) => partNode(part, { ...view, pretty: true })),
  );
  const answer = output
    ? el("div.call-side.call-output", null, el("header", null, "Returned"), outputParts(output, view))
    : output === null
      ? null
      : el("div.call-side.call-output", null, el("header", null, "Returned"), el("p.note", null, "nothing on record"));
  return el("article.item.item-call", { "aria-label": `call of ${entry.name}` }, el("div.call", null, call, answer));
}

function outputParts(entry, view) {
  return entry.parts.length
    ? entry.parts.map((part) => partNode(part, { ...view, pretty: true }))
    : el("p.note", null, "empty");
}

function outputNode(entry, view) {
  return el(
    "article.item.item-tool",
    { "aria-label": "output of a tool" },
    el("header", null, "Tool returned"),
    outputParts(entry, view),
  );
}

function otherNode(entry) {
  return el(
    "article.item.item-other",
    { "aria-label": `item of type ${entry.name}` },
    el("header", null, plain(entry.name)),
    jsonBlock(entry.item),
  );
}

export function partNode(part, view) {
  const wholeLength = view.cut.has(part.path) ? view.cut.get(part.path) : null;
  const options = { wholeLength, rest: wholeLength === null ? null : view.rest() };
  if (part.kind === "image") return imageNode(part.text, wholeLength);
  if (part.kind === "json") return jsonBlock(part.value);
  if (part.kind === "refusal")
    return el("div.refusal", null, el("p.warning", null, "Refused"), textBlock(part.text, options));
  const marked = view.mark && view.mark.path === part.path ? view.mark : null;
  if (marked)
    return textBlock(part.text, {
      ...options,
      least: marked.character + 500,
      render: (text) => markedNodes(text, marked.character),
      className: view.pretty ? "code" : "text",
    });
  if (view.pretty) return prettyBlock(part.text, options);
  return textBlock(part.text, { ...options, render: view.markdown ? markdownNodes : visibleNodes });
}

// The text with its first difference marked, up to the end of the word.
function markedNodes(text, at) {
  const end = /[\s\S]\S{0,40}/.exec(text.slice(at));
  const length = end ? end[0].length : 0;
  const mark = el("mark.difference", null, length ? visibleNodes(text.slice(at, at + length)) : "ends here");
  return [...visibleNodes(text.slice(0, at)), mark, ...visibleNodes(text.slice(at + length))];
}

function imageNode(url, wholeLength) {
  if (wholeLength !== null)
    return el("p.note", null, `An image of ${whole(wholeLength)} characters, too large to be shown.`);
  if (IMAGE_DATA.test(url))
    return el("img.picture", { src: url, alt: "an image of the conversation", loading: "lazy" });
  return el("p.note", null, "An image elsewhere, which is not loaded: ", plain(url.slice(0, 500)));
}
