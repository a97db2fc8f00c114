"""A comparison as a page: one HTML file of the same parts and charts as the profile page."""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from nemo_gym.compare.comparison import Compared, Comparison
from nemo_gym.compare.gate import Verdict
from nemo_gym.compare.pairing import task_values
from nemo_gym.compare.report import amount, headlines, level, notes, sections
from nemo_gym.metrics.charts import Interval, histogram, interval_chart, share_chart
from nemo_gym.metrics.report import card, markup_table, plain_table, tiles, whole_page

_MOST_TILES = 12
_MOST_DISTRIBUTIONS = 6
_OWN_STYLE = """
.heat td { padding: 2px 4px; text-align: center; font-size: 12px; min-width: 44px; border: 0; }
.heat td:first-child { text-align: left; max-width: 520px; }
.heat span { display: block; }
.said { margin: 6px 0; color: var(--text); font-size: 16px; }
.warn { color: var(--bad); font-weight: 620; }
""" + "\n".join(
    f".h{step} {{ background: color-mix(in srgb, var(--high) {10 * step}%, var(--card)); }}" for step in range(11)
)


def render_page(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """The whole page."""
    others = ", ".join(run.name for run in comparison.runs[1:])
    title = f"{others} against {comparison.base.name}"
    said = [
        f'<p class="said{" warn" if line.startswith("Attention") else ""}">{escape(line)}</p>'
        for line in [*headlines(comparison), *(verdict.line for verdict in verdicts)]
    ]
    tables = [
        card(heading, plain_table(table.columns, table.rows), is_wide=True) for heading, table in sections(comparison)
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        *said,
        tiles(list(_tiles(comparison))[:_MOST_TILES]),
        _differences(comparison.metrics),
        f'<div class="cards">{"".join(_distributions(comparison))}</div>',
        *tables,
        _heat_map(comparison),
        *(f"<p>{escape(note)}</p>" for note in notes(comparison)),
    ]
    return whole_page(title, body, _OWN_STYLE)


def _tiles(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for run in comparison.runs[1:]:
        main = comparison.main(run.name)
        if main.found is not None:
            sign = "+" if main.found.delta > 0 else ""
            yield f"{sign}{amount(main, main.found.delta)}", f"{run.name}, {main.metric}"
            yield level(main, main.found.new), f"mean of {run.name}"
            yield f"{main.found.tasks:,}", "tasks in both"


def _differences(compared: Sequence[Compared]) -> str:
    """The differences of shares as points with their intervals."""
    rows = []
    for each in compared:
        if each.is_share and (found := each.found) is not None:
            kind = "high" if found.ci_low > 0 else "bad" if found.ci_high < 0 else "low"
            label = f"{each.new}, {each.metric}"
            rows.append(Interval(label, found.delta, found.ci_low, found.ci_high, f"mark {kind}"))
    if not rows:
        return ""
    title = "Differences in points with their 95 % intervals"
    return card(title, interval_chart(title, rows, lambda value: f"{100 * value:+.1f}"), is_wide=True)


def _distributions(comparison: Comparison) -> Iterator[str]:
    """How the first metric is distributed over the tasks of each run, drawn as the profile page does."""
    metric = comparison.metrics[0].metric if comparison.metrics else None
    for run in comparison.runs[:_MOST_DISTRIBUTIONS] if metric is not None else ():
        means = task_values(run, str(metric)).means
        means = means[np.isfinite(means)]
        if not len(means):
            continue
        title = f"{metric} of the tasks of {run.name}"
        is_share = bool(np.all((means >= 0) & (means <= 1)))
        draw = share_chart if is_share else histogram
        yield card(title, draw(title, means, f"{metric}", "tasks"), "Mean over the rollouts of each task")


def _heat_map(comparison: Comparison) -> str:
    """Tasks by runs, coloured by value, those that differ most on top."""
    if not comparison.heat:
        return ""
    values = [value for _, row in comparison.heat for value in row]
    low, high = min(values), max(values)

    def cell(value: float) -> str:
        step = round(10 * (value - low) / (high - low)) if high > low else 0
        return f'<span class="h{step}">{value:.2g}</span>'

    rows = [[escape(f"{task.index}: {task.label}"), *map(cell, row)] for task, row in comparison.heat]
    table = markup_table(["task", *(run.name for run in comparison.runs)], rows, "heat")
    return card(f"The {len(rows)} tasks that differ most", table, is_wide=True)
