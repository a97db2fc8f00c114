"""What `ng_collect_rollouts` prints at the end: a table per agent, what failed, and where the files are."""

from collections.abc import Iterable
from typing import Any

from rich.text import Text

from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.summary import RunSummary
from nemo_gym.rollouts.terminal import shown
from nemo_gym.tables import new_table, print_table


def print_summary(summary: RunSummary) -> None:
    """Print the end of a run to stdout."""
    for of_agent in summary.metrics:
        _print_metrics(of_agent)
    if summary.failures.by_class:
        _print_failures(summary)
    print()
    for line in _closing_lines(summary):
        print(line)


def _print_metrics(of_agent: AgentMetrics) -> None:
    table = new_table("metric", "value", "± 95 %", "n")
    table.title = Text(shown(of_agent.agent))
    coverage = of_agent.coverage or {}
    for name, value, interval, count in [*_key_metrics(of_agent), *_coverage_rows(coverage)]:
        table.add_row(Text(shown(name)), value, interval, count)
    print_table(table)


def _key_metrics(of_agent: AgentMetrics) -> Iterable[tuple[str, str, str, str]]:
    coverage = of_agent.coverage or {}
    scored = str(coverage.get("scored", {}).get("rollouts", ""))
    for name, value in of_agent.metrics.key_metrics.items():
        interval = _half_width(coverage, "mean_excluding_failures") if name == "mean/reward" else ""
        yield name, _number(value), interval, scored if name.startswith("mean/") else ""


def _coverage_rows(coverage: dict[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    if not coverage:
        return
    expected, failed, missing = (coverage[name]["rollouts"] for name in ("expected", "failed", "missing"))
    scored = coverage["scored"]["rollouts"]
    if failed or missing:
        mean = _number(coverage["mean_failures_as_zero"])
        yield "reward, failures as 0", mean, _half_width(coverage, "mean_failures_as_zero"), str(scored + failed)
    yield "rollouts scored", f"{scored} of {expected}", "", ""
    if failed or missing:
        yield "rollouts failed / missing", f"{failed} / {missing}", "", ""


def _half_width(coverage: dict[str, Any], mean: str) -> str:
    ends = (coverage.get("ci95") or {}).get(mean)
    return "" if ends is None else f"{(ends[1] - ends[0]) / 2:.4g}"


def _number(value: Any) -> str:
    if isinstance(value, bool) or value is None or not isinstance(value, int | float):
        return shown(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_failures(summary: RunSummary) -> None:
    table = new_table("failure", "attempts", "rollouts", "example")
    for name, of_class in sorted(summary.failures.by_class.items(), key=lambda item: -item[1].attempts):
        table.add_row(Text(name), str(of_class.attempts), str(of_class.rollouts), Text(of_class.example))
    print_table(table)


def _closing_lines(summary: RunSummary) -> Iterable[str]:
    paths = summary.paths
    if summary.had_nothing_to_do:
        yield "Nothing to do: every rollout was finished or given up before."
    elif summary.stopped is not None:
        yield f"Stopped early: {summary.stopped.message}"
    yield f"Rollouts: {_outcomes(summary)}"
    if summary.tokens:
        tokens = summary.tokens
        yield f"Tokens: {tokens['input_tokens']:,} in, {tokens['output_tokens']:,} out"
    yield f"Time: {summary.wall_time_s:.1f} s"
    yield f"Materialized inputs: {paths.materialized_inputs}"
    yield f"Rollouts file: {paths.rollouts}"
    yield f"Aggregate metrics: {summary.metrics_path}"
    if summary.missing:
        yield f"Failures: {paths.failures}"
        yield (
            f"{summary.missing} rollouts are missing. The same command with +resume_from_cache=true goes on from here"
            + ("; +retry_exhausted=true also retries those given up" if summary.given_up_before else "")
        )


def _outcomes(summary: RunSummary) -> str:
    parts = [f"{summary.finished} of {summary.expected} finished"]
    for count, what in (
        (summary.finished_before, "of them before"),
        (summary.counts[Outcome.FAILURE], "failed"),
        (summary.given_up_before, "given up before"),
        (summary.counts[Outcome.DISCARDED], "discarded"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)
