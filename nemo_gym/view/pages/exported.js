// The data of an exported file, answering like the server: filters, sorting, numbers and search over the rollouts inside.

import { conditionOf } from "./expressions.js";
import { isNumber } from "./format.js";

const NUMBERS = ["reward", "input_tokens", "output_tokens", "total_tokens", "duration_s", "steps", "tool_calls"];
const OUTCOMES = ["scored", "unscored", "failed", "damaged"];
const MOST_BINS = 40;

export function exportedSource(data) {
  const rowsOf = (run) => (data.rollouts[run] ? data.rollouts[run].rows : []);
  const selection = (run, where, sort) => sortedRows(chosenRows(rowsOf(run), where), sort);
  const lineOf = (run, id) => {
    const entry = data.rollout[`${run}/${id}`];
    return entry ? (entry.record === null ? entry.raw || "" : JSON.stringify(entry.record)) : null;
  };
  return {
    exported: { at: data.exported_at, where: data.where, limit: data.limit },
    runs: async () => data.runs,
    run: async (run) => known(data.run[run], "run"),
    fields: async (run) => data.fields[run] || { fields: [] },
    async rollouts(run, { where, sort, limit = 50, offset = 0 }) {
      const rows = selection(run, where, sort);
      const page = rows.slice(Number(offset), Number(offset) + Number(limit));
      return {
        total: rowsOf(run).length,
        matching: rows.length,
        offset: Number(offset),
        limit: Number(limit),
        rows: page,
      };
    },
    async stats(run, where) {
      return where ? numbersOf(chosenRows(rowsOf(run), where)) : data.stats[run];
    },
    async grid(run, { where, order }) {
      return gridOf(data.grid[run], where ? new Set(chosenRows(rowsOf(run), where).map((row) => row.id)) : null, order);
    },
    async rollout(run, rollout, { where, sort }) {
      const entry = known(data.rollout[`${run}/${rollout}`], "rollout in this file");
      const ids = selection(run, where, sort).map((row) => row.id);
      const place = ids.indexOf(rollout);
      return { ...entry, previous: ids[place - 1] || null, next: (place >= 0 && ids[place + 1]) || null };
    },
    has: (run, rollout) => `${run}/${rollout}` in data.rollout,
    rawUrl: () => null,
    exportUrl: () => null,
    rawText: lineOf,
    exportText(run, { where, sort }) {
      return selection(run, where, sort)
        .map((row) => `${lineOf(run, row.id)}\n`)
        .join("");
    },
    search: (run, parameters, listeners) =>
      searched(selection(run, parameters.where, ""), (id) => lineOf(run, id), parameters, listeners),
    watch: () => () => {},
  };
}

function known(answer, what) {
  if (answer === undefined) throw new Error(`There is no such ${what}. An exported file holds a choice of rollouts.`);
  return answer;
}

function lookupIn(row) {
  return (name) => {
    const fields = row.fields || {};
    if (name.startsWith("record.") && !(name in fields)) return fields[name.slice("record.".length)];
    return name in row && name !== "fields" && name !== "id" ? row[name] : fields[name];
  };
}

function chosenRows(rows, where) {
  if (!where) return rows;
  const names = new Set(rows.flatMap((row) => [...Object.keys(row), ...Object.keys(row.fields || {})]));
  const condition = conditionOf(where, (name) => names.has(name) || names.has(name.replace(/^record\./, "")));
  return rows.filter((row) => condition(lookupIn(row)) === true);
}

function sortedRows(rows, sort) {
  const names = (sort || "").split(",").filter(Boolean);
  if (!names.length) return rows;
  const keyed = rows.map((row, place) => ({
    row,
    place,
    values: names.map((name) => lookupIn(row)(name.replace(/^-/, ""))),
  }));
  keyed.sort((one, other) => {
    for (let index = 0; index < names.length; index += 1) {
      const order = ordered(one.values[index], other.values[index], names[index].startsWith("-"));
      if (order) return order;
    }
    return one.place - other.place;
  });
  return keyed.map((each) => each.row);
}

