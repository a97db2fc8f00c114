"""What the collecting and the aggregating commands print at the end, and the exit code of the former.

A table per agent, what failed or is to be known, and where the files are.
"""

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nemo_gym.collect.metrics import AgentMetrics
from nemo_gym.collect.stopping import StopKind
from nemo_gym.collect.summary import RunSummary
from nemo_gym.errors import listed
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import masked_command
from nemo_gym.runs.read import records
from nemo_gym.runtime import raise_open_file_limit
from nemo_gym.terminal import harmless, harmless_json, new_table, print_line, print_table, shown

if TYPE_CHECKING:
    from nemo_gym.collect.planning import RunPlan
    from nemo_gym.combine.aggregation import AggregationSummary  # loads numpy

_RESUME = "+resume_from_cache=true"
_RETRY = "+retry_exhausted=true"
_YES = "+yes=true"
_UNKNOWN = "?"
_K = re.compile(r"(?<=pass@)\d+(?=/)|(?<=majority@)\d+(?=/)|(?<=avg-of-)\d+(?=\])")
_PERCENTAGE = re.compile(r"(?:^|/)(?:pass|majority|unanswered)@\d+(?:\[avg-of-\d+\])?(?:/|$)")
_IN_SCORE_UNITS = "/avg_sample_std_dev"
_MEAN_REWARD = "mean/reward"
_ROWS_LOOKED_AT = 1_000


def run_and_show(run: Callable[[], RunSummary | None], command: Sequence[str], *, as_json: bool) -> int:
    """Collect by calling `run`, with as many open files as the system allows; print its end, return its exit code."""
    raise_open_file_limit()
    summary = run()
    if summary is None:
        return 0
    print_summary(summary, as_json=as_json)
    print_resume_hint(summary, command)
    return summary.exit_code


def show_plan(plan: "RunPlan", *, as_json: bool) -> int:
    """Print what a run would do, for people, or as one line for programs; the exit code."""
    if as_json:
        print(harmless_json(orjson.dumps(plan.as_json(), option=orjson.OPT_NON_STR_KEYS).decode()))
    else:
        for line in plan.lines():
            print_line(line)
    return 0


def print_summary(summary: RunSummary, *, as_json: bool = False) -> None:
    """Print the end of a run to stdout, for people, or as one line for programs."""
    if as_json:
        print(harmless_json(orjson.dumps(summary.as_json(), option=orjson.OPT_NON_STR_KEYS).decode()))
        return
    of_rows = _numbers_of_rows([summary.paths]) if summary.metrics else ()
    for of_agent in summary.metrics:
        print_metrics(of_agent, of_rows)
        print_line()
    if summary.failures.by_class:
        _print_failures(summary)
        print_line()
    for line in summary.closing_lines():
        print_line(line)


def print_resume_hint(summary: RunSummary, command: Sequence[str] = ()) -> None:
    """Say on stderr, as the very last thing, how to go on with a run that is not complete."""
    if summary.missing:
        what = "1 rollout is missing" if summary.missing == 1 else f"{summary.missing} rollouts are missing"
    elif summary.metrics_problem or summary.is_interrupted:
        what = "The metrics are missing"
    else:
        return
    if summary.stopped is not None and summary.stopped.kind is StopKind.PILOT:
        hint = f"{what}. Go on with: {_as_typed(command, _RESUME, _YES)}"
    elif not summary.given_up:
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
    """The command line that goes on, without secrets, which are named; in words when the run was started otherwise."""
    name = Path(command[0]).name if command else ""
    if not name.endswith("collect_rollouts"):
        return f"the same command and {' '.join(options)}"
    keys = {option.partition("=")[0] for option in (_RESUME, _RETRY, *options)}
    kept = [argument for argument in command[1:] if f"+{argument.lstrip('+').partition('=')[0]}" not in keys]
    shown, hidden = [], []
    for argument, masked in zip(kept, masked_command(kept), strict=True):
        if argument == masked:
            shown.append(argument)
        else:
            hidden.append(argument.partition("=")[0])
    typed = shlex.join([name, *shown, *options])
    return f"{typed} and {listed(hidden)} as before" if hidden else typed


def print_metrics(of_agent: AgentMetrics, left_out: Collection[str] = ()) -> None:
    """Print the metrics of one agent, and how much of the run they rest on, as a table; not the means of `left_out`."""
    table = new_table("metric", "value", "95 % interval", "n")
    print_line(shown(of_agent.agent))
    coverage = of_agent.coverage or {}
    for name, value, interval, count in [*_key_metrics(of_agent, left_out), *_coverage_rows(coverage)]:
        table.add_row(shown(name), value, interval, count)
    print_table(table)


