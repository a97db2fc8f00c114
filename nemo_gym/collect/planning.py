"""Before the money is spent: what a run would do (`+plan=true`), and a pilot that tells what the whole will take.

A plan reads and checks everything that a run does and touches nothing. A pilot is the first part of the run: tasks
spread over the input, with all their repeats. What they took is what the estimate rests on, and whoever asked for the
run decides whether the rest is worth it.
"""

import asyncio
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_gym.collect.estimate import Forecast, OwedTasks, Source, earlier_run, forecast, owed_tasks, own_part
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.collect.summary import RunSummary
from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.keys import TASK_INDEX_KEY_NAME
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import Expected
from nemo_gym.runs.options import RolloutCollectionConfig, describe
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.reconcile import rows_to_resume
from nemo_gym.runs.record import Outcome, RolloutKey, Row, agent_name_of
from nemo_gym.runs.resume import Plan, read_gate
from nemo_gym.runs.rows import InputRows
from nemo_gym.runs.run import Run, check_input, check_start, resumes
from nemo_gym.runs.spending import COST_USD, OUTPUT_TOKENS, TOTAL_TOKENS, Meter, Samples, amount_text, prices_of
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 3600.0
_LONGEST_TEXT = 300
_MOST_ITEMS = 20
_REQUEST_LENGTH = 3_000
_AMOUNT_OF = {TOTAL_TOKENS: "total_tokens", OUTPUT_TOKENS: "output_tokens", COST_USD: "cost_usd"}


