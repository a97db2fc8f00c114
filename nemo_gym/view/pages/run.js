// One run: its score, its tasks, how its numbers are distributed, what failed, and its rollouts.

import { source } from "./api.js";
import { histogramFigure, progressBar } from "./charts.js";
import { folded } from "./conversation.js";
import { el, replaceContent, say, throttled } from "./dom.js";
import { addClause, FilterBar } from "./filters.js";
import {
  bytes,
  countOf,
  decimal,
  duration,
  failuresText,
  interval,
  isNumber,
  moment,
  passAtK,
  runLabel,
  short,
  whole,
} from "./format.js";
import { rolloutGrid } from "./grid.js";
import { RolloutList } from "./list.js";
import { changeParameters, rolloutLink, runLink } from "./places.js";
import { stateCell } from "./runs.js";
import { keepingFocus } from "./tables.js";
import { breakable, jsonBlock, plain } from "./text.js";

const CHARTS = [
  ["reward", "Reward", decimal],
  ["output_tokens", "Output tokens", short],
  ["duration_s", "Duration", duration],
  ["steps", "Steps", short],
  ["tool_calls", "Tool calls", short],
  ["total_tokens", "Total tokens", short],
  ["input_tokens", "Input tokens", short],
];
const FIRST_CHARTS = 3;
const REFRESH_MS = 1000;
const REST_FACTOR = 20;
const LONGEST_REST_MS = 30000;

export async function runPage(place, signal) {
  const id = place.parts[1] || "";
  const run = await source.run(id, signal);
  const page = new RunPage(id, run, signal);
  page.show(place);
  page.loadFields();
  return {
    node: page.node,
    title: runLabel(run),
    crumbs: [[runLabel(run), runLink(id)]],
    update: (next) => {
      page.show(next);
      return true;
    },
    dispose: () => page.dispose(),
    keys: [
      { key: "j", label: "next rollout", run: () => page.list.step(1) },
      { key: "k", label: "previous rollout", run: () => page.list.step(-1) },
      { key: "Enter", label: "open the rollout", isNative: true },
      { key: "/", label: "search in all texts", run: () => page.filter.search.focus() },
      { key: "f", label: "write a filter", run: () => page.filter.expression.focus() },
      { key: "Escape", label: "cancel a search", run: () => page.list.stopSearch() },
      { key: "g", label: "the grid of tasks", run: () => page.focusGrid() },
      {
        key: "u",
        label: "all runs",
        run: () => {
          location.hash = "#/";
        },
      },
    ],
  };
}

class RunPage {
  constructor(id, run, signal) {
    Object.assign(this, {
      id,
      run,
      signal,
      parameters: new URLSearchParams(),
      asked: null,
      tookMs: 0,
      kept: { asTable: false, at: null },
    });
    this.filter = new FilterBar();
    this.list = new RolloutList(id, signal);
    this.head = el("div");
    this.cards = el("div.cards");
    this.gridBox = el("div.grid-place");
    this.charts = el("div.charts");
    this.failures = el("section.card", { "aria-labelledby": "failures-title", hidden: true });
    this.order = el(
      "select",
      { id: "grid-order", onchange: () => changeParameters({ order: this.order.value }) },
      [
        ["", "by task"],
        ["mean", "hardest first"],
        ["-mean", "easiest first"],
      ].map(([value, label]) => el("option", { value }, label)),
    );
    this.node = el(
      "div.page.run",
      null,
      this.head,
      this.cards,
      this.filter.node,
      el(
        "section.card",
        { "aria-labelledby": "grid-title" },
        el(
          "div.card-head",
          null,
          el("h2", { id: "grid-title" }, "Tasks × repeats"),
          el("div.field", null, el("label", { for: "grid-order" }, "Order"), this.order),
        ),
        this.gridBox,
      ),
      el("section", { "aria-label": "Distributions" }, this.charts),
      this.failures,
      this.list.node,
      manifestCard(run),
    );
    this.drawHead();
    // Never breaks off a slow answer, and rests much longer than the answers took: watching must not slow the run down.
    const refresh = throttled(
      () => (this.isLoading ? refresh() : this.load()),
      () => Math.min(LONGEST_REST_MS, Math.max(REFRESH_MS, REST_FACTOR * this.tookMs)),
    );
    const redraw = throttled(
      () => this.drawHead(),
      () => 200,
    );
    this.stopWatching = source.watch(id, {
      run: (changed) => {
        const ended = this.run.state === "running" && changed.state !== "running";
        this.run = { ...this.run, ...changed };
        redraw();
        if (ended) {
          this.load();
          this.loadFields();
        }
      },
      rollouts: ({ replaced }) => {
        refresh();
        if (replaced) this.loadFields();
      },
      again: () => refresh(),
      state: (works) => {
        this.lost = !works;
        redraw();
      },
    });
  }

  dispose() {
    this.isDisposed = true;
    this.stopWatching();
    this.list.dispose();
    this.dropGrid();
    if (this.asked) this.asked.abort();
  }