def _numbers_of_rows(runs: Iterable[RolloutPaths]) -> frozenset[str]:
    """Names of numbers that the rows brought along, such as an id: results repeat them, and they measure nothing."""
    names: set[str] = set()
    for paths in runs:
        with suppress(OSError):
            for _, _, row in islice(records(paths.materialized_inputs, "skip", may_lack_key=True), _ROWS_LOOKED_AT):
                names.update(name for name, value in row.items() if isinstance(value, int | float))
    return frozenset(names - {"reward"})


def _key_metrics(of_agent: AgentMetrics, left_out: Collection[str]) -> Iterable[tuple[str, str, str, str]]:
    coverage = of_agent.coverage or {}
    scored = str(coverage.get("scored", {}).get("rollouts", ""))
    printed = []
    most = coverage.get("least_repeats", coverage.get("repeats"))
    for name, value in _of_repeats_asked(of_agent, most).items():
        if name.startswith("mean/") and name.removeprefix("mean/") in left_out:
            continue
        printed.append(name)
        interval = _interval(coverage, "mean_excluding_failures") if name == _MEAN_REWARD else ""
        yield name, _value(name, value), interval, scored if name.startswith("mean/") else ""
    repeats = coverage.get("pass_at_k")
    if repeats and not any(map(_PERCENTAGE.search, printed)):
        for name, of in (("pass@k", str(repeats["tasks"])), ("pass@1[avg-of-k]", "")):
            yield name.replace("k", str(repeats["k"])), f"{_number(repeats[name])} %", "", of


def _of_repeats_asked(of_agent: AgentMetrics, repeats: int | None) -> dict[str, Any]:
    """The key metrics, with k not above the repeats asked for where equal rows made tasks with more rollouts."""
    found = of_agent.metrics.key_metrics
    if repeats is None:
        return found
    every = {**of_agent.metrics.agent_metrics, **found}
    chosen: dict[str, Any] = {}
    for name in found:
        of_k = _K.search(name)
        asked = (
            name if of_k is None or int(of_k[0]) <= repeats else f"{name[: of_k.start()]}{repeats}{name[of_k.end() :]}"
        )
        chosen[asked if asked in every else name] = every.get(asked, found[name])
    return chosen


def _coverage_rows(coverage: dict[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    if not coverage:
        return
    expected, failed, missing = (coverage[name]["rollouts"] for name in ("expected", "failed", "missing"))
    scored = coverage["scored"]["rollouts"]
    if failed or missing:
        mean = _number(coverage["mean_failures_as_zero"])
        yield "reward, failures as 0", mean, _interval(coverage, "mean_failures_as_zero"), str(scored + failed)
    if "stragglers" in coverage:
        late = coverage["stragglers"]["rollouts"]
        yield "reward, stragglers as 0", _number(coverage["mean_stragglers_as_zero"]), "", str(scored + late)
    yield "rollouts scored", f"{scored} of {expected}", "", ""
    if failed or missing:
        yield "rollouts failed / missing", f"{failed} / {missing}", "", ""
    if "stragglers" in coverage:
        yield "of these, stragglers", str(late), "", ""
    if "not_needed" in coverage:
        yield "rollouts not needed", str(coverage["not_needed"]["rollouts"]), "", ""


def _interval(coverage: dict[str, Any], mean: str) -> str:
    ends = (coverage.get("ci95") or {}).get(mean)
    return "" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"


def _value(name: str, value: Any) -> str:
    is_percentage = isinstance(value, float) and _PERCENTAGE.search(name) and not name.endswith(_IN_SCORE_UNITS)
    return f"{_number(value)} %" if is_percentage else _number(value)


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


def print_aggregation(summary: "AggregationSummary") -> None:
    """Print the end of an aggregation to stdout."""
    of_rows = _numbers_of_rows(map(RolloutPaths, summary.files.shards)) if summary.metrics else ()
    for of_agent in summary.metrics:
        print_metrics(_with_unknowns(of_agent), of_rows)
    print_line()
    print_line(f"Records: {summary.records} in {len(summary.files.shards)} shards")
    for remark in summary.remarks():
        print_line(f"  {remark}")
    if summary.expectations is not None and not summary.expectations.is_known:
        print_line("  how many there should be is not known: shards, or their manifests and inputs, are missing")
    if summary.metrics:
        print_line(f"Computed: {'here, without servers' if summary.is_offline else 'by the running servers'}")
    if summary.is_merged:
        print_line(summary.paths.how_to_view)
    print_line(f"Merged rollouts: {summary.paths.rollouts if summary.is_merged else 'not merged'}")
    print_line(f"Aggregate metrics: {summary.metrics_path or 'none: the shards have no records'}")


def _with_unknowns(of_agent: AgentMetrics) -> AgentMetrics:
    """The same with a question mark for what is not known."""
    coverage = of_agent.coverage or {}
    if not coverage or coverage["expected"]["rollouts"] is not None:
        return of_agent
    missing = {"rollouts": _UNKNOWN if coverage["failed"]["rollouts"] else 0}
    return replace(of_agent, coverage={**coverage, "expected": {"rollouts": _UNKNOWN}, "missing": missing})
