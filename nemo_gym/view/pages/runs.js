// All runs below the path that was opened.

import { source } from "./api.js";
import { progressBar } from "./charts.js";
import { el, replaceContent, throttled } from "./dom.js";
import {
  countOf,
  decimal,
  duration,
  failuresText,
  interval,
  moment,
  passAtK,
  runLabel,
  short,
  whole,
} from "./format.js";
import { changeParameters, placeLink, runLink } from "./places.js";
import { focusStep, keepingFocus, sortHeader } from "./tables.js";
import { breakable, plain } from "./text.js";

const RUN_COLUMNS = [
  { key: "name", label: "Run", value: runLabel, cell: nameCell },
  {
    key: "agents",
    label: "Agents",
    value: (run) => run.agents.join(", "),
    cell: (run) => breakable(run.agents.join(", ")),
  },
  {
    key: "model",
    label: "Model",
    value: (run) => run.models.join(", "),
    cell: (run) => breakable(run.models.join(", ")),
  },
  {
    key: "when",
    label: "When",
    value: (run) => run.started_at,
    cell: (run) => whenCell(run),
  },
  { key: "state", label: "State", value: (run) => run.state, cell: stateCell },
  { key: "done", label: "Done", number: true, value: (run) => run.done, cell: doneCell },
  { key: "reward", label: "Mean reward", number: true, value: (run) => run.score && run.score.mean, cell: scoreCell },
  {
    key: "pass",
    label: "pass@k",
    number: true,
    value: (run) => run.pass_at_k && run.pass_at_k["pass@k"],
    cell: passCell,
  },
  { key: "failed", label: "Failed", number: true, value: (run) => run.failed, cell: failedCell },
  {
    key: "tokens",
    label: "Tokens",
    number: true,
    value: (run) => run.tokens && run.tokens.total_tokens,
    cell: (run) => short(run.tokens && run.tokens.total_tokens),
  },
  {
    key: "wall",
    label: "Wall time",
    number: true,
    value: (run) => run.wall_time_s,
    cell: (run) => duration(run.wall_time_s),
  },
];

function nameCell(run) {
  return [
    el("a.row-link", { href: runLink(run.id), "data-key": `run ${run.id}` }, breakable(runLabel(run))),
    run.problem ? el("span.under.problem", null, plain(run.problem)) : null,
  ];
}

export function stateCell(run) {
  const words = { running: "running", finished: "finished", failed: "with failures", stopped: "stopped" };
  const state = run.state === "finished" && run.has_failures ? "failed" : run.state;
  return el(`span.state.state-${state}`, null, words[state] || state);
}

function whenCell(run) {
  const [day, time] = moment(run.started_at).split(" ");
  return [el("span.nowrap", null, day), time ? el("span.under", null, time) : null];
}

function doneCell(run) {
  const reading =
    run.indexed === false ? el("span.under", null, `reading ${whole(100 * (run.progress || 0))} %`) : null;
  const of = run.expected ? ` of ${whole(run.expected)}` : "";
  return [`${whole(run.done)}${of}`, run.expected ? progressBar(run.done, run.failed, run.expected) : null, reading];
}

function scoreCell(run) {
  const within = interval(run.score);
  return [el("b", null, decimal(run.score && run.score.mean, 3)), within ? el("span.under", null, within) : null];
}

function passCell(run) {
  const text = passAtK(run.pass_at_k);
  return text ? [text, el("span.under", null, `k = ${run.pass_at_k.k}`)] : "–";
}

function failedCell(run) {
  return run.failed ? [whole(run.failed), el("span.under", null, breakable(failuresText(run)))] : "0";
}

