// The rollouts of a run as a table: pages, sorting, columns of any field, export, and the matches of a full-text search.

import { source } from "./api.js";
import { el, replaceContent, saveFile, say, throttled } from "./dom.js";
import { countOf, decimal, duration, isNumber, whole } from "./format.js";
import { changeParameters, rolloutLink } from "./places.js";
import { focusStep, keepingFocus, sortHeader } from "./tables.js";
import { plain } from "./text.js";

const PAGE_ROWS = 50;
const ROLLOUT_COLUMNS = [
  { key: "repeat", label: "Repeat", number: true, cell: (row) => (row.repeat === null ? "–" : whole(row.repeat)) },
  { key: "agent", label: "Agent", cell: (row) => plain(row.agent || "–") },
  {
    key: "reward",
    label: "Reward",
    number: true,
    cell: (row) => (isNumber(row.reward) ? el("b", null, decimal(row.reward)) : "–"),
  },
  { key: "outcome", label: "Outcome", cell: outcomeCell },
  { key: "steps", label: "Steps", number: true, cell: (row) => whole(row.steps) },
  { key: "tool_calls", label: "Tool calls", number: true, cell: (row) => whole(row.tool_calls) },
  { key: "tools", label: "Tools", cell: (row) => plain((row.tools || []).join(", ") || "–") },
  { key: "output_tokens", label: "Output tokens", number: true, cell: (row) => whole(row.output_tokens) },
  { key: "duration_s", label: "Duration", number: true, cell: (row) => duration(row.duration_s) },
];
const OTHER_COLUMNS = [
  "model",
  "failure_class",
  "attempts",
  "input_tokens",
  "total_tokens",
  "started_at",
  "ended_at",
  "incomplete_reason",
  "line",
];

function outcomeCell(row) {
  const text = row.failure_class ? `${row.outcome}: ${row.failure_class}` : row.outcome;
  return [
    el(`span.outcome.outcome-${row.outcome}`, null, plain(text)),
    row.incomplete ? el("span.tag", null, "incomplete") : null,
    row.attempts > 1 ? el("span.tag", null, `${whole(row.attempts)} attempts`) : null,
  ];
}

function fieldCell(name) {
  return (row) => {
    const value = name in row && name !== "fields" ? row[name] : (row.fields || {})[name];
    if (value === null || value === undefined) return "–";
    return plain(isNumber(value) ? decimal(value) : String(value).slice(0, 120));
  };
}

export class RolloutList {
  constructor(run, signal) {
    Object.assign(this, { run, signal, fields: [], cancel: null, searching: null });
    this.title = el("h2", { id: "list-title" }, "Rollouts");
    this.status = el("p.note", { role: "status" });
    this.table = el("table.rollouts.cards-on-phone");
    this.pager = el("nav.pager", { "aria-label": "Pages of rollouts" });
    this.export = el("a.button", null, "Export these");
    this.columns = el("select", { "aria-label": "Add a column", onchange: () => this.addColumn(this.columns.value) });
    this.node = el(
      "section.card",
      { "aria-labelledby": "list-title" },
      el("div.card-head", null, this.title, el("div.actions", null, this.columns, this.export)),
      this.status,
      el("div.scroll", null, this.table),
      this.pager,
    );
    this.offer([]);
  }

  dispose() {
    if (this.cancel) this.cancel();
  }

  // What the person asks for; what was found stays.
  stopSearch() {
    if (!this.cancel) return;
    this.cancel();
    this.cancel = null;
    this.tell("Cancelled:", null);
  }

  offer(fields) {
    this.fields = fields;
    const names = [...OTHER_COLUMNS, ...fields.filter((field) => !field.builtin).map((field) => field.name)];
    replaceContent(
      this.columns,
      el("option", { value: "" }, "Add a column"),
      names.map((name) => el("option", { value: name }, name)),
    );
  }

  addColumn(name) {
    const chosen = this.chosenColumns();
    this.columns.value = "";
    if (name && !chosen.includes(name)) changeParameters({ columns: [...chosen, name].join(",") });
  }

  chosenColumns() {
    return (this.parameters.get("columns") || "").split(",").filter(Boolean);
  }

  step(by) {
    focusStep(this.table, by);
  }

  async load(parameters, signal) {
    this.parameters = parameters;
    const q = parameters.get("q") || "";
    const where = parameters.get("where") || "";
    const key = JSON.stringify([q, where]);
    if (q && this.searching === key) return; // an update of the run does not begin a search again
    if (this.cancel) this.cancel();
    this.cancel = null;
    this.searching = q ? key : null;
    this.showExport(where, parameters.get("sort") || "", q);
    if (q) {
      await this.checkedSearch(q, where, signal);
      return;
    }
    const answer = await source.rollouts(
      this.run,
      {
        where,
        sort: parameters.get("sort"),
        offset: parameters.get("offset"),
        limit: PAGE_ROWS,
        fields: this.chosenColumns().join(","),
      },
      signal,
    );
    if (signal.aborted) return;
    this.status.textContent =
      answer.matching === answer.total
        ? countOf(answer.total, "rollout")
        : `${whole(answer.matching)} of ${countOf(answer.total, "rollout")} match`;
    this.draw(answer.rows.map((row) => ({ row })));
    this.drawPager(answer);
  }

