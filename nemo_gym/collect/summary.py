"""What a run came to: the numbers its last lines, its exit code and `+json=true` are made of.

Of a run that owes nothing more this can be told without any server, by only reading its files.
"""

import html
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.collect.failures import FailureTable
from nemo_gym.collect.health import HealthCounts
from nemo_gym.collect.metrics import AgentMetrics, current_metrics
from nemo_gym.collect.server_health import RetryLedger
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import FilesNow, find_changes, read_manifest
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.read import keys_in, records
from nemo_gym.runs.record import FailureClass, Outcome, RolloutKey, Row, agent_name_of
from nemo_gym.runs.resume import Plan, plan_resumed, read_attempts, read_gate
from nemo_gym.runs.rows import InputRows, is_complete
from nemo_gym.runs.run import repeat_rule, resumes
from nemo_gym.runs.spending import COST_USD, Meter, Percentiles, Samples, amount_text, meter_for, money
from nemo_gym.terminal import harmless, shown

if TYPE_CHECKING:
    from nemo_gym.token_id_capture.delivery import MaskedFraction

_PROBLEM_LENGTH = 2_000
EXIT_OK, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 0, 1, 130


@dataclass
class RunSummary:
    """What a run came to: counts, failures, tokens, metrics and the exit code."""

    paths: RolloutPaths
    expected: int = 0
    """Rollouts of the whole run."""
    finished_before: int = 0
    """Rollouts an earlier run had finished."""
    given_up_before: int = 0
    """Rollouts an earlier run had given up."""
    given_up: int = 0
    """Rollouts that a resumed run would not try again, this one's and earlier ones'."""
    owed: int = 0
    """Rollouts this run had to make."""
    no_longer_asked: int = 0
    """Rollouts in the file that an earlier run was asked for, and this one is not."""
    not_needed: int = 0
    """Repeats that were not made because their tasks were decided, in this run and before."""
    counts: Counter[Outcome] = field(default_factory=Counter)
    """Rollouts of this run, by how they ended."""
    failures: FailureTable = field(default_factory=FailureTable)
    """What failed in this run, and why earlier ones gave up on rollouts."""
    retries: RetryLedger = field(default_factory=RetryLedger)
    """What model servers rode out by trying again."""
    meter: Meter = field(default_factory=Meter)
    """What this run's attempts have used, as the models reported it."""
    before: Meter | None = None
    """What earlier runs had used, where that is known."""
    budgets: dict[str, float] = field(default_factory=dict)
    """The limits of the whole run, by option."""
    counted_elsewhere: dict[str, float] = field(default_factory=dict)
    """What is used up of them, where others have added it up."""
    wall_time_s: float = 0.0
    stopped: Stop | None = None
    """Why it ended early, if it did."""
    signals: list[int] = field(default_factory=list)
    """Those that asked it to end."""
    metrics: list[AgentMetrics] = field(default_factory=list)
    metrics_path: Path | None = None
    metrics_problem: str | None = None
    """Why there are no metrics although they were wanted."""
    metrics_unwanted: str | None = None
    """Why there are none and need not be."""
    health: HealthCounts = field(default_factory=HealthCounts)
    """What is odd about this run's finished rollouts."""
    masked: "MaskedFraction | None" = None
    """Whose token ids could not be put onto their records, where that was wanted."""
    _taken: dict[str, Percentiles] = field(default_factory=dict)
    """What this run's finished rollouts took, by agent."""

    @property
    def tokens(self) -> Counter[str]:
        """Token counts of this run's rollouts, as the models reported them."""
        return self.meter.tokens

    @property
    def finished(self) -> int:
        """Rollouts in the file."""
        return self.finished_before + self.counts[Outcome.SUCCESS]

    @property
    def missing(self) -> int:
        """Rollouts that are not in the file and would be needed."""
        return max(0, self.expected - self.finished - self.not_needed)

    @property
    def stragglers(self) -> int:
        """Rollouts that this run did not wait for."""
        of_class = self.failures.by_class.get(FailureClass.STRAGGLER)
        return 0 if of_class is None else of_class.rollouts

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended it."""
        return self.stopped is not None and self.stopped.kind is StopKind.INTERRUPTED

    @property
    def exit_code(self) -> int:
        """0 only when every rollout is in the file, as fit for training as was wanted, and so are wanted metrics."""
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        is_unfit = self.stopped is not None and self.stopped.kind is StopKind.TOO_MANY_MASKED
        return EXIT_INCOMPLETE if self.missing or self.metrics_problem or is_unfit else EXIT_OK

    def count_usage(self, row: Row, result: Mapping[str, Any], outcome: Outcome) -> None:
        """Add the tokens of one result and, if it is a success, what it took and whether it looks as it should."""
        agent, is_success = agent_name_of(row) or "", outcome is Outcome.SUCCESS
        self.meter.add(result, row.get(TASK_INDEX_KEY_NAME), agent, success=is_success)
        if is_success:
            taken = self._taken.get(agent)
            if taken is None:
                taken = self._taken[agent] = Percentiles()
            taken.add_times(result)
            self.health.add(result, agent)

    def spent(self, budget: str) -> float:
        """How much of a budget is used up, over all starts of the run."""
        if budget in self.counted_elsewhere:
            return self.counted_elsewhere[budget]
        return self.meter.amount(budget) + (0.0 if self.before is None else self.before.amount(budget))

    @property
    def cost_usd_in_all(self) -> float | None:
        """What the whole run has cost so far, failed attempts included; None without prices, or if nobody knows."""
        is_unknown = self.meter.prices is None or (self._unknown and not self.spent(COST_USD))
        return None if is_unknown else self.spent(COST_USD)

    @property
    def _unknown(self) -> int:
        """Finished rollouts that do not say what they used."""
        return self.meter.unknown + (0 if self.before is None else self.before.unknown)

    @property
    def percentiles(self) -> dict[str, dict[str, Any]]:
        """`p50` and `p95` of duration and tokens, of each agent: those of the metrics, else those of this run."""
        of_metrics = {of_agent.agent: of_agent.percentiles for of_agent in self.metrics if of_agent.percentiles}
        of_this_run = {agent: taken.as_json() for agent, taken in self._taken.items()}
        return of_metrics or {agent: found for agent, found in of_this_run.items() if found}

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        return {
            "output_jsonl_fpath": str(self.paths.rollouts),
            "materialized_inputs_jsonl_fpath": str(self.paths.materialized_inputs),
            "failures_jsonl_fpath": str(self.paths.failures),
            "aggregate_metrics_fpath": None if self.metrics_path is None else str(self.metrics_path),
            "manifest_fpath": str(self.paths.manifest),
            "expected": self.expected,
            "finished": self.finished,
            "finished_before": self.finished_before,
            "missing": self.missing,
            "failed": self.counts[Outcome.FAILURE] + self.given_up_before,
            "given_up": self.given_up,
            "discarded": self.counts[Outcome.DISCARDED],
            "no_longer_asked": self.no_longer_asked,
            "stragglers": self.stragglers,
            "not_needed": self.not_needed,
            "failures": {
                name: {"attempts": of_class.attempts, "rollouts": of_class.rollouts, "example": of_class.example}
                for name, of_class in self.failures.by_class.items()
            },
            "retries": self.retries.as_json(),
            "tokens": dict(self.tokens),
            "cost_usd": self.meter.cost_or_none,
            "cost_usd_in_all": self.cost_usd_in_all,
            "budgets": {
                name: {"limit": limit, "used": None if self._unknown else self.spent(name)}
                for name, limit in self.budgets.items()
            },
            "percentiles": self.percentiles,
            "health": self.health.as_json(),
            "wall_time_s": round(self.wall_time_s, 3),
            "stopped": None if self.stopped is None else {"kind": self.stopped.kind, "message": self.stopped.message},
            "exit_code": self.exit_code,
            "key_metrics": {of_agent.agent: of_agent.metrics.key_metrics for of_agent in self.metrics},
            "coverage": {of_agent.agent: of_agent.coverage for of_agent in self.metrics},
            "metrics_problem": self.metrics_problem,
        }

    def closing_lines(self) -> Iterator[str]:
        """What a run says at its end, beside its metrics: what came of it, what it took, and where the files are."""
        if not self.expected:
            yield "Nothing to do: there are no rows to roll out."
        elif not self.owed:
            given_up = f", {self.given_up_before} given up" if self.given_up_before else ""
            yield f"Nothing to do: {self.finished} of {self.expected} rollouts finished before{given_up}."
        elif self.stopped is not None:
            yield f"Stopped early: {self.stopped.message}"
        yield f"Rollouts: {self._outcomes()}"
        yield from self._stragglers_told()
        if self.tokens:
            since = " (since resuming)" if self.finished_before else ""
            yield f"Tokens: {self.tokens['input_tokens']:,} in, {self.tokens['output_tokens']:,} out{since}"
        yield from self._spending()
        for agent, found in self.percentiles.items():
            of_whom = f" of {shown(agent)}" if len(self.percentiles) > 1 else ""
            yield f"Per rollout{of_whom}: {_as_text(found)}"
        yield f"Time: {self.wall_time_s:.1f} s"
        yield from self.retries.lines()
        yield from self._health()
        no_metrics = self.metrics_problem or self.metrics_unwanted
        if no_metrics:
            yield f"No metrics: {shown(no_metrics, _PROBLEM_LENGTH)}"
        if self.finished or self.failures.by_class:
            yield self.paths.how_to_view
        yield f"Materialized inputs: {self.paths.materialized_inputs}"
        yield f"Rollouts file: {self.paths.rollouts}"
        if self.metrics_path is not None:
            yield f"Aggregate metrics: {self.metrics_path}"
        if self.failures.by_class:
            yield f"Failures: {self.paths.failures}"

    def _health(self) -> Iterator[str]:
        odd = self.health.line()
        if odd:
            yield f"Health: {odd}. Look at them: {shlex.join(['ng_check_rollouts', f'+input={self.paths.rollouts}'])}"

    def _spending(self) -> Iterator[str]:
        if self.meter.prices is not None:
            in_all = f" (since resuming; {money(self.spent(COST_USD))} in all)" if self.finished_before else ""
            unknown = ", ".join(shown(model) for model in sorted(map(str, self.meter.unpriced)))
            left_out = f", without what has no price: {unknown}" if unknown else ""
            if self.meter.unknown:
                left_out += f", without {self.meter.unknown:,} rollouts that do not say how many tokens they used"
            cost = self.meter.cost_or_none
            yield f"Cost: {'unknown' if cost is None else money(cost)}{in_all}{left_out}"
        for name, limit in self.budgets.items() if not self._unknown else ():
            used = self.spent(name)
            above = f", {100 * (used / limit - 1):.1f} % above" if used > limit else ""
            of = money(limit) if name == COST_USD else f"{limit:,.0f}"
            yield f"Budget: {amount_text(name, used)} of {name}={of} used{above}"

    def __str__(self) -> str:
        """For `print`: the key metrics of each agent, what failed, and the closing lines."""
        metrics = [f"{shown(agent)}: {shown(name)} = {value}" for agent, name, value in self._key_metrics()]
        return "\n".join(map(harmless, [*metrics, *self.failures.lines(), *self.closing_lines()]))

    def _repr_html_(self) -> str:
        """For notebooks: the same as a table."""
        rows = [
            f"<tr><td>{_html(agent)}</td><td>{_html(name)}</td><td>{_html(value)}</td></tr>"
            for agent, name, value in self._key_metrics()
        ]
        for line in self.closing_lines():
            what, _, value = line.partition(": ")
            rows.append(f"<tr><th>{_html(what)}</th><td colspan=2>{_html(value)}</td></tr>")
        for name, failures in self.failures.by_class.items():
            cells = f"<td>{_html(name)}</td><td>{failures.attempts} attempts, {failures.rollouts} rollouts</td>"
            rows.append(
                f"<tr><th>Failure</th>{cells}</tr><tr><td></td><td colspan=2>{_html(failures.example)}</td></tr>"
            )
        return f"<table>{''.join(rows)}</table>"

    def _key_metrics(self) -> Iterator[tuple[str, str, str]]:
        for of_agent in self.metrics:
            for name, value in of_agent.metrics.key_metrics.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                yield of_agent.agent, name, f"{value:.4g}" if is_number else shown(value)

    def _stragglers_told(self) -> Iterator[str]:
        if not self.stragglers:
            return
        scores = [
            f"{shown(of_agent.agent)} {_mean(found, 'mean_excluding_failures')}, with stragglers as 0 "
            f"{_mean(found, 'mean_stragglers_as_zero')}"
            for of_agent in self.metrics
            if "stragglers" in (found := of_agent.coverage or {})
        ]
        told = f"Stragglers: {self.stragglers} rollouts were too slow for +finish_at and are not scored; leaving slow "
        told += "rollouts out biases the score"
        if scores:
            told += f" ({'; '.join(scores)})"
        yield f"{told}. +resume_from_cache=true without +finish_at makes them"

    def _outcomes(self) -> str:
        parts = [f"{self.finished} of {self.expected} finished"]
        for count, what in (
            (self.finished_before, "of them before"),
            (self.counts[Outcome.FAILURE], "failed"),
            (self.given_up_before, "given up before"),
            (self.counts[Outcome.DISCARDED], "discarded"),
            (self.no_longer_asked, "more in the file that are no longer asked for"),
            (self.not_needed, "not needed"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return ", ".join(parts)


def _mean(coverage: Mapping[str, Any], name: str) -> str:
    value = coverage.get(name)
    return "?" if value is None else f"{value:.4g}"


def _as_text(percentiles: Mapping[str, Any]) -> str:
    """As `median 1.2 s (p95 3.4 s), median 120 tokens (p95 480)`."""
    parts = []
    if took := percentiles.get("duration_s"):
        parts.append(f"median {took['p50']:,g} s (p95 {took['p95']:,g} s)")
    if used := percentiles.get("total_tokens"):
        parts.append(f"median {used['p50']:,} tokens (p95 {used['p95']:,})")
    return ", ".join(parts)


def _html(text: str) -> str:
    return html.escape(harmless(text))


def why_no_metrics(config: RolloutCollectionConfig) -> str | None:
    """Why a run is to have no metrics; None when it is to have them."""
    if not config.disable_aggregation:
        return None
    if config.chosen_shard is not None:
        return "ng_aggregate_rollouts computes them over all shards"
    return "+disable_aggregation=true asks for none; ng_aggregate_rollouts computes them, also over several files"


def summary_of(plan: Plan, config: RolloutCollectionConfig, models: Sequence[str] = ()) -> RunSummary:
    """The summary of a run that is about to begin; it knows why earlier runs gave up on rollouts, and what they used.

    `models` are those that the config asks for.
    """
    paths = config.paths
    samples = None if config.pilot is None else plan.meter.samples if plan.meter is not None else Samples()
    summary = RunSummary(
        paths,
        meter=meter_for(config, models, samples),
        before=plan.meter,
        budgets=config.budgets,
        expected=plan.total,
        finished_before=plan.done,
        given_up_before=plan.given_up,
        given_up=plan.given_up,
        owed=plan.owed,
        no_longer_asked=plan.no_longer_asked,
        not_needed=plan.left_out,
    )
    _add_earlier_failures(summary.failures, plan, paths)
    return summary


def count_given_up(summary: RunSummary, cap: int) -> int:
    """How many rollouts the next run would leave out, now that this one is over."""
    if not summary.missing:
        return 0
    attempts = read_attempts(summary.paths)
    asked = keys_in(summary.paths.materialized_inputs) if attempts else ()
    given_up = sum(of_key.is_terminal or of_key.counted >= cap for key, of_key in attempts.items() if key in asked)
    return min(summary.missing, given_up)


def is_settled(summary: RunSummary, config: RolloutCollectionConfig) -> bool:
    """Whether there is nothing to do, not even metrics to compute; those on disk are then part of the summary."""
    if summary.owed:
        return False
    if config.disable_aggregation:
        return True
    metrics = current_metrics(summary.paths)
    if metrics:
        summary.metrics, summary.metrics_path = metrics, summary.paths.aggregate_metrics
    return metrics is not None


def find_settled(config: RolloutCollectionConfig) -> tuple[Plan, RunSummary] | None:
    """A run to resume in which there is nothing to do; None when there is, or when that cannot be told."""
    if not (resumes(config) and _is_same_run(config)):
        return None
    manifest = read_manifest(config.paths.manifest)
    models = () if manifest is None else manifest.models
    meter = meter_for(config, models) if config.is_metered else None
    gate = read_gate(
        config.paths,
        config.attempt_cap,
        retry_exhausted=config.retry_exhausted,
        damaged="leave",
        meter=meter,
        rule=repeat_rule(config),
    )
    plan = plan_resumed(config.paths, gate, "leave", None if manifest is None else manifest.agents)
    summary = summary_of(plan, config, models)
    return (plan, summary) if is_settled(summary, config) else None


def _add_earlier_failures(table: FailureTable, plan: Plan, paths: RolloutPaths) -> None:
    given_up = set(plan.given_up_keys)
    if not given_up:
        return
    seen: Counter[RolloutKey] = Counter()
    for key, _, failure in records(paths.failures, "leave", may_lack_key=True):
        if key is not None and key in given_up:
            seen[key] += 1
            table.add(failure, failure, is_final=seen[key] == plan.attempts[key].made)


def _is_same_run(config: RolloutCollectionConfig) -> bool:
    paths = config.paths
    manifest = read_manifest(paths.manifest)
    if manifest is None:
        return paths.materialized_inputs.exists()
    if not is_complete(paths.materialized_inputs, manifest.expected_rollouts):
        return False
    return not find_changes(manifest, config, FilesNow.of_run(config), lambda: InputRows(config).scan.rows)