  show(place) {
    this.parameters = place.parameters;
    this.filter.show(this.parameters.get("where") || "", this.parameters.get("q") || "");
    this.order.value = this.parameters.get("order") || "";
    this.load();
  }

  async loadFields() {
    const { fields } = await source.fields(this.id, this.signal).catch(() => ({ fields: [] }));
    this.filter.offer(fields);
    this.list.offer(fields);
  }

  async load() {
    if (this.isDisposed) return;
    if (this.asked) this.asked.abort();
    this.asked = new AbortController();
    const { signal } = this.asked;
    this.isLoading = true;
    const began = performance.now();
    const where = this.parameters.get("where") || "";
    try {
      await Promise.all([
        this.list.load(this.parameters, signal),
        source.stats(this.id, where, signal).then((stats) => {
          if (!signal.aborted) this.drawStats(stats, where);
        }),
        source.grid(this.id, { where, order: this.parameters.get("order"), limit: 20000 }, signal).then((grid) => {
          if (!signal.aborted) this.drawGrid(grid);
        }),
      ]);
      this.filter.showProblem(null);
    } catch (error) {
      if (signal.aborted) return;
      this.filter.showProblem(error);
    } finally {
      if (!signal.aborted) {
        this.isLoading = false;
        this.tookMs = performance.now() - began;
      }
    }
  }

  drawHead() {
    const { run } = this;
    const about = [run.agents.join(", "), run.models.join(", "), moment(run.started_at)]
      .filter((text) => text && text !== "–")
      .join(" · ");
    replaceContent(
      this.head,
      el("div.page-head", null, el("h1", null, breakable(runLabel(run))), stateCell(run)),
      el("p.sub", null, plain(about)),
      el("p.coverage", null, plain(run.coverage || "")),
      run.problem ? el("p.warning", null, plain(run.problem)) : null,
      exportedNote(),
      this.liveNode(),
    );
    replaceContent(this.cards, scoreCards(run));
  }

  liveNode() {
    const { run } = this;
    if (this.lost)
      return el(
        "p.warning",
        { role: "status" },
        "The connection to ng_view is lost; this page goes on as soon as it is back.",
      );
    if (run.indexed === false)
      return el(
        "p.live",
        { role: "status" },
        `Reading the file: ${whole(100 * (run.progress || 0))} %. Numbers cover what has been read.`,
      );
    if (run.state !== "running") return null;
    const live = run.live || {};
    const parts = [
      isNumber(live.rate_per_s) ? `${decimal(Number(live.rate_per_s.toPrecision(2)))} rollouts/s` : null,
      isNumber(live.eta_s) ? `about ${duration(live.eta_s)} to go` : null,
      isNumber(live.in_flight) ? `${whole(live.in_flight)} in flight` : null,
    ];
    return el(
      "div.live",
      null,
      el("span.pulse", { "aria-hidden": "true" }),
      el("span", null, ["Live", ...parts].filter(Boolean).join(" · ")),
      progressBar(run.done, run.failed, run.expected),
    );
  }

  drawStats(stats, where) {
    this.histograms = stats.histograms;
    const choose = (name) => (low, high, isLast) => {
      const upper = isLast ? "<=" : "<";
      const clause = low === high ? `${name} == ${low}` : `${low} <= ${name} ${upper} ${high}`;
      changeParameters({ where: addClause(where, clause), offset: "" });
    };
    const figures = (charts) =>
      charts.map(([name, title, label]) =>
        el("div.card", null, histogramFigure(title, stats.histograms[name], { label, choose: choose(name) })),
      );
    const known = CHARTS.filter(([name]) => stats.histograms[name]);
    const first = known.filter(([name]) => tellsMuch(stats.histograms[name], stats.matching)).slice(0, FIRST_CHARTS);
    const isOpen = this.charts.querySelector("details[open]");
    const more = figures(known.filter((chart) => !first.includes(chart)));
    const fold = more.length
      ? el(
          "details.more-charts",
          { open: Boolean(isOpen) },
          el("summary", null, "More distributions"),
          el("div.chart-row", null, more),
        )
      : null;
    replaceContent(this.charts, where ? filteredNote(stats) : null, el("div.chart-row", null, figures(first)), fold);
    this.drawFailures(stats.failures, where);
    this.redrawGrid();
  }