  draw(entries) {
    const sort = this.parameters.get("sort") || "";
    const agents = new Set(entries.map(({ row }) => row.agent));
    const extra = this.chosenColumns().map((name) => ({
      key: name,
      label: name,
      extra: true,
      number: (this.fields.find((field) => field.name === name) || {}).type === "number",
      cell: fieldCell(name),
    }));
    const columns = [
      ...ROLLOUT_COLUMNS.filter((column) => column.key !== "agent" || agents.size > 1 || sort.endsWith("agent")),
      ...extra,
    ];
    const task = { key: "task", label: "Task" };
    const header = (column) => {
      const cell = sortHeader(column, sort, (next) => changeParameters({ sort: next, offset: "" }));
      if (column.extra)
        cell.append(
          el(
            "button.remove",
            {
              type: "button",
              "aria-label": `Remove the column ${column.label}`,
              onclick: () =>
                changeParameters({
                  columns: this.chosenColumns()
                    .filter((name) => name !== column.key)
                    .join(","),
                }),
            },
            "×",
          ),
        );
      return cell;
    };
    keepingFocus(this.table, () =>
      replaceContent(
        this.table,
        el("caption.visually-hidden", null, "Rollouts"),
        el("thead", null, el("tr", null, [task, ...columns].map(header))),
        el(
          "tbody",
          null,
          entries.map((entry) => this.rowNodes(entry, columns)),
        ),
      ),
    );
  }

  rowNodes({ row, excerpt }, columns) {
    const name = row.task === null || row.task === undefined ? `line ${row.line}` : String(row.task);
    const link = el(
      "a.row-link",
      {
        href: rolloutLink(this.run, row.id, this.parameters),
        "data-key": row.id,
        "aria-label": `task ${name}, repeat ${row.repeat}`,
      },
      plain(name),
    );
    const cells = columns.map((column) =>
      el(column.number ? "td.number" : "td", { "data-label": column.label }, el("div", null, column.cell(row))),
    );
    const main = el(
      "tr.can-open",
      {
        onclick: (event) => {
          if (!event.target.closest("a, button") && !String(getSelection())) link.click();
        },
      },
      el("td", { "data-label": "Task" }, link),
      cells,
    );
    if (excerpt === undefined) return main;
    return [main, el("tr.excerpt", null, el("td", { colspan: columns.length + 1 }, this.excerptNodes(excerpt)))];
  }

  excerptNodes(excerpt) {
    const at = excerpt.toLowerCase().indexOf((this.parameters.get("q") || "").toLowerCase());
    const length = (this.parameters.get("q") || "").length;
    if (at < 0) return plain(excerpt);
    return [
      plain(excerpt.slice(0, at)),
      el("mark", null, plain(excerpt.slice(at, at + length))),
      plain(excerpt.slice(at + length)),
    ];
  }

  drawPager({ offset, limit, matching }) {
    const turn = (label, to) =>
      el(
        "button",
        {
          type: "button",
          disabled: to < 0 || to >= matching,
          "data-key": label,
          onclick: () => changeParameters({ offset: to || "" }),
        },
        label,
      );
    const last = Math.min(offset + limit, matching);
    keepingFocus(this.pager, () =>
      replaceContent(
        this.pager,
        matching > limit || offset
          ? [
              turn("Previous page", offset ? Math.max(0, offset - limit) : -1),
              el("span.note", null, ` ${whole(offset + 1)} to ${whole(last)} of ${whole(matching)} `),
              turn("Next page", offset + limit),
            ]
          : null,
      ),
    );
  }

  showExport(where, sort, q) {
    const url = source.exportUrl(this.run, { where, sort });
    this.export.hidden = Boolean(q);
    this.export.onclick = null;
    if (url) {
      this.export.setAttribute("href", url);
      this.export.setAttribute("download", "");
      return;
    }
    this.export.setAttribute("href", "#");
    this.export.onclick = (event) => {
      event.preventDefault();
      saveFile("rollouts.jsonl", source.exportText(this.run, { where, sort }), "application/jsonl");
    };
  }

  // The filter is checked first: a stream of events cannot say what is wrong with it.
  async checkedSearch(q, where, signal) {
    if (where) await source.rollouts(this.run, { where, limit: 1 }, signal);
    if (signal.aborted) {
      this.searching = null;
      return;
    }
    this.search(q, where);
  }

  search(q, where) {
    const found = [];
    const key = this.searching;
    const show = throttled(
      () => {
        if (this.searching === key) this.draw(found);
      },
      () => 100,
    );
    const stop = el("button", { type: "button", onclick: () => this.stopSearch() }, "Cancel");
    this.tell = (text, state) => {
      const numbers = state ? ` ${whole(state.searched)} of ${whole(state.total)} rollouts searched,` : "";
      replaceContent(
        this.status,
        `${text}${numbers} ${countOf(found.length, "match", "matches")} of “`,
        plain(q),
        "” ",
        text === "Searching…"
          ? stop
          : el("button", { type: "button", onclick: () => changeParameters({ q: "" }) }, "Show all rollouts"),
      );
    };
    this.draw([]);
    replaceContent(this.pager);
    this.tell("Searching…", null);
    this.cancel = source.search(
      this.run,
      { q, where, limit: 200 },
      {
        match: (match) => {
          found.push(match);
          show();
        },
        progress: (state) => this.tell("Searching…", state),
        done: (state) => {
          this.cancel = null;
          this.tell(state.complete ? "Searched:" : "The first", state);
          say(`${countOf(found.length, "match", "matches")}`);
        },
        error: () => {
          this.cancel = null;
          this.tell("The search broke off:", null);
        },
      },
    );
  }
}
