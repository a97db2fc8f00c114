"""What `ng_collect_rollouts` prints at the end: a table per agent, what failed, and where the files are."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.masked import masked_command
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.summary import RunSummary
from nemo_gym.tables import new_table, print_table
from nemo_gym.terminal import harmless, harmless_json, print_line, shown

_PROBLEM_LENGTH = 2_000
_RESUME = "+resume_from_cache=true"
_RETRY = "+retry_exhausted=true"


def print_summary(summary: RunSummary, *, as_json: bool = False) -> None:
    """Print the end of a run to stdout, for people, or as one line for programs."""
    if as_json:
        print(harmless_json(orjson.dumps(summary.as_json(), option=orjson.OPT_NON_STR_KEYS).decode()))
        return
    for of_agent in summary.metrics:
        print_metrics(of_agent)
        print_line()
    if summary.failures.by_class:
        _print_failures(summary)
        print_line()
    for line in _closing_lines(summary):
        print_line(line)


def print_resume_hint(summary: RunSummary, command: Sequence[str] = ()) -> None:
    """Say on stderr, as the very last thing, how to go on with a run that is not complete."""
    if summary.missing:
        what = "1 rollout is missing" if summary.missing == 1 else f"{summary.missing} rollouts are missing"
    elif summary.metrics_problem or summary.is_interrupted:
        what = "The metrics are missing"
    else:
        return
    if not summary.given_up:
        hint = f"{what}. Go on with: {_as_typed(command, _RESUME)}"
    elif summary.given_up == summary.missing:
        hint = f"{what}, given up. To try again all the same: {_as_typed(command, _RESUME, _RETRY)}"
    else:
        hint = (
            f"{what}, {summary.given_up} of them given up. Go on with: {_as_typed(command, _RESUME)} "
            f"({_RETRY} also tries again what was given up)"
        )
    print(harmless(hint), file=sys.stderr)


def _as_typed(command: Sequence[str], *options: str) -> str:
    """The command line that goes on, without secrets; in words when the run was started some other way."""
    name = Path(command[0]).name if command else ""
    if not name.endswith("collect_rollouts"):
        return f"the same command and {' '.join(options)}"
    keys = {option.partition("=")[0] for option in (_RESUME, _RETRY)}
    kept = [argument for argument in command[1:] if f"+{argument.lstrip('+').partition('=')[0]}" not in keys]
    return shlex.join([name, *masked_command(kept), *options])


def print_metrics(of_agent: AgentMetrics) -> None:
    """Print the metrics of one agent, and how much of the run they rest on, as a table."""
    table = new_table("metric", "value", "± interval (95 %)", "n")
    print_line(shown(of_agent.agent))
    coverage = of_agent.coverage or {}
    for name, value, interval, count in [*_key_metrics(of_agent), *_coverage_rows(coverage)]:
        table.add_row(shown(name), value, interval, count)
    print_table(table)


def _key_metrics(of_agent: AgentMetrics) -> Iterable[tuple[str, str, str, str]]:
    coverage = of_agent.coverage or {}
    scored = str(coverage.get("scored", {}).get("rollouts", ""))
    for name, value in of_agent.metrics.key_metrics.items():
        interval = _interval(coverage, "mean_excluding_failures") if name == "mean/reward" else ""
        yield name, _number(value), interval, scored if name.startswith("mean/") else ""


def _coverage_rows(coverage: dict[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    if not coverage:
        return
    expected, failed, missing = (coverage[name]["rollouts"] for name in ("expected", "failed", "missing"))
    scored = coverage["scored"]["rollouts"]
    if failed or missing:
        mean = _number(coverage["mean_failures_as_zero"])
        yield "reward, failures as 0", mean, _interval(coverage, "mean_failures_as_zero"), str(scored + failed)
    yield "rollouts scored", f"{scored} of {expected}", "", ""
    if failed or missing:
        yield "rollouts failed / missing", f"{failed} / {missing}", "", ""


def _interval(coverage: dict[str, Any], mean: str) -> str:
    ends = (coverage.get("ci95") or {}).get(mean)
    return "" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"


def _number(value: Any) -> str:
    if isinstance(value, bool) or value is None or not isinstance(value, int | float):
        return shown(value)
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 10_000 else f"{value:,.0f}"


def _print_failures(summary: RunSummary) -> None:
    table = new_table("failure", "attempts", "rollouts", "example")
    ordered = sorted(summary.failures.by_class.items(), key=lambda item: (-item[1].attempts, item[0]))
    for name, of_class in ordered:
        table.add_row(name, of_class.attempts, of_class.rollouts, of_class.example)
    print_table(table)


def _closing_lines(summary: RunSummary) -> Iterable[str]:
    paths = summary.paths
    if not summary.expected:
        yield "Nothing to do: there are no rows to roll out."
    elif not summary.owed:
        given_up = f", {summary.given_up_before} given up" if summary.given_up_before else ""
        yield f"Nothing to do: {summary.finished} of {summary.expected} rollouts finished before{given_up}."
    elif summary.stopped is not None:
        yield f"Stopped early: {summary.stopped.message}"
    yield f"Rollouts: {_outcomes(summary)}"
    if summary.tokens:
        tokens = summary.tokens
        since = " (since resuming)" if summary.finished_before else ""
        yield f"Tokens: {tokens['input_tokens']:,} in, {tokens['output_tokens']:,} out{since}"
    yield f"Time: {summary.wall_time_s:.1f} s"
    if summary.metrics_problem:
        yield f"No metrics: {shown(summary.metrics_problem, _PROBLEM_LENGTH)}"
    if summary.metrics_unwanted:
        yield "No metrics, as disable_aggregation says; ng_aggregate_rollouts computes them, also over several files"
    yield f"Materialized inputs: {paths.materialized_inputs}"
    yield f"Rollouts file: {paths.rollouts}"
    yield f"Aggregate metrics: {summary.metrics_path}"
    if summary.failures.by_class:
        yield f"Failures: {paths.failures}"


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