export async function runsPage(place, signal) {
  const answer = await source.runs(signal);
  const runs = new Map(answer.runs.map((run) => [run.id, run]));
  const ticked = new Set();
  const state = { parameters: place.parameters, text: "" };
  const table = el("table.runs.cards-on-phone");
  const bar = el("div.tick-bar", { hidden: true });
  const note = el("p.note", { role: "status" });
  const draw = () => keepingFocus(table, () => drawTable({ table, bar, note, runs, ticked, state, draw }));
  const box = el("input", {
    type: "search",
    id: "run-filter",
    placeholder: "name, agent or model",
    autocomplete: "off",
    oninput: () => {
      state.text = box.value.toLowerCase();
      draw();
    },
  });
  const node = el(
    "div.page",
    null,
    el(
      "div.page-head",
      null,
      el("h1", null, "Runs"),
      el("div.field", null, el("label", { for: "run-filter" }, "Find"), box),
    ),
    el("p.sub", null, plain(answer.root)),
    bar,
    el("div.scroll", null, table),
    note,
  );
  draw();
  const redraw = throttled(draw, () => 300);
  const stop = source.watch(null, {
    run: (run) => {
      runs.set(run.id, { ...runs.get(run.id), ...run });
      redraw();
    },
  });
  return {
    node,
    title: "Runs",
    dispose: stop,
    update: (next) => {
      state.parameters = next.parameters;
      draw();
      return true;
    },
    keys: [
      { key: "j", label: "next run", run: () => focusStep(table, 1) },
      { key: "k", label: "previous run", run: () => focusStep(table, -1) },
      { key: "/", label: "find a run", run: () => box.focus() },
    ],
  };
}

function drawTable({ table, bar, note, runs, ticked, state, draw }) {
  const sort = state.parameters.get("sort") || "";
  const shown = sortedRuns(
    [...runs.values()].filter((run) => matches(run, state.text)),
    sort,
  );
  const tick = (run) =>
    el("input", {
      type: "checkbox",
      "aria-label": `compare ${runLabel(run)}`,
      checked: ticked.has(run.id),
      "data-key": `tick ${run.id}`,
      onchange: (event) => {
        if (event.target.checked) ticked.add(run.id);
        else ticked.delete(run.id);
        drawBar(bar, runs, ticked, draw);
      },
    });
  const rows = shown.map((run) =>
    el(
      "tr",
      null,
      el("td.tick", null, tick(run)),
      RUN_COLUMNS.map((column) =>
        el(column.number ? "td.number" : "td", { "data-label": column.label }, el("div", null, column.cell(run))),
      ),
    ),
  );
  replaceContent(
    table,
    el("caption.visually-hidden", null, "Runs, newest first unless sorted"),
    el(
      "thead",
      null,
      el(
        "tr",
        null,
        el("th", { scope: "col" }, el("span.visually-hidden", null, "Compare")),
        RUN_COLUMNS.map((column) => sortHeader(column, sort, (next) => changeParameters({ sort: next }))),
      ),
    ),
    el("tbody", null, rows),
  );
  note.textContent = emptyNote(runs.size, shown.length);
  drawBar(bar, runs, ticked, draw);
}

function emptyNote(all, shown) {
  if (!all) return "There is no run here yet. One appears as soon as ng_collect_rollouts writes its first rollout.";
  return shown === all ? countOf(all, "run") : `${whole(shown)} of ${countOf(all, "run")}`;
}

function drawBar(bar, runs, ticked, draw) {
  const ids = [...ticked].filter((id) => runs.has(id));
  bar.hidden = !ids.length;
  const link = placeLink(["compare"], { runs: ids.join(",") });
  replaceContent(
    bar,
    `${countOf(ids.length, "run")} ticked `,
    ids.length > 1
      ? el("a.button.primary", { href: link }, "Compare them")
      : el("span.note", null, "tick one more to compare"),
    " ",
    el(
      "button.quiet",
      {
        type: "button",
        onclick: () => {
          ticked.clear();
          draw();
        },
      },
      "Untick all",
    ),
  );
}

function matches(run, text) {
  return (
    !text ||
    [run.name, run.path, ...run.agents, ...run.models].some((each) => String(each).toLowerCase().includes(text))
  );
}

function sortedRuns(runs, sort) {
  const column = RUN_COLUMNS.find((each) => each.key === sort.replace(/^-/, ""));
  const value = column ? column.value : (run) => run.started_at;
  const direction = column && !sort.startsWith("-") ? 1 : -1;
  const missing = (each) => each === null || each === undefined;
  return runs.sort((one, other) => {
    const [left, right] = [value(one), value(other)];
    if (missing(left) || missing(right)) return missing(left) - missing(right);
    return left < right ? -direction : left > right ? direction : 0;
  });
}
