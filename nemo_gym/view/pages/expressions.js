// The language of `where`, read in the page: to show a filter as its parts, and to filter an exported file, which has no
// server to ask. It answers as the server does: what is missing makes a comparison neither true nor false.

const TOKEN =
  /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|("[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')|(`[^`]*`)|([\p{L}_][\p{L}\p{N}_]*)|(==|!=|<=|>=|[<>()[\],.-]))/uy;
const COMPARISONS = new Set(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]);
const WORDS = new Set([
  "and",
  "or",
  "not",
  "in",
  "true",
  "false",
  "null",
  "True",
  "False",
  "None",
  "is",
  "if",
  "else",
  "lambda",
]);
const DEEPEST = 100;

export class ExpressionError extends Error {
  constructor(message, position) {
    super(message);
    this.position = position; // counted from 1
  }
}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  let end = 0;
  while (text.slice(end).trim()) {
    const match = TOKEN.exec(text);
    if (!match) throw new ExpressionError("this is not understood", end + 1);
    const [, number, quoted, backquoted, word, sign] = match;
    const start = match.index + match[0].search(/\S/);
    end = TOKEN.lastIndex;
    if (number !== undefined) tokens.push({ kind: "value", value: Number(number), start, end });
    else if (quoted !== undefined) tokens.push({ kind: "value", value: unquoted(quoted), start, end });
    else if (backquoted !== undefined) tokens.push({ kind: "name", value: backquoted.slice(1, -1), start, end });
    else if (word !== undefined) tokens.push({ kind: WORDS.has(word) ? "word" : "name", value: word, start, end });
    else tokens.push({ kind: "sign", value: sign, start, end });
  }
  tokens.push({ kind: "end", value: null, start: text.length, end: text.length });
  return tokens;
}

function unquoted(text) {
  return text.slice(1, -1).replace(/\\(.)/gs, (_, char) => ({ n: "\n", t: "\t", r: "\r" })[char] || char);
}

