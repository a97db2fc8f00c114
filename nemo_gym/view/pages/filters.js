// The filter bar of a run: an expression as its removable parts, a form that adds parts, and full text.

import { el, replaceContent } from "./dom.js";
import { asName, asValue, clausesOf, joinedClauses } from "./expressions.js";
import { isNumber, short } from "./format.js";
import { changeParameters } from "./places.js";
import { plain } from "./text.js";

const OPERATORS = {
  number: [
    ["between", "from … to"],
    ["==", "="],
    ["!=", "≠"],
    [">=", "≥"],
    ["<=", "≤"],
    ["missing", "is missing"],
    ["there", "is there"],
  ],
  text: [
    ["==", "is"],
    ["!=", "is not"],
    ["contains", "contains"],
    ["missing", "is missing"],
    ["there", "is there"],
  ],
  boolean: [
    ["true", "is true"],
    ["false", "is false"],
    ["missing", "is missing"],
  ],
  list: [
    ["has", "has"],
    ["has not", "has not"],
  ],
};
const WITHOUT_VALUE = new Set(["missing", "there", "true", "false"]);
const QUICK = [
  ["Failed", 'outcome == "failed"'],
  ["Incomplete", "incomplete"],
  ["Reward 0", "reward == 0"],
  ["Reward > 0", "reward > 0"],
  ["Tried again", "attempts > 1"],
];

export function addClause(where, clause) {
  const clauses = clausesOf(where);
  return clauses.includes(clause) ? where : joinedClauses([...clauses, clause]);
}

export class FilterBar {
  // `state` is {where, q}; a change goes to the address, which comes back by `show`.
  constructor() {
    this.where = "";
    this.expression = el("input.expression", {
      id: "where",
      type: "text",
      spellcheck: "false",
      autocomplete: "off",
      autocapitalize: "off",
      placeholder: 'reward < 1 and level == "hard"',
      "aria-describedby": "where-problem",
    });
    this.problem = el("pre.problem.caret", { id: "where-problem", role: "alert", hidden: true });
    this.chips = el("ul.chips", { "aria-label": "Filters that hold" });
    this.search = el("input", {
      id: "full-text",
      type: "search",
      placeholder: "any text in the records",
      autocomplete: "off",
    });
    this.searchButton = el("button", { type: "submit" }, "Search");
    this.builder = el("div.builder");
    const whereForm = el(
      "form.filter-form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          this.apply(this.expression.value);
        },
      },
      el("label", { for: "where" }, "Filter"),
      this.expression,
      el("button", { type: "submit" }, "Apply"),
    );
    const searchForm = el(
      "form.filter-form",
      {
        role: "search",
        onsubmit: (event) => {
          event.preventDefault();
          changeParameters({ q: this.search.value.trim(), offset: "" });
        },
      },
      el("label", { for: "full-text" }, "Full text"),
      this.search,
      this.searchButton,
    );
    const quick = el(
      "div.quick",
      { role: "group", "aria-label": "Common filters" },
      QUICK.map(([label, clause]) => el("button.quiet", { type: "button", onclick: () => this.add(clause) }, label)),
    );
    this.node = el(
      "section.filter-bar.card",
      { "aria-label": "Filter" },
      el("div.filter-forms", null, whereForm, searchForm),
      this.problem,
      el("div.filter-build", null, this.builder, quick),
      this.chips,
    );
  }

  apply(where) {
    changeParameters({ where: where.trim(), offset: "" });
  }

  add(clause) {
    this.apply(addClause(this.where, clause));
  }

  show(where, q) {
    // The place is told of a moment after it changed: what somebody types meanwhile stays, unless it is what changed.
    if (where !== this.where) this.expression.value = where;
    if (q !== this.q) this.search.value = q;
    Object.assign(this, { where, q });
    this.showProblem(null);
    const clauses = clausesOf(where);
    const without = (place) => joinedClauses(clauses.filter((_, other) => other !== place));
    const chips = clauses.map((clause, place) =>
      el(
        "li",
        null,
        el("code", null, plain(clause)),
        el(
          "button.remove",
          { type: "button", "aria-label": `Remove ${clause}`, onclick: () => this.apply(without(place)) },
          "×",
        ),
      ),
    );
    replaceContent(
      this.chips,
      chips,
      clauses.length > 1
        ? el("li.clear", null, el("button.quiet", { type: "button", onclick: () => this.apply("") }, "Clear"))
        : null,
    );
    this.chips.hidden = !clauses.length;
  }

  // The expression with a caret under the place that is not understood.
  showProblem(error) {
    this.problem.hidden = !error;
    this.expression.toggleAttribute("aria-invalid", Boolean(error));
    if (!error) {
      this.problem.textContent = "";
      return;
    }
    const caret = isNumber(error.position) ? `${this.where}\n${" ".repeat(Math.max(0, error.position - 1))}^ ` : "";
    replaceContent(this.problem, plain(caret + error.message));
  }

  // What the form offers: the fields of this run.
  offer(fields) {
    const field = el(
      "select",
      { id: "filter-field", onchange: () => operators() },
      group(
        "Every rollout",
        fields.filter((each) => each.builtin),
      ),
      group(
        "Fields of these records",
        fields.filter((each) => !each.builtin && !each.name.startsWith("_ng_")),
      ),
      group(
        "Written by the collector",
        fields.filter((each) => !each.builtin && each.name.startsWith("_ng_")),
      ),
    );
    const operator = el("select", { "aria-label": "how to compare", onchange: () => values() });
    const box = el("span.builder-values");
    const chosen = () => fields.find((each) => each.name === field.value);
    const operators = () => {
      replaceContent(
        operator,
        (OPERATORS[chosen().type] || OPERATORS.text).map(([value, label]) => el("option", { value }, label)),
      );
      values();
    };
    const values = () => replaceContent(box, valueInputs(chosen(), operator.value));
    const form = el(
      "form.filter-form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          const clause = clauseFrom(
            chosen(),
            operator.value,
            [...box.querySelectorAll("input, select")].map((input) => input.value.trim()),
          );
          if (clause) this.add(clause);
        },
      },
      el("label", { for: "filter-field" }, "Add"),
      field,
      operator,
      box,
      el("button", { type: "submit" }, "Add"),
    );
    replaceContent(this.builder, fields.length ? form : null);
    if (fields.length) operators();
  }
}

