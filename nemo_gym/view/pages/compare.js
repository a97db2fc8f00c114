// Two or more runs beside each other: their numbers, and the tasks on which they differ most.

import { source } from "./api.js";
import { intervalFigure } from "./charts.js";
import { el } from "./dom.js";
import { countOf, decimal, duration, interval, isNumber, moment, passAtK, runLabel, short, whole } from "./format.js";
import { runLink, sideLink } from "./places.js";
import { stateCell } from "./runs.js";
import { plain } from "./text.js";

const MOST_RUNS = 6;
const TASKS_SHOWN = 200;

export async function comparePage(place, signal) {
  const ids = (place.parameters.get("runs") || "").split(",").filter(Boolean).slice(0, MOST_RUNS);
  if (ids.length < 2) throw new Error("A comparison needs two runs: tick them in the list of runs.");
  const [runs, grids] = await Promise.all([
    Promise.all(ids.map((id) => source.run(id, signal))),
    Promise.all(ids.map((id) => source.grid(id, { limit: 20000 }, signal))),
  ]);
  const node = el(
    "div.page",
    null,
    el("h1", null, "Comparison"),
    el("p.sub", null, countOf(runs.length, "run")),
    el(
      "section.card",
      null,
      el("h2", null, "Mean reward, with its 95 % interval"),
      el(
        "div.compare-chart",
        null,
        intervalFigure(
          runs.map((run) => ({
            label: runLabel(run),
            mean: run.score && run.score.mean,
            low: run.score && run.score.ci95 && run.score.ci95[0],
            high: run.score && run.score.ci95 && run.score.ci95[1],
          })),
        ),
        el(
          "ol.series",
          null,
          runs.map((run, at) =>
            el(
              "li",
              null,
              el(`i.series-${at % 6}`, { "aria-hidden": "true" }),
              el("a", { href: runLink(run.id) }, plain(runLabel(run))),
            ),
          ),
        ),
      ),
    ),
    el("section.card", null, el("h2", null, "Numbers"), el("div.scroll", null, numbers(runs))),
    tasksCard(runs, grids),
  );
  return { node, title: "Comparison", crumbs: [["Comparison", location.hash]], keys: [] };
}

function numbers(runs) {
  const facts = [
    ["State", stateCell],
    ["Agents", (run) => plain(run.agents.join(", "))],
    ["Model", (run) => plain(run.models.join(", "))],
    ["Started", (run) => moment(run.started_at)],
    ["Done", (run) => `${whole(run.done)}${run.expected ? ` of ${whole(run.expected)}` : ""}`],
    ["Failed", (run) => whole(run.failed)],
    ["Mean reward", (run) => decimal(run.score && run.score.mean, 3)],
    ["95 % interval", (run) => interval(run.score) || "–"],
    ["pass@k", (run) => (run.pass_at_k ? `${passAtK(run.pass_at_k)} (k = ${run.pass_at_k.k})` : "–")],
    ["Output tokens", (run) => short(run.tokens && run.tokens.output_tokens)],
    ["Wall time", (run) => duration(run.wall_time_s)],
  ];
  return el(
    "table.compare",
    null,
    el(
      "thead",
      null,
      el(
        "tr",
        null,
        el("td"),
        runs.map((run) => el("th", { scope: "col" }, el("a", { href: runLink(run.id) }, plain(runLabel(run))))),
      ),
    ),
    el(
      "tbody",
      null,
      facts.map(([name, text]) =>
        el(
          "tr",
          null,
          el("th", { scope: "row" }, name),
          runs.map((run) => el("td", null, text(run))),
        ),
      ),
    ),
  );
}

// Tasks with a mean in at least two runs, those that differ most first.
function tasksCard(runs, grids) {
  const means = new Map();
  grids.forEach((grid, which) => {
    for (const task of grid.tasks) {
      const entry = means.get(task.task) || { task: task.task, of: [] };
      entry.of[which] = task;
      means.set(task.task, entry);
    }
  });
  const spread = ({ of }) => {
    const values = of.map((task) => task && task.mean).filter(isNumber);
    return values.length > 1 ? Math.max(...values) - Math.min(...values) : -1;
  };
  const all = [...means.values()]
    .map((entry) => ({ ...entry, spread: spread(entry) }))
    .filter((entry) => entry.spread >= 0);
  const differing = all.filter((entry) => entry.spread > 0).sort((one, other) => other.spread - one.spread);
  const rows = differing.slice(0, TASKS_SHOWN).map((entry) =>
    el(
      "tr",
      null,
      el("th", { scope: "row" }, plain(`task ${entry.task}`)),
      runs.map((run, which) => el("td.number", null, entry.of[which] ? decimal(entry.of[which].mean) : "–")),
      el("td.number", null, decimal(entry.spread)),
      el("td", null, sideBySide(runs, entry)),
    ),
  );
  const says = all.length
    ? `${whole(differing.length)} of ${countOf(all.length, "task")} that these runs share have different means.`
    : "These runs share no task.";
  return el(
    "section.card",
    null,
    el("h2", null, "Tasks"),
    el("p.note", null, says),
    rows.length
      ? el(
          "div.scroll",
          null,
          el(
            "table",
            null,
            el(
              "thead",
              null,
              el(
                "tr",
                null,
                el("th", { scope: "col" }, "Task"),
                runs.map((run) => el("th.number", { scope: "col" }, plain(runLabel(run)))),
                el("th.number", { scope: "col" }, "Difference"),
                el("td"),
              ),
            ),
            el("tbody", null, rows),
          ),
        )
      : null,
    differing.length > TASKS_SHOWN ? el("p.note", null, `The ${TASKS_SHOWN} that differ most.`) : null,
  );
}

// The first repeats whose rewards differ, in the first two runs that have the task.
function sideBySide(runs, entry) {
  const [one, other] = entry.of
    .map((task, which) => ({ task, run: runs[which] }))
    .filter(({ task }) => task && task.cells.length);
  if (!other) return null;
  const differing = other.task.cells.find(([, , reward]) => reward !== one.task.cells[0][2]) || other.task.cells[0];
  return el("a", { href: sideLink([one.run.id, one.task.cells[0][0]], [other.run.id, differing[0]]) }, "side by side");
}
