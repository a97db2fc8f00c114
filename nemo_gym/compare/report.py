"""A comparison in words, tables, Markdown, JSON, CSV and JUnit's XML, and as a page.

The page is one HTML file of the same parts and charts as the profile page.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

import numpy as np

from nemo_gym.compare.comparison import HIGHER_IS_BETTER, Compared, Comparison
from nemo_gym.compare.gate import Outcome, Verdict
from nemo_gym.compare.pairing import task_values
from nemo_gym.metrics.charts import Interval, histogram, interval_chart, share_chart
from nemo_gym.metrics.paired import Difference, round_number_below
from nemo_gym.metrics.report import card, markup_table, plain_table, tiles, whole_page
from nemo_gym.terminal import PlainTable, new_table

Section = tuple[str, PlainTable]
_UNITS = {
    "tokens": "tokens",
    "input_tokens": "tokens",
    "output_tokens": "tokens",
    "duration": "s",
    "cost": "US dollars",
}
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


def sentence(compared: Compared) -> str:
    """What a comparison says, in one sentence."""
    found = compared.found
    if found is None:
        return f"{compared.metric}: {compared.new} and {compared.base} have fewer than two scored tasks in common"
    size = f"{found.tasks:,} tasks × {compared.repeats}"  # noqa: RUF001
    if not found.is_significant:
        sure = f"{_interval(compared)}, {_p(found.p)}, {size}"
        return f"{compared.metric}: no difference can be claimed ({sure}); {_power(compared)}"
    judged = compared.metric.startswith(HIGHER_IS_BETTER)
    word = ("better" if found.delta > 0 else "worse") if judged else ("higher" if found.delta > 0 else "lower")
    by = amount(compared, abs(found.delta))
    return f"{compared.metric}: {compared.new} is {word} by {by} ({_interval(compared)}, {_p(found.p)}, {size})"


def _power(compared: Compared) -> str:
    """What would have been found, and what it would take to find less."""
    found = compared.found
    assert found is not None
    smaller = round_number_below(max(abs(found.delta), found.detectable / 10, 1e-12))
    smaller = min(smaller, round_number_below(found.detectable / 1.5)) if found.detectable > 0 else smaller
    needed = _two_digits(found.tasks_needed(smaller))
    return (
        f"{amount(compared, found.detectable)} would probably have been found, a difference of "
        f"{amount(compared, smaller)} would need about {needed:,} tasks"
    )


def _two_digits(count: int) -> int:
    digits = max(len(str(count)) - 2, 0)
    return round(count, -digits)


def amount(compared: Compared, value: float) -> str:
    """A difference in the unit of its metric."""
    if compared.is_share:
        return f"{100 * value:.2g} points" if abs(value) < 0.1 else f"{100 * value:.1f} points"
    unit = _UNITS.get(compared.metric, "")
    return f"{value:,.4g} {unit}".strip()


def level(compared: Compared, value: float) -> str:
    """A mean in the unit of its metric."""
    return f"{100 * value:.1f} %" if compared.is_share else f"{value:,.4g}"


def _interval(compared: Compared) -> str:
    assert compared.found is not None
    factor = 100 if compared.is_share else 1
    low, high = (factor * end for end in (compared.found.ci_low, compared.found.ci_high))
    return f"95 %: {_short(low)} to {_short(high)}"


def _short(value: float) -> str:
    return f"{value:.1f}" if 1 <= abs(value) < 1000 else f"{value:,.3g}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"


def headlines(comparison: Comparison) -> list[str]:
    """What is to be read first: contradictions, then the verdict on each run."""
    lines = []
    for run in comparison.runs[1:]:
        main = comparison.main(run.name)
        if main.contradicts and main.with_failures is not None:
            lines.append(
                f"Attention: with failed rollouts counted as 0 the conclusion is another one: "
                f"{_with_failures_text(main, main.with_failures)}"
            )
    lines += [sentence(comparison.main(run.name)) for run in comparison.runs[1:]]
    for run in comparison.runs[1:]:
        differing = comparison.differing[run.name]
        if differing.confounded:
            lines.append(f"{run.name} against {comparison.base.name}: {differing.confounded}")
    return lines


def _with_failures_text(compared: Compared, found: Difference) -> str:
    return sentence(Compared(**{**vars(compared), "found": found, "with_failures": None}))


def notes(comparison: Comparison) -> list[str]:
    """What else a reader has to know."""
    lines = list(comparison.notes)
    for run in comparison.runs:
        failed = run.failed.total()
        missing = max(run.asked - run.rollouts - failed, 0)
        if failed or missing:
            classes = ", ".join(f"{name} {count}" for name, count in run.failure_classes.most_common(4))
            parts = [f"{failed:,} rollouts failed ({classes})"] if failed else []
            parts += [f"{missing:,} are missing"] if missing else []
            lines.append(
                f"{run.name}: {' and '.join(parts)}; they are left out above and count as 0 where that is said"
            )
    for run in comparison.runs[1:]:
        matched = comparison.matched[run.name]
        if matched.only_base or matched.only_new:
            lines.append(
                f"{len(matched):,} tasks are in both, {matched.only_base:,} only in {comparison.base.name}, "
                f"{matched.only_new:,} only in {run.name}"
            )
        differing = comparison.differing[run.name]
        if differing.unknown:
            lines.append(f"What else differs from {comparison.base.name} is not known in full: a manifest is missing")
        elif not differing.changes:
            lines.append(
                f"{run.name} and {comparison.base.name} have the same model, sampling and configuration; if something "
                "else was meant to differ, it did not reach this run (servers that were not restarted?)"
            )
    return list(dict.fromkeys(lines))


def sections(comparison: Comparison) -> Iterator[Section]:
    """The tables, with a heading each."""
    differing = _differing_table(comparison)
    if differing.rows:
        yield "What differs besides the results", differing
    if comparison.standings:
        yield "Leaderboard, over the tasks that all runs have scored", _standings_table(comparison)
    yield "Compared task by task", _metrics_table(comparison.metrics)
    if comparison.pairs:
        yield "Every two runs, p values after Holm", _pairs_table(comparison.pairs)
    for name, groups in comparison.groups.items():
        table = new_table("group", "tasks", "base", "new", "difference", "95 % interval", "p (Holm)", "")
        for group in groups:
            table.add_row(str(group.value), *_cells(group.compared), "few tasks" if group.is_small else "")
        yield f"{name} by group", table
    for name, flips in comparison.flips.items():
        if flips:
            table = new_table("task", comparison.base.name, name, "asked")
            for flip in flips:
                table.add_row(str(flip.task.index), f"{flip.base:.3g}", f"{flip.new:.3g}", flip.task.label)
            yield f"Tasks that changed most in {name}", table


def _differing_table(comparison: Comparison) -> PlainTable:
    table = new_table("run", "what", f"in {comparison.base.name}", "in this run")
    for name, differing in comparison.differing.items():
        for what, base, new in differing.changes[:12]:
            table.add_row(name, what, base, new)
        more = len(differing.changes) - 12
        if more > 0:
            table.add_row(name, f"… and {more} more", "", "")
    return table


def _standings_table(comparison: Comparison) -> PlainTable:
    table = new_table("rank", "run", "mean", "95 % interval", "tasks")
    main = comparison.metrics[0]
    for standing in comparison.standings:
        best, worst = standing.ranks
        score = standing.score
        ends = "" if score.ci95 is None else f"{level(main, score.ci95[0])} to {level(main, score.ci95[1])}"
        mean = "" if score.mean is None else level(main, score.mean)
        table.add_row(f"{best}" if best == worst else f"{best}-{worst}", standing.name, mean, ends, f"{score.tasks:,}")
    return table


def _metrics_table(compared: Sequence[Compared]) -> PlainTable:
    table = new_table("metric", "run", "tasks", "base", "new", "difference", "95 % interval", "p", "relative")
    for each in compared:
        table.add_row(each.metric, each.new, *_cells(each), _relative(each.found))
        if each.mcnemar_p is not None:
            table.add_row(f"{each.metric}, McNemar exact", each.new, "", "", "", "", "", f"{each.mcnemar_p:.3g}", "")
        if each.with_failures is not None:
            zero = Compared(**{**vars(each), "found": each.with_failures, "adjusted_p": None})
            table.add_row(f"{each.metric}, failed as 0", each.new, *_cells(zero), _relative(each.with_failures))
    return table


def _pairs_table(pairs: Sequence[Compared]) -> PlainTable:
    table = new_table("base", "new", "tasks", "base mean", "new mean", "difference", "95 % interval", "p (Holm)")
    for each in pairs:
        table.add_row(each.base, each.new, *_cells(each))
    return table


def _cells(compared: Compared) -> tuple[str, ...]:
    found = compared.found
    if found is None:
        return ("0", "", "", "", "", "")
    p = found.p if compared.adjusted_p is None else compared.adjusted_p
    sign = "+" if found.delta > 0 else ""
    factor = 100 if compared.is_share else 1
    ends = " to ".join(_short(factor * end) for end in (found.ci_low, found.ci_high))
    levels = level(compared, found.base), level(compared, found.new)
    return (f"{found.tasks:,}", *levels, f"{sign}{amount(compared, found.delta)}", ends, f"{p:.3g}")


def _relative(found: Difference | None) -> str:
    return "" if found is None or found.relative is None else f"{100 * found.relative:+.1f} %"


def as_markdown(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """Fit for a comment on a pull request."""
    parts = ["## " + " against ".join([", ".join(run.name for run in comparison.runs[1:]), comparison.base.name])]
    parts += [f"**{line}**" for line in headlines(comparison)]
    parts += [f"- {verdict.line}" for verdict in verdicts]
    for title, table in sections(comparison):
        lines = [table.columns, ("---",) * len(table.columns), *table.rows]
        cells = (
            "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |" for row in lines
        )
        parts.append(f"### {title}\n\n" + "\n".join(cells))
    parts += [f"- {note}" for note in notes(comparison)]
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """For programs; numbers are not rounded."""
    return {
        "baseline": comparison.base.name,
        "headlines": headlines(comparison),
        "notes": notes(comparison),
        "runs": [
            {
                "name": run.name,
                "files": [str(path) for path in run.paths],
                "tasks": len(run.tasks),
                "rollouts": run.rollouts,
                "failed": run.failed.total(),
                "failure_classes": dict(run.failure_classes),
                "tasks_in_both": len(comparison.matched[run.name]) if run.name in comparison.matched else None,
            }
            for run in comparison.runs
        ],
        "metrics": [_plain(each) for each in comparison.metrics],
        "pairs": [_plain(each) for each in comparison.pairs],
        "standings": [
            {"run": each.name, "mean": each.score.mean, "ci95": each.score.ci95, "ranks": each.ranks}
            for each in comparison.standings
        ],
        "groups": {
            name: [{"value": group.value, **_plain(group.compared)} for group in groups]
            for name, groups in comparison.groups.items()
        },
        "flips": {
            name: [
                {"task": flip.task.index, "task_in_new": flip.new_index, "asked": flip.task.label, "base": flip.base}
                | {"new": flip.new}
                for flip in flips
            ]
            for name, flips in comparison.flips.items()
        },
        "differs": {
            name: [{"what": what, "base": base, "new": new} for what, base, new in differing.changes]
            for name, differing in comparison.differing.items()
        },
        "gate": [
            {"condition": each.condition, "run": each.run, "outcome": each.outcome.name.lower(), "values": each.values}
            for each in verdicts
        ],
    }


def _plain(compared: Compared) -> dict[str, Any]:
    return {
        "metric": compared.metric,
        "base": compared.base,
        "new": compared.new,
        "found": _numbers(compared.found),
        "failures_as_zero": _numbers(compared.with_failures),
        "mcnemar_p": compared.mcnemar_p,
        "adjusted_p": compared.adjusted_p,
    }


def _numbers(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "base": found.base,
        "new": found.new,
        "delta": found.delta,
        "ci95": [found.ci_low, found.ci_high],
        "p": found.p,
        "relative": found.relative,
        "relative_ci95": found.relative_ci,
        "tasks": found.tasks,
        "detectable": found.detectable,
    }


def as_csv(comparison: Comparison) -> str:
    """One line for each metric of each run, and for each pair and group."""
    written = io.StringIO()
    names = (
        "kind",
        "metric",
        "base_run",
        "new_run",
        "group",
        "tasks",
        "base",
        "new",
        "delta",
        "ci_low",
        "ci_high",
        "p",
    )
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow((*names, "p_holm", "relative"))
    kinds = [("metric", "", each) for each in comparison.metrics] + [("pair", "", each) for each in comparison.pairs]
    kinds += [("group", str(group.value), group.compared) for groups in comparison.groups.values() for group in groups]
    for kind, group, each in kinds:
        found = each.found
        if found is not None:
            numbers = (found.tasks, found.base, found.new, found.delta, found.ci_low, found.ci_high, found.p)
            writer.writerow((kind, each.metric, each.base, each.new, group, *numbers, each.adjusted_p, found.relative))
    return written.getvalue()


def as_junit(comparison: Comparison, verdicts: Sequence[Verdict]) -> bytes:
    """One test case for each condition on each run."""
    failed = sum(verdict.outcome is Outcome.APPLIES for verdict in verdicts)
    undecided = sum(verdict.outcome is Outcome.UNDECIDED for verdict in verdicts)
    counts = {"tests": str(len(verdicts)), "failures": str(failed), "skipped": str(undecided), "errors": "0"}
    suite = ElementTree.Element("testsuite", {"name": "ng_compare", **counts})
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _xml_text(verdict.run), "name": verdict.condition}
        )
        message = _xml_text(verdict.line)
        if verdict.outcome is Outcome.APPLIES:
            ElementTree.SubElement(case, "failure", {"message": message}).text = _xml_text(
                "\n".join(headlines(comparison))
            )
        elif verdict.outcome is Outcome.UNDECIDED:
            ElementTree.SubElement(case, "skipped", {"message": message})
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _xml_text(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def finite(value: Any) -> Any:
    """The same data with null for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def to_json_text(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """`as_json` as text."""
    return json.dumps(finite(as_json(comparison, verdicts)), ensure_ascii=False, default=str)


def render_page(comparison: Comparison, verdicts: Sequence[Verdict]) -> str:
    """The comparison and what became of its conditions as one HTML page."""
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