function group(label, fields) {
  return fields.length
    ? el(
        "optgroup",
        { label },
        fields.map((field) => el("option", { value: field.name }, field.name)),
      )
    : null;
}

function valueInputs(field, operator) {
  if (WITHOUT_VALUE.has(operator)) return [];
  const hint = (value) => (isNumber(value) ? short(value) : "");
  if (operator === "between") {
    return [
      el("input.narrow", { "aria-label": "from", inputmode: "decimal", placeholder: hint(field.low) }),
      " to ",
      el("input.narrow", { "aria-label": "to", inputmode: "decimal", placeholder: hint(field.high) }),
    ];
  }
  if (field.values && operator !== "contains") {
    return el(
      "select",
      { "aria-label": "value" },
      field.values.map((value) => el("option", { value }, String(value).slice(0, 80))),
    );
  }
  return el("input", {
    "aria-label": "value",
    placeholder: isNumber(field.low) ? `${hint(field.low)} to ${hint(field.high)}` : "",
  });
}

export function clauseFrom(field, operator, [first = "", second = ""]) {
  const name = asName(field.name);
  const value = (text) =>
    field.type === "number" || (field.type === "mixed" && isNumber(Number(text)))
      ? text === "" || !isNumber(Number(text))
        ? null
        : String(Number(text))
      : asValue(text);
  if (operator === "missing") return `${name} == null`;
  if (operator === "there") return `${name} != null`;
  if (operator === "true") return name;
  if (operator === "false") return `not ${name}`;
  if (operator === "has") return `${asValue(first)} in ${name}`;
  if (operator === "has not") return `${asValue(first)} not in ${name}`;
  if (operator === "contains") return first ? `${asValue(first)} in ${name}` : null;
  if (operator !== "between") return value(first) === null ? null : `${name} ${operator} ${value(first)}`;
  const [from, to] = [value(first), value(second)];
  if (from !== null && to !== null) return `${from} <= ${name} <= ${to}`;
  return from !== null ? `${name} >= ${from}` : to !== null ? `${name} <= ${to}` : null;
}