def spread_over(tasks: Sequence[Any], number: int) -> list[Any]:
    """So many tasks, one from each of as many equal parts of the input; the same ones every time."""
    if number >= len(tasks):
        return list(tasks)
    draw = random.Random(len(tasks))
    ends = [len(tasks) * part // number for part in range(number + 1)]
    return [tasks[draw.randrange(start, end)] for start, end in pairwise(ends)]


async def in_parts(run: Run, plan: Plan, summary: RunSummary) -> AsyncIterator[Plan]:
    """What to send now: the pilot, if one is wanted, and the rest if that is; else all of it.

    When the rest is not wanted, `summary` says that the run was stopped.
    """
    config = run.config
    _tell_what_to_expect(run, plan)
    if config.pilot is None:
        yield plan
        return
    pilot, rest, tasks = _split(plan, config.pilot)
    if pilot.owed:
        logger.info("Pilot: %d rollouts of %d tasks, spread over the input, come first", pilot.owed, tasks)
        yield pilot
    if summary.stopped is not None or not rest.owed:
        return
    if not await _goes_on(config, rest, summary):
        summary.stopped = Stop(
            StopKind.PILOT, f"the pilot of {tasks} tasks is over, and nobody has said to go on; +yes=true does"
        )
        return
    yield replace(rest, done=plan.done + summary.counts[Outcome.SUCCESS])


def _split(plan: Plan, number: int) -> tuple[Plan, Plan, int]:
    """A plan for the pilot, one for the rest, and how many tasks the pilot has; chosen among all tasks of the run."""
    if plan.rows is not None:
        of_rows = [row.get(TASK_INDEX_KEY_NAME) for row in plan.rows]
        chosen = set(spread_over(list(dict.fromkeys(of_rows)), number))
        parts = [
            [row for row in plan.rows if (row.get(TASK_INDEX_KEY_NAME) in chosen) is first] for first in (True, False)
        ]
        pilot, rest = (replace(plan, rows=rows, owed_by_agent=_by_agent(rows)) for rows in parts)
        return pilot, rest, len(chosen)
    lines = (parse(line.content) for line in iter_lines(plan.path))
    of_lines = [(row.get(TASK_INDEX_KEY_NAME), agent_name_of(row) or "") for row in lines]
    chosen = set(spread_over(list(dict.fromkeys(task for task, _ in of_lines)), number))
    owed = plan.owed_lines or bytearray(b"\1" * len(of_lines))
    plans = []
    for first in (True, False):
        mine = bytearray(
            is_owed and (task in chosen) is first for is_owed, (task, _) in zip(owed, of_lines, strict=True)
        )
        by_agent = Counter(agent for is_mine, (_, agent) in zip(mine, of_lines, strict=True) if is_mine)
        plans.append(replace(plan, owed_lines=mine, owed_by_agent=by_agent))
    return plans[0], plans[1], len(chosen)


def _by_agent(rows: Iterable[Row]) -> Counter[str]:
    return Counter(agent_name_of(row) or "" for row in rows)


def _tell_what_to_expect(run: Run, plan: Plan) -> None:
    """Say what the run will take, if there is something to tell it from."""
    config = run.config
    own = plan.meter.samples if plan.meter is not None and plan.done else None
    if config.estimate_from is None and own is None:
        return
    owed = owed_tasks(plan, with_content=config.estimate_from is not None)
    if config.estimate_from is not None:
        source = earlier_run(Path(config.estimate_from), owed, prices_of(config.prices, run.models))
    else:
        assert own is not None
        source = own_part(own, plan.meter)
    spent = _spent([plan.meter] if plan.meter is not None else [])
    made = forecast(source, owed, spent, _in_parallel(config, plan.owed_by_agent), has_prices=bool(config.prices))
    for line in _forecast_lines(made, source, config.budgets):
        logger.info("%s", line)


async def _goes_on(config: RolloutCollectionConfig, rest: Plan, summary: RunSummary) -> bool:
    """Say what the rest will take, and whether it is wanted."""
    samples = summary.meter.samples
    assert samples is not None
    source = own_part(samples, summary.before, summary.meter)
    spent = _spent(meter for meter in (summary.before, summary.meter) if meter is not None)
    in_parallel = _in_parallel(config, rest.owed_by_agent)
    made = forecast(source, owed_tasks(rest), spent, in_parallel, has_prices=bool(config.prices))
    for line in _forecast_lines(made, source, config.budgets):
        logger.info("%s", line)
    return config.yes or await _agrees(f"Go on with the other {rest.owed:,} rollouts? [y/N] ")


async def _agrees(question: str) -> bool:
    """Ask whoever sits at the terminal; nobody does not agree."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(question)
    sys.stderr.flush()
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    answered: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        if not answered.done():
            answered.set_result(os.read(descriptor, 1_000))

    loop.add_reader(descriptor, read)  # a thread that reads could not be ended by Ctrl-C
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            answer = await answered
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return answer.strip().lower() in (b"y", b"yes")


def _spent(meters: Iterable[Meter]) -> dict[str, float]:
    spent: Counter[str] = Counter()
    cost = 0.0
    for meter in meters:
        spent.update(meter.tokens)
        cost += meter.cost_usd
    return {**spent, "cost_usd": cost}


def _in_parallel(config: RolloutCollectionConfig, owed_by_agent: Mapping[str, int]) -> int:
    """How many rollouts will be in flight."""
    caps = config.concurrency
    of_agents = sum(min(caps.cap_of(agent) or owed, owed) for agent, owed in owed_by_agent.items())
    return min(of_agents, caps.total or of_agents)


def _forecast_lines(made: Forecast | None, source: Source, budgets: Mapping[str, float]) -> list[str]:
    if made is None:
        return [f"No estimate: {source.text} has too few rollouts that say how many tokens they used"]
    lines = made.lines()
    for name, limit in budgets.items():
        amount = made.amounts.get(_AMOUNT_OF[name])
        if amount is not None and amount.high > limit:
            sure = "will" if amount.low > limit else "may"
            lines.append(f"  That {sure} exceed {name}={limit:,g}: the run then stops before all rollouts are made")
    return lines


@dataclass
class RunPlan:
    """What a run would do."""

    config: RolloutCollectionConfig
    paths: RolloutPaths
    expected: dict[str, Expected] = field(default_factory=dict)
    owed: OwedTasks = field(default_factory=dict)
    owed_by_agent: Counter[str] = field(default_factory=Counter)
    done: int = 0
    given_up: int = 0
    first: Row | None = None
    """The first row that would be sent."""
    meter: Meter = field(default_factory=Meter)
    """What the finished part has used."""
    estimate: Forecast | None = None
    why_no_estimate: str = ""
    servers: str = "none were asked; a run asks them about its rows"
    files: list[Path] = field(default_factory=list)
    moved: list[Path] = field(default_factory=list)
    """Of an earlier run, which a fresh one moves away."""

    @property
    def rollouts(self) -> int:
        """How many rollouts the whole run has."""
        return sum(expected.rollouts for expected in self.expected.values())

    @property
    def still_owed(self) -> int:
        """Of these, what is still to be made."""
        return self.owed_by_agent.total()

    @property
    def pilot_tasks(self) -> int | None:
        """How many tasks the pilot has."""
        tasks = sum(expected.tasks for expected in self.expected.values())
        return None if self.config.pilot is None else min(self.config.pilot, tasks)

    def lines(self) -> Iterator[str]:
        """The plan as lines of text, for a terminal."""
        tasks = sum(expected.tasks for expected in self.expected.values())
        yield f"Plan: {tasks:,} tasks, {self.rollouts:,} rollouts; nothing is sent and nothing is written"
        for agent, expected in self.expected.items():
            yield (
                f"  {shown(agent)}: {expected.tasks:,} tasks, {expected.rollouts:,} rollouts, "
                f"{self.owed_by_agent[agent]:,} still to be made"
            )
        if resumes(self.config) or self.done:
            given_up = f", {self.given_up:,} given up" if self.given_up else ""
            yield f"Resuming: {self.done:,} finished{given_up}, {self.still_owed:,} still to be made"
        yield f"Caps: {describe(self.config)}"
        for name, limit in self.config.budgets.items():
            used = self.meter.amount(name)
            yield f"Budget: {name}={limit:,g}, {amount_text(name, used)} of it used so far"
        yield f"Servers: {self.servers}"
        yield "Files that would be written:"
        yield from (f"  {path}" for path in self.files)
        if self.moved:
            yield f"Files of an earlier run that would be moved to {self.paths.previous}:"
            yield from (f"  {path}" for path in self.moved)
        if self.first is not None:
            text = json.dumps(cut(self.first), indent=2, ensure_ascii=False)
            yield f"First request, to {shown(agent_name_of(self.first) or '')}:"
            yield text if len(text) <= _REQUEST_LENGTH else f"{text[:_REQUEST_LENGTH]} …"
        if self.pilot_tasks is not None:
            yield f"Pilot: {self.pilot_tasks} tasks come first"
        if self.estimate is None:
            yield f"No estimate: {self.why_no_estimate}"
        else:
            yield from _forecast_lines(self.estimate, Source(Samples(), ""), self.config.budgets)

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        return {
            "tasks": sum(expected.tasks for expected in self.expected.values()),
            "rollouts": self.rollouts,
            "agents": {
                agent: {**expected.model_dump(), "owed": self.owed_by_agent[agent]}
                for agent, expected in self.expected.items()
            },
            "finished": self.done,
            "given_up": self.given_up,
            "owed": self.still_owed,
            "caps": describe(self.config),
            "budgets": {
                name: {"limit": limit, "used": self.meter.amount(name)} for name, limit in self.config.budgets.items()
            },
            "servers": self.servers,
            "files": list(map(str, self.files)),
            "moved": list(map(str, self.moved)),
            "first_request": None if self.first is None else cut(self.first),
            "pilot_tasks": self.pilot_tasks,
            "estimate": None if self.estimate is None else self.estimate.as_json(),
            "why_no_estimate": self.why_no_estimate or None,
        }


def cut(value: Any) -> Any:
    """The same JSON without what is long: texts and lists end early, and say so."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]} … ({len(value):,} characters)"
    if isinstance(value, dict):
        return {name: cut(inner) for name, inner in value.items()}
    if isinstance(value, list):
        more = [f"… ({len(value):,} items)"] if len(value) > _MOST_ITEMS else []
        return [*map(cut, value[:_MOST_ITEMS]), *more]
    return value


def plan_of(config: RolloutCollectionConfig, models: Sequence[str] = ()) -> RunPlan:
    """Read and check everything that a run would, and say what it would do; `models` are those of the config.

    Raises:
        ConfigError: as the run would.
    """
    made = RunPlan(config, config.paths, meter=Meter(prices_of(config.prices, models), Samples()))
    for part in _shards_of(config):
        _add_part(made, part)
    _add_files(made)
    _add_estimate(made, models)
    return made


def _shards_of(config: RolloutCollectionConfig) -> list[RolloutCollectionConfig]:
    """The configs of the parts that have files of their own, as far as that matters for what is owed."""
    if config.executor == "local":
        return [config]
    alone = {"executor": "local", "num_shards": None, "shard": None, "shard_index": None}
    if not config.resume_from_cache:
        return [config.model_copy(update=alone)]
    assert config.num_shards is not None
    count = config.num_shards
    return [config.model_copy(update={**alone, "shard_index": n, "num_shards": count}) for n in range(count)]


def _add_part(made: RunPlan, config: RolloutCollectionConfig) -> None:
    inputs = check_input(config)
    check_start(config)
    paths = config.paths
    if inputs is not None:
        rows: Iterable[Row] = _parsed(inputs)
        gate = None
    else:
        rows = rows_to_resume(config)
        gate = read_gate(
            paths, config.attempt_cap, retry_exhausted=config.retry_exhausted, damaged="leave", meter=made.meter
        )
    tasks: Counter[str] = Counter()
    rollouts: Counter[str] = Counter()

    def owed_rows() -> Iterator[Row]:
        for row in rows:
            key, agent = RolloutKey.of(row), agent_name_of(row) or ""
            rollouts[agent] += 1
            tasks[agent] += key.rollout_index == 0
            if gate is not None and key in gate.done:
                made.done += 1
            elif gate is not None and gate.is_given_up(key):
                made.given_up += 1
            else:
                made.first = made.first or row
                made.owed_by_agent[agent] += 1
                yield row

    made.owed.update(owed_tasks(owed_rows(), with_content=config.estimate_from is not None))
    for agent, count in rollouts.items():
        before = made.expected.get(agent, Expected())
        made.expected[agent] = Expected(tasks=before.tasks + tasks[agent], rollouts=before.rollouts + count)


def _parsed(inputs: InputRows) -> Iterator[Row]:
    for repeats in inputs:
        for line in repeats.lines:
            yield parse(line)


def _add_files(made: RunPlan) -> None:
    config, outputs = made.config, [made.paths]
    if config.executor != "local" and config.num_shards is not None:
        output = Path(config.output_jsonl_fpath)
        outputs += [RolloutPaths(Shard(n, config.num_shards).file(output)) for n in range(config.num_shards)]
    for number, paths in enumerate(outputs):
        made.files += [paths.rollouts, paths.failures, paths.materialized_inputs, paths.manifest]
        if number == 0 and not config.disable_aggregation:
            made.files.append(paths.aggregate_metrics)
        if not resumes(config):
            made.moved += [path for path in paths.of_one_run if path.exists()]


def _add_estimate(made: RunPlan, models: Sequence[str]) -> None:
    config = made.config
    if config.estimate_from is not None:
        source = earlier_run(Path(config.estimate_from), made.owed, prices_of(config.prices, models))
    elif made.done:
        assert made.meter.samples is not None
        source = own_part(made.meter.samples, made.meter)
    else:
        made.why_no_estimate = "+estimate_from=<rollouts of an earlier run> or +pilot=20 tells what it will take"
        return
    spent, in_parallel = _spent([made.meter]), _in_parallel(config, made.owed_by_agent)
    made.estimate = forecast(source, made.owed, spent, in_parallel, has_prices=bool(config.prices))
    if made.estimate is None:
        made.why_no_estimate = f"{source.text} has too few rollouts that say how many tokens they used"