  drawFailures(failures, where) {
    this.failures.hidden = !failures.length;
    const rows = failures.map((failure) =>
      el(
        "tr",
        null,
        el(
          "th",
          { scope: "row" },
          el(
            "button.link",
            {
              type: "button",
              onclick: () =>
                changeParameters({
                  where: addClause(where, `failure_class == ${JSON.stringify(failure.class)}`),
                  offset: "",
                }),
            },
            plain(failure.class),
          ),
        ),
        el("td.number", null, whole(failure.rollouts)),
        el("td.number", null, whole(failure.attempts)),
        el(
          "td",
          null,
          failure.examples
            .slice(0, 3)
            .map((example) =>
              el(
                "div.example",
                null,
                el(
                  "a",
                  { href: rolloutLink(this.id, example.id, this.parameters) },
                  plain(`task ${example.task} · repeat ${example.repeat}`),
                ),
                " ",
                el("span.message", null, plain((example.message || "").slice(0, 240))),
              ),
            ),
        ),
      ),
    );
    replaceContent(
      this.failures,
      el("h2", { id: "failures-title" }, "Failures"),
      el(
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
              ["Class", "Rollouts", "Attempts", "Examples"].map((label, place) =>
                el(place === 1 || place === 2 ? "th.number" : "th", { scope: "col" }, label),
              ),
            ),
          ),
          el("tbody", null, rows),
        ),
      ),
    );
  }

  drawGrid(grid) {
    this.grid = grid;
    this.redrawGrid();
  }

  // The colours need the range of rewards, which comes with the statistics.
  redrawGrid() {
    if (!this.grid || !this.histograms) return;
    const rewards = this.histograms.reward;
    const [low, high] = rewards ? [Math.min(0, rewards.low), Math.max(1, rewards.high)] : [0, 1];
    const scroller = this.gridBox.querySelector(".grid-scroll");
    const [top, hadFocus] = scroller ? [scroller.scrollTop, document.activeElement === scroller] : [0, false];
    this.dropGrid();
    this.drawn = rolloutGrid({
      tasks: this.grid.tasks,
      tasksTotal: this.grid.tasks_total,
      low,
      high,
      linkTo: (id) => rolloutLink(this.id, id, this.parameters),
      kept: this.kept,
    });
    keepingFocus(this.gridBox, () => replaceContent(this.gridBox, this.drawn));
    const fresh = this.gridBox.querySelector(".grid-scroll");
    if (fresh && top)
      requestAnimationFrame(() => {
        fresh.scrollTop = top;
      });
    if (fresh && hadFocus) fresh.focus({ preventScroll: true });
  }

  dropGrid() {
    if (this.drawn && this.drawn.dispose) this.drawn.dispose();
    this.drawn = null;
  }

  focusGrid() {
    const scroller = this.gridBox.querySelector(".grid-scroll");
    if (scroller) scroller.focus();
    else say("There is no grid");
  }
}

// Of most rollouts, and not the same for all of them.
function tellsMuch(histogram, matching) {
  return histogram.missing * 2 <= matching && histogram.high > histogram.low;
}

function exportedNote() {
  const { exported } = source;
  if (!exported) return null;
  const where = exported.where ? ` where ${exported.where}` : "";
  return el(
    "p.note",
    null,
    plain(
      `An exported file of ${moment(exported.at)}: a choice of at most ${whole(exported.limit)} rollouts${where}. The score and the distributions are those of the whole run.`,
    ),
  );
}

function filteredNote(stats) {
  const within = interval(stats.score);
  return el(
    "p.filtered",
    { role: "status" },
    `${countOf(stats.matching, "rollout")} match`,
    isNumber(stats.score.mean) ? `; mean reward ${decimal(stats.score.mean, 3)}${within ? ` (${within})` : ""}` : "",
  );
}

function scoreCards(run) {
  const within = interval(run.score);
  const tile = (label, value, under) =>
    el("div.tile", null, el("span.tile-label", null, label), el("b", null, value), el("span.under", null, under || ""));
  const passes = passAtK(run.pass_at_k);
  return [
    tile("Mean reward", decimal(run.score && run.score.mean, 3), within ? `95 %: ${within}` : "no interval"),
    passes
      ? tile(
          `pass@${run.pass_at_k.k}`,
          passes,
          `${decimal(Number((run.pass_at_k["pass@1[avg-of-k]"] || 0).toFixed(1)))} % on average`,
        )
      : null,
    tile(
      "Rollouts",
      whole(run.done),
      run.expected ? `of ${whole(run.expected)}, ${countOf(run.tasks, "task")}` : countOf(run.tasks, "task"),
    ),
    tile("Failed", whole(run.failed), failuresText(run) || "none"),
    tile(
      "Tokens",
      short(run.tokens && run.tokens.total_tokens),
      `${short(run.tokens && run.tokens.output_tokens)} of them output`,
    ),
    tile("Wall time", duration(run.wall_time_s), run.ended_at ? `ended ${moment(run.ended_at)}` : ""),
  ];
}

function manifestCard(run) {
  const { manifest } = run;
  const files = (run.files || []).map((file) =>
    el("li", null, el("code", null, plain(file.name)), ` ${bytes(file.size_bytes)}`),
  );
  const command =
    manifest && Array.isArray(manifest.command) && manifest.command.length
      ? manifest.command.map(String).join(" ")
      : null;
  return el(
    "section.card.manifest",
    { "aria-labelledby": "manifest-title" },
    el("h2", { id: "manifest-title" }, "How it was made"),
    command ? el("div.code", null, plain(command)) : null,
    files.length ? el("ul.files", null, files) : null,
    (run.metrics || []).length ? folded("Key metrics", () => jsonBlock(run.metrics)) : null,
    manifest
      ? folded("Manifest: options, configuration, versions", () => jsonBlock(manifest))
      : el("p.note", null, "There is no manifest beside this file."),
  );
}
