// What a conversation consists of, read from a record that may hold anything.

const TEXT_PARTS = new Set(["input_text", "output_text", "text", "summary_text", "reasoning_text"]);
const IMAGE_PARTS = new Set(["input_image", "image_url", "image"]);
const SHOWN_KEYS = new Set([
  "type",
  "role",
  "content",
  "id",
  "status",
  "call_id",
  "name",
  "arguments",
  "output",
  "summary",
  "annotations",
  "logprobs",
]);
const NOT_COMPARED = new Set(["id", "call_id", "created_at", "tool_call_id"]);

export function isMapping(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// Entries of {kind, role, name, parts, status, callId, more, path, from, item}; kind is message, reasoning, call, output or
// other; a part is {kind: text | refusal | image | json, text, value, path}; `from` is prompt or response.
export function entriesOf(record) {
  if (!isMapping(record)) return [];
  const asked = isMapping(record.responses_create_params) ? record.responses_create_params : {};
  const name = answerName(record);
  const entries = [];
  if (typeof asked.instructions === "string" && asked.instructions) {
    entries.push(message("system", asked.instructions, "responses_create_params.instructions", "prompt", null));
  }
  collect(asked.input, "responses_create_params.input", "prompt", "user", entries);
  if (name) collect(record[name].output, `${name}.output`, "response", "assistant", entries);
  return entries;
}

// A rollout that failed may have kept what there was of its answer.
function answerName(record) {
  return ["response", "_ng_partial_response"].find((name) => isMapping(record[name])) || null;
}

function collect(items, path, from, role, entries) {
  if (typeof items === "string") entries.push(message(role, items, path, from, null));
  else if (Array.isArray(items))
    items.forEach((item, place) => entries.push(entryOf(item, `${path}.${place}`, from, role)));
  else if (items !== null && items !== undefined) entries.push(other(items, path, from));
}

function message(role, content, path, from, item) {
  const parts = partsOf(content, path);
  return { kind: "message", role, parts, status: item && item.status, path, from, item, more: moreOf(item) };
}

function other(item, path, from) {
  return {
    kind: "other",
    name: isMapping(item) && typeof item.type === "string" ? item.type : "item",
    parts: [],
    path,
    from,
    item,
  };
}

function entryOf(item, path, from, role) {
  if (!isMapping(item)) return other(item, path, from);
  const base = { status: item.status, path, from, item, more: moreOf(item), callId: item.call_id };
  const type = item.type === undefined && item.role !== undefined ? "message" : item.type;
  if (type === "message" && (typeof item.content === "string" || Array.isArray(item.content))) {
    return {
      ...message(typeof item.role === "string" ? item.role : role, item.content, `${path}.content`, from, item),
      path,
    };
  }
  if (type === "reasoning") {
    const parts = [...partsOf(item.summary, `${path}.summary`), ...partsOf(item.content, `${path}.content`)];
    return { ...base, kind: "reasoning", parts };
  }
  if (type === "function_call" && typeof item.name === "string") {
    return { ...base, kind: "call", name: item.name, parts: argumentParts(item.arguments, `${path}.arguments`) };
  }
  if (type === "function_call_output")
    return { ...base, kind: "output", parts: partsOf(item.output, `${path}.output`) };
  return other(item, path, from);
}

function argumentParts(value, path) {
  return typeof value === "string" ? [{ kind: "text", text: value, path }] : [{ kind: "json", value, path }];
}

function partsOf(content, path) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [{ kind: "text", text: content, path }];
  if (!Array.isArray(content)) return [{ kind: "json", value: content, path }];
  return content.map((part, place) => partOf(part, `${path}.${place}`));
}

function partOf(part, path) {
  if (typeof part === "string") return { kind: "text", text: part, path };
  if (isMapping(part)) {
    if (TEXT_PARTS.has(part.type) && typeof part.text === "string")
      return { kind: "text", text: part.text, path: `${path}.text` };
    if (part.type === "refusal" && typeof part.refusal === "string")
      return { kind: "refusal", text: part.refusal, path: `${path}.refusal` };
    if (IMAGE_PARTS.has(part.type)) {
      const url = isMapping(part.image_url) ? part.image_url.url : part.image_url;
      if (typeof url === "string") return { kind: "image", text: url, path: `${path}.image_url` };
    }
  }
  return { kind: "json", value: part, path };
}

// Whatever else an item holds, so that nothing is hidden; null without any.
function moreOf(item) {
  if (!isMapping(item)) return null;
  const rest = Object.entries(item).filter(([key, value]) => !SHOWN_KEYS.has(key) && value !== null);
  return rest.length ? Object.fromEntries(rest) : null;
}

// Why the answer stopped early, refused or failed: [{kind, text}].
export function warningsOf(record) {
  const name = isMapping(record) ? answerName(record) : null;
  const answer = name ? record[name] : {};
  const warnings = [];
  if (name === "_ng_partial_response") warnings.push({ kind: "incomplete", text: "The rollout failed here." });
  const reason = isMapping(answer.incomplete_details) ? answer.incomplete_details.reason : null;
  if (reason || answer.status === "incomplete")
    warnings.push({ kind: "incomplete", text: `The answer is incomplete: ${reason || "no reason given"}` });
  if (answer.error)
    warnings.push({
      kind: "error",
      text: `The model reported an error: ${isMapping(answer.error) ? answer.error.message || JSON.stringify(answer.error) : answer.error}`,
    });
  return warnings;
}

// What makes two entries equal: everything but ids, which differ between any two rollouts.
function comparable(value) {
  if (Array.isArray(value)) return value.map(comparable);
  if (!isMapping(value)) return value;
  const kept = Object.keys(value)
    .filter((key) => !NOT_COMPARED.has(key))
    .sort();
  return kept.map((key) => [key, comparable(value[key])]);
}

// The place of the first entry that differs, and within it of the first part and character; null when all are equal.
export function firstDifference(one, other_) {
  const longest = Math.max(one.length, other_.length);
  for (let place = 0; place < longest; place += 1) {
    const [left, right] = [one[place], other_[place]];
    if (!left || !right) return { place, part: null, character: null };
    const [shownLeft, shownRight] = [left, right].map((entry) =>
      JSON.stringify(comparable(entry.item === null ? entry.parts.map((part) => part.text) : entry.item)),
    );
    if (shownLeft !== shownRight || left.kind !== right.kind || left.role !== right.role)
      return { place, ...differenceWithin(left, right) };
  }
  return null;
}

function differenceWithin(left, right) {
  const longest = Math.max(left.parts.length, right.parts.length);
  for (let part = 0; part < longest; part += 1) {
    const [one, other_] = [left.parts[part], right.parts[part]];
    if (!one || !other_ || typeof one.text !== "string" || typeof other_.text !== "string") {
      if (JSON.stringify(one) !== JSON.stringify(other_)) return { part, character: null };
      continue;
    }
    if (one.text === other_.text) continue;
    let character = 0;
    while (one.text[character] === other_.text[character]) character += 1;
    return { part, character };
  }
  return { part: null, character: null };
}
