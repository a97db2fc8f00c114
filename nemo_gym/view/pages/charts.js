// Small charts as SVG, drawn with plain arithmetic. They look as those of metrics/charts.py, whose style sheet they share;
// every mark says its numbers.

import { el, svgEl } from "./dom.js";
import { countOf, decimal, isNumber, short, whole } from "./format.js";

const CHART_WIDTH = 320;
const CHART_HEIGHT = 120;
const BASE = 96; // where the bars stand
const TOP = 8;

// `label` formats a value; `choose(low, high, isLast)` is called with the range of a bar that was clicked.
export function histogramFigure(title, histogram, { label = short, choose = null } = {}) {
  const { low, high, counts, missing, mean, median, p95 } = histogram;
  const most = Math.max(...counts, 1);
  const step = CHART_WIDTH / counts.length;
  const width = Math.min(step - Math.min(2, step * 0.2), 56);
  const edge = (place) => (counts.length === 1 ? low : low + ((high - low) * place) / counts.length);
  const bars = counts.map((count, place) => {
    const height = count ? Math.max(2, ((BASE - TOP) * count) / most) : 0;
    const range = counts.length === 1 ? label(low) : `${label(edge(place))} to ${label(edge(place + 1))}`;
    const title_ = svgEl("title", null, `${range}: ${countOf(count, "rollout")}`);
    const x = place * step + (step - width) / 2;
    const isLast = place === counts.length - 1;
    return svgEl(
      "g",
      {
        class: choose && count ? "bar can-choose" : "bar",
        onclick: choose && count ? () => choose(edge(place), edge(place + 1), isLast) : null,
      },
      title_,
      svgEl("rect", { class: "bar-area", x: place * step, y: 0, width: step, height: BASE }),
      svgEl("rect", { class: "mark", x, y: BASE - height, width, height, rx: Math.min(2, width / 4) }),
    );
  });
  const summary = `mean ${label(mean)}, median ${label(median)}, 95 % below ${label(p95)}`;
  const axis = [
    svgEl("line", { class: "grid", x1: 0, x2: CHART_WIDTH, y1: BASE + 0.5, y2: BASE + 0.5 }),
    svgEl("text", { x: 0, y: CHART_HEIGHT - 6 }, label(low)),
    counts.length > 1 ? svgEl("text", { x: CHART_WIDTH, y: CHART_HEIGHT - 6, class: "end" }, label(high)) : null,
    medianMark(histogram),
  ];
  const says = `${title}: ${summary}; from ${label(low)} to ${label(high)}`;
  return el(
    "figure.chart",
    null,
    el(
      "figcaption",
      null,
      el("b", null, title),
      el("span", null, `median ${label(median)} · mean ${label(mean)} · p95 ${label(p95)}`),
    ),
    svgEl("svg", { viewBox: `0 0 ${CHART_WIDTH} ${CHART_HEIGHT}`, role: "img", "aria-label": says }, bars, axis),
    missing ? el("p.note", null, `${countOf(missing, "rollout")} without it`) : null,
  );
}

function medianMark({ low, high, median }) {
  if (!isNumber(median) || high <= low) return null;
  const x = ((median - low) / (high - low)) * CHART_WIDTH;
  return svgEl("path", { class: "median-mark", d: `M${x} ${BASE + 2}l4 6h-8z` });
}

// Means with their intervals, one row each: [{label, mean, low, high}].
export function intervalFigure(rows) {
  const values = rows.flatMap((row) => [row.mean, row.low, row.high]).filter(isNumber);
  const low = Math.min(0, ...values);
  const high = Math.max(1, ...values);
  const at = (value) => 8 + ((value - low) / (high - low)) * (CHART_WIDTH - 16);
  const height = rows.length * 24 + 20;
  const marks = rows.map((row, place) => {
    const y = place * 24 + 14;
    return svgEl(
      "g",
      null,
      svgEl("title", null, `${row.label}: ${decimal(row.mean)}`),
      svgEl("line", { class: "grid", x1: 8, x2: CHART_WIDTH - 8, y1: y, y2: y }),
      isNumber(row.low)
        ? svgEl("line", { class: "interval", x1: at(row.low), x2: at(row.high), y1: y, y2: y })
        : null,
      isNumber(row.mean) ? svgEl("circle", { class: `series-${place % 6}`, cx: at(row.mean), cy: y, r: 5 }) : null,
    );
  });
  const says = rows.map((row) => `${row.label}: ${decimal(row.mean)}`).join("; ");
  return svgEl(
    "svg",
    {
      class: "intervals",
      viewBox: `0 0 ${CHART_WIDTH} ${height}`,
      role: "img",
      "aria-label": `Mean rewards with 95 % intervals. ${says}`,
    },
    marks,
    svgEl("text", { x: 8, y: height - 2 }, short(low)),
    svgEl("text", { x: CHART_WIDTH - 8, y: height - 2, class: "end" }, short(high)),
  );
}

export function progressBar(done, failed, expected) {
  const all = Math.max(expected || done + failed, 1);
  const share = (count) => `${Math.min(100, (100 * count) / all)}%`;
  const bar = el("div.progress", {
    role: "img",
    "aria-label": expected
      ? `${whole(done)} of ${whole(expected)} done, ${whole(failed)} failed`
      : `${whole(done)} done, ${whole(failed)} failed`,
  });
  for (const [kind, count] of [
    ["done", done],
    ["failed", failed],
  ]) {
    const part = el(`i.${kind}`);
    part.style.width = share(count);
    bar.append(part);
  }
  return bar;
}