// What is missing comes last either way; numbers come before texts.
function ordered(one, other, descending) {
  const missing = (value) => value === null || value === undefined;
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  const [left, right] = [one, other].map((value) =>
    typeof value === "boolean" ? Number(value) : Array.isArray(value) ? value.join(",") : value,
  );
  let order =
    typeof left === typeof right ? (left < right ? -1 : Number(left > right)) : typeof left === "number" ? -1 : 1;
  if (descending) order = -order;
  return order;
}

function numbersOf(rows) {
  const outcomes = Object.fromEntries(
    OUTCOMES.map((name) => [name, rows.filter((row) => row.outcome === name).length]),
  );
  const rewards = rows.map((row) => row.reward).filter(isNumber);
  const tasks = new Set(rows.filter((row) => isNumber(row.reward)).map((row) => row.task));
  return {
    matching: rows.length,
    outcomes,
    score: { mean: meanOf(rewards), ci95: null, rollouts: rewards.length, tasks: tasks.size },
    pass_at_k: null,
    histograms: Object.fromEntries(NUMBERS.map((name) => [name, histogramOf(rows.map((row) => row[name]))])),
    failures: failuresIn(rows),
    agents: [],
  };
}

function failuresIn(rows) {
  const classes = new Map();
  for (const row of rows) {
    if (row.outcome !== "failed") continue;
    const entry = classes.get(row.failure_class) || {
      class: row.failure_class,
      rollouts: 0,
      attempts: 0,
      examples: [],
    };
    entry.rollouts += 1;
    entry.attempts += row.attempts || 1;
    if (entry.examples.length < 3) entry.examples.push({ id: row.id, task: row.task, repeat: row.repeat, message: "" });
    classes.set(row.failure_class, entry);
  }
  return [...classes.values()].sort((one, other) => other.rollouts - one.rollouts);
}

function meanOf(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function histogramOf(values) {
  const numbers = values.filter(isNumber).sort((one, other) => one - other);
  if (!numbers.length) return null;
  const [low, high] = [numbers[0], numbers.at(-1)];
  const bins = low === high ? 1 : Math.min(MOST_BINS, Math.max(3, Math.ceil(Math.sqrt(numbers.length))));
  const counts = new Array(bins).fill(0);
  for (const number of numbers)
    counts[Math.min(bins - 1, Math.floor(((number - low) / (high - low || 1)) * bins))] += 1;
  const at = (share) => numbers[Math.min(numbers.length - 1, Math.floor(share * numbers.length))];
  return {
    low,
    high,
    counts,
    missing: values.length - numbers.length,
    mean: meanOf(numbers),
    median: at(0.5),
    p95: at(0.95),
  };
}

function gridOf(grid, ids, order) {
  if (!grid) return { tasks_total: 0, offset: 0, tasks: [] };
  let tasks = grid.tasks;
  if (ids)
    tasks = tasks
      .map((task) => ({ ...task, cells: task.cells.filter(([id]) => ids.has(id)) }))
      .filter((task) => task.cells.length);
  if (order && order.endsWith("mean")) {
    tasks = [...tasks].sort((one, other) => ordered(one.mean, other.mean, order.startsWith("-")));
  }
  return { tasks_total: tasks.length, offset: 0, tasks };
}

// In slices, so that the page stays alive and the search can be cancelled.
function searched(rows, textOf, { q, limit = 100 }, listeners) {
  const wanted = q.toLowerCase();
  let cancelled = false;
  let [place, matches] = [0, 0];
  const slice = () => {
    if (cancelled) return;
    for (const end = Math.min(rows.length, place + 50); place < end && matches < limit; place += 1) {
      const text = textOf(rows[place].id) || "";
      const at = text.toLowerCase().indexOf(wanted);
      if (at < 0) continue;
      matches += 1;
      listeners.match({ row: rows[place], excerpt: text.slice(Math.max(0, at - 60), at + wanted.length + 60) });
    }
    const state = { searched: place, total: rows.length, matches };
    if (place >= rows.length || matches >= limit) return listeners.done({ ...state, complete: place >= rows.length });
    listeners.progress(state);
    setTimeout(slice);
  };
  setTimeout(slice);
  return () => {
    cancelled = true;
  };
}
