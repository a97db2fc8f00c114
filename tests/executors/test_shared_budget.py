"""A budget over all shards together: no moment in which they may use more, and nothing lost when it is used up."""

from dataclasses import replace
from pathlib import Path

import yaml

from nemo_gym.collect.progress import Progress
from nemo_gym.collect.stopping import StopKind
from nemo_gym.executors.caps import TOTAL, Board, Budgets, BudgetShares, add_spending, spent_before
from nemo_gym.executors.driver import Driver, summary_of
from nemo_gym.executors.shard import ShardOrder
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from tests.executors.conftest import AGENT, TASKS, keys_in, lines_in, write_environment
from tests.executors.test_driver import Threads, order, shards

LIMIT = "max_total_tokens"
ONE, OTHER, THIRD = (Shard(index, 3) for index in range(3))


def test_what_is_left_is_shared_and_never_granted_twice() -> None:
    shares = BudgetShares(Budgets({LIMIT: 1_000.0}, {THIRD: {LIMIT: 100.0}}))

    assert shares.exchange(ONE, {}, {}) == {LIMIT: 900.0}
    assert shares.exchange(OTHER, {}, {}) == {LIMIT: 0.0}  # the first has been granted everything
    assert shares.exchange(ONE, {LIMIT: 50.0}, {LIMIT: 900.0}) == {LIMIT: 475.0}
    assert shares.exchange(OTHER, {}, {LIMIT: 0.0}) == {LIMIT: 0.0}  # and goes by that until it says otherwise
    shares.exchange(ONE, {LIMIT: 50.0}, {LIMIT: 475.0})
    assert shares.exchange(OTHER, {}, {LIMIT: 0.0}) == {LIMIT: 425.0}

    shares.leave(ONE)

    assert shares.exchange(OTHER, {LIMIT: 300.0}, {LIMIT: 425.0}) == {LIMIT: 850.0}
    assert shares.exchange(OTHER, {LIMIT: 900.0}, {LIMIT: 850.0}) == {LIMIT: 900.0}  # what is used is used


class Budgeted(Threads):
    """Workers that are threads, with a budget over all of them."""

    def __init__(self, budget: Budgets) -> None:
        super().__init__({TOTAL: 2})
        self._board = Board({TOTAL: 2}, budget)


def total_used(paths: list[Path]) -> int:
    return sum(line["response"]["usage"]["total_tokens"] for path in paths for line in lines_in(path))


def test_a_budget_ends_a_run_in_shards_and_a_raised_one_finishes_it(tmp_path: Path) -> None:
    write_environment(tmp_path, latency_s=0.05)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    script = settings["policy_model"]["responses_api_models"]["scripted_model"]["script"]
    script["usage"] = {"input_tokens": 500}  # of each call, so that all rollouts take at least 4,000
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "token").touch()
    outputs = [record.output for record in shards(2).values()]

    stopped = run_within(2_200, outputs)

    assert stopped.stopped is not None
    assert stopped.stopped.kind is StopKind.BUDGET
    assert 0 < total_used(outputs) <= 1.05 * 2_200
    some = [keys_in(path) for path in outputs]

    finished = run_within(100_000, outputs)

    assert finished.stopped is None
    keys = [keys_in(path) for path in outputs]
    assert sorted([*keys[0], *keys[1]]) == [(task, 0) for task in range(TASKS)]
    assert all(set(before) <= set(after) for before, after in zip(some, keys, strict=True))


def run_within(limit: int, outputs: list[Path]) -> Driver:
    def limited(shard: Shard, attempt: int) -> ShardOrder:
        made = order(shard, attempt)
        return replace(made, arguments=[*made.arguments, f"+{LIMIT}={limit}"])

    given = {"input_jsonl_fpath": "train.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": AGENT, LIMIT: limit}
    config = RolloutCollectionConfig.model_validate(
        {**given, "executor": "ray", "num_shards": 2, "resume_from_cache": True}
    )
    budget = Budgets(config.budgets, spent_before(config))
    driver = Driver(Budgeted(budget), limited, shards(2), at_once_running=2, budget=budget)
    driver.run(Progress(TASKS))
    records = driver.records
    summary = summary_of(Path("out.jsonl"), records.values(), expected=TASKS, finished_before=0, stopped=None)
    ends = {shard: record.end for shard, record in records.items()}
    add_spending(summary, config, {shard: None if end is None else end.summary for shard, end in ends.items()}, budget)
    assert summary.spent(LIMIT) == total_used(outputs)
    return driver