// Nodes: {kind: "and" | "or", parts}, {kind: "not", part}, {kind: "compare", values, signs}, {kind: "name", name},
// {kind: "value", value}; each with its place in the text.
class Reader {
  constructor(text) {
    this.tokens = tokensOf(text);
    this.at = 0;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  takes(value) {
    const fits = this.next.kind !== "value" && this.next.kind !== "name" && this.next.value === value;
    if (fits) this.at += 1;
    return fits;
  }

  refuse(message) {
    throw new ExpressionError(message, this.next.start + 1);
  }

  whole() {
    const node = this.joined("or");
    if (this.next.kind !== "end") this.refuse("something is missing before this");
    return node;
  }

  joined(kind) {
    const deeper = () => (kind === "or" ? this.joined("and") : this.negated());
    const parts = [deeper()];
    while (this.takes(kind)) parts.push(deeper());
    if (parts.length === 1) return parts[0];
    return { kind, parts, start: parts[0].start, end: parts.at(-1).end };
  }

  negated() {
    const start = this.next.start;
    if (!this.takes("not")) return this.compared();
    if ((this.depth += 1) > DEEPEST) this.refuse("this is nested too deeply");
    const part = this.negated();
    this.depth -= 1;
    return { kind: "not", part, start, end: part.end };
  }

  compared() {
    const values = [this.value()];
    const signs = [];
    for (let sign = this.comparison(); sign; sign = this.comparison()) {
      signs.push(sign);
      values.push(this.value());
    }
    if (!signs.length) return values[0];
    return { kind: "compare", values, signs, start: values[0].start, end: values.at(-1).end };
  }

  comparison() {
    if (this.next.value === "not" && this.next.kind === "word" && this.tokens[this.at + 1].value === "in") {
      this.at += 2;
      return "not in";
    }
    if ((this.next.kind === "sign" || this.next.kind === "word") && COMPARISONS.has(this.next.value)) {
      this.at += 1;
      return this.tokens[this.at - 1].value;
    }
    return null;
  }

  value() {
    const token = this.next;
    const start = token.start;
    if (this.takes("(")) return this.inside(start);
    if (this.takes("[")) return this.list(start);
    if (this.takes("-")) {
      const number = this.value();
      if (typeof number.value !== "number") this.refuse("a number belongs after the minus");
      return { ...number, value: -number.value, start };
    }
    for (const [word, value] of [
      ["true", true],
      ["false", false],
      ["null", null],
      ["True", true],
      ["False", false],
      ["None", null],
    ]) {
      if (this.takes(word)) return { kind: "value", value, start, end: token.end };
    }
    if (token.kind === "value") {
      this.at += 1;
      return { kind: "value", value: token.value, start, end: token.end };
    }
    if (token.kind === "name") return this.name(start);
    return this.refuse(token.kind === "end" ? "something is missing at the end" : "a name or a value belongs here");
  }

  inside(start) {
    if ((this.depth += 1) > DEEPEST) this.refuse("this is nested too deeply");
    const node = this.joined("or");
    if (!this.takes(")")) this.refuse("a closing parenthesis belongs here");
    this.depth -= 1;
    return { ...node, start, end: this.tokens[this.at - 1].end };
  }

  list(start) {
    const value = [];
    while (!this.takes("]")) {
      const entry = this.value();
      if (entry.kind !== "value") this.refuse("a list holds values");
      value.push(entry.value);
      if (!this.takes(",") && this.next.value !== "]") this.refuse("a comma belongs here");
    }
    return { kind: "value", value, start, end: this.tokens[this.at - 1].end };
  }

  name(start) {
    const parts = [];
    do {
      if (this.next.kind !== "name" && this.next.kind !== "word") this.refuse("a name belongs after the dot");
      parts.push(this.next.value);
      this.at += 1;
    } while (this.takes("."));
    return { kind: "name", name: parts.join("."), start, end: this.tokens[this.at - 1].end };
  }
}

export function parseExpression(text) {
  return new Reader(text).whole();
}

// The parts of a filter that must all hold, as texts; the whole text where it cannot be taken apart.
export function clausesOf(text) {
  if (!text.trim()) return [];
  let node;
  try {
    node = parseExpression(text);
  } catch {
    return [text.trim()];
  }
  const parts = node.kind === "and" && node.start === node.parts[0].start ? node.parts : [node];
  return parts.map((part) => text.slice(part.start, part.end));
}

export function joinedClauses(clauses) {
  const whole = clauses.filter((clause) => clause.trim());
  if (whole.length < 2) return whole.join("");
  return whole.map((clause) => (isLoose(clause) ? `(${clause})` : clause)).join(" and ");
}

function isLoose(clause) {
  try {
    const node = parseExpression(clause);
    return node.kind === "or" && node.start === node.parts[0].start;
  } catch {
    return true;
  }
}

export function asName(name) {
  return /^[\p{L}_][\p{L}\p{N}_]*(\.[\p{L}_][\p{L}\p{N}_]*)*$/u.test(name) && !WORDS.has(name) ? name : `\`${name}\``;
}

export function asValue(value) {
  return typeof value === "string" ? JSON.stringify(value) : String(value);
}

// A function of a lookup (name → value) that is true, false or null (neither); `isKnown` tells which names there are.
export function conditionOf(text, isKnown) {
  if (!text.trim()) return () => true;
  const node = parseExpression(text);
  refuseUnknown(node, isKnown);
  return (lookup) => truthOf(node, lookup);
}

function refuseUnknown(node, isKnown) {
  if (node.kind === "name" && !isKnown(node.name)) {
    throw new ExpressionError(`there is no '${node.name}'`, node.start + 1);
  }
  for (const part of node.parts || node.values || (node.part ? [node.part] : [])) refuseUnknown(part, isKnown);
}

function truthOf(node, lookup) {
  if (node.kind === "and" || node.kind === "or") {
    const decisive = node.kind === "or";
    const truths = node.parts.map((part) => truthOf(part, lookup));
    if (truths.includes(decisive)) return decisive;
    return truths.includes(null) ? null : !decisive;
  }
  if (node.kind === "not") {
    const truth = truthOf(node.part, lookup);
    return truth === null ? null : !truth;
  }
  if (node.kind === "compare") return chainTruth(node, lookup);
  const value = valueOf(node, lookup);
  return typeof value === "boolean" ? value : null;
}

function chainTruth(node, lookup) {
  const values = node.values.map((each) => valueOf(each, lookup));
  const truths = node.signs.map((sign, place) => compares(sign, values[place], values[place + 1], node, place));
  if (truths.includes(false)) return false;
  return truths.includes(null) ? null : true;
}

function valueOf(node, lookup) {
  if (node.kind === "value") return node.value;
  if (node.kind === "name") {
    const value = lookup(node.name);
    return value === undefined ? null : value;
  }
  return truthOf(node, lookup);
}

function compares(sign, left, right, node, place) {
  if (sign === "not in") {
    const truth = compares("in", left, right, node, place);
    return truth === null ? null : !truth;
  }
  const literalNull = [node.values[place], node.values[place + 1]].some(
    (each) => each.kind === "value" && each.value === null,
  );
  if (literalNull && (sign === "==" || sign === "!=")) return (left === right) === (sign === "==");
  if (left === null || right === null) return null;
  if (sign === "in") return isWithin(left, right);
  if (typeof left !== typeof right || Array.isArray(left) || Array.isArray(right)) return null;
  if (sign === "==") return left === right;
  if (sign === "!=") return left !== right;
  if (typeof left === "boolean") return null;
  return { "<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right }[sign];
}

function isWithin(part, whole) {
  if (Array.isArray(whole)) return whole.includes(part);
  return typeof whole === "string" && typeof part === "string" ? whole.includes(part) : null;
}
