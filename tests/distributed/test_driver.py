"""A run in shards with threads in place of a cluster's workers; the shards are real processes with real servers."""

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.distributed.board import Board
from nemo_gym.distributed.cluster import ShardLostError, task_options
from nemo_gym.distributed.driver import MAX_LOSSES, Driver, ShardFailedError, ShardRecord
from nemo_gym.distributed.messages import Instruction, Report, ShardEnd, ShardOrder
from nemo_gym.distributed.results import summary_of
from nemo_gym.distributed.shard_task import run_shard
from nemo_gym.distributed.shares import TOTAL
from nemo_gym.errors import ConfigError
from nemo_gym.rollouts.progress import Progress
from nemo_gym.rollouts.progress_state import ProgressState
from nemo_gym.rollouts.sharding import Shard
from nemo_gym.rollouts.stop_rules import StopKind
from tests.distributed.conftest import AGENT, TASKS, keys_in, write_environment


class Threads:
    """Workers that are threads; one of them loses its first shard as soon as it has written something."""

    def __init__(self, caps: Mapping[str, int], lose: Shard | None = None) -> None:
        self._board, self._lock = Board(caps), threading.Lock()
        self._pool = ThreadPoolExecutor(8)
        self._lose = lose
        self._in_flight: dict[Shard, int] = {}
        self.most_in_flight = 0
        self.orders: list[ShardOrder] = []

    def submit(self, order: ShardOrder) -> "Future[ShardEnd]":
        self.orders.append(order)
        return self._pool.submit(run_shard, order, self._tell)

    def _tell(self, report: Report) -> Instruction:
        if report.shard == self._lose and report.attempt == 1 and report.state and report.state.finished:
            self._in_flight[report.shard] = 0
            raise ShardLostError("the node is on fire")
        with self._lock:
            self._in_flight[report.shard] = report.in_flight.get(TOTAL, 0)
            self.most_in_flight = max(self.most_in_flight, sum(self._in_flight.values()))
            return self._board.report(report)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        with self._lock:
            return list(self._board.look(over, stop=stop, at_once=at_once))

    def ended(self, running: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return list(wait(running, timeout_s).done)

    def result(self, ended: Any) -> ShardEnd:
        end: ShardEnd = ended.result()
        return end

    def abandon(self, running: Sequence[Any]) -> None:
        self._pool.shutdown(cancel_futures=True)


class Told(Threads):
    """Workers whose shards end as a test says, without running."""

    def __init__(self, *ends: ShardEnd | ShardLostError) -> None:
        super().__init__({})
        self._ends = list(ends)

    def submit(self, order: ShardOrder) -> "Future[ShardEnd]":
        self.orders.append(order)
        future: Future[ShardEnd] = Future()
        end = self._ends.pop(0)
        future.set_exception(end) if isinstance(end, ShardLostError) else future.set_result(end)
        return future


def shards(count: int) -> dict[Shard, ShardRecord]:
    return {(shard := Shard(n, count)): ShardRecord(shard.file(Path.cwd() / "out.jsonl")) for n in range(count)}


def order(shard: Shard, attempt: int) -> ShardOrder:
    given = {
        "agent_name": AGENT,
        "input_jsonl_fpath": "train.jsonl",
        "output_jsonl_fpath": "out.jsonl",
        "shard": shard,
        "resume_from_cache": "true",
        "num_samples_in_parallel": 2,
        "head_server.port": 0,
    }
    options = ["+config_paths=[config.yaml]", *(f"+{name}={value}" for name, value in given.items())]
    token = Path.cwd() / "token"
    return ShardOrder(shard, attempt, options, shard.file(Path.cwd() / "out.jsonl"), token, None, report_every_s=0.1)


def run(driver: Driver) -> None:
    driver.run(Progress(TASKS))


def complete(**changes: Any) -> ShardEnd:
    counts = {"finished": 2, "failed": 0, "discarded": 0, "given_up": 0, "tokens": {}, "failures": {}, "stopped": None}
    return ShardEnd(0, "node", counts | changes)


def test_a_lost_shard_is_run_again_and_goes_on_under_the_common_cap(tmp_path: Path) -> None:
    write_environment(tmp_path, latency_s=0.15)
    (tmp_path / "token").touch()
    records = shards(2)
    workers = Threads({TOTAL: 2}, lose=Shard(1, 2))
    driver = Driver(workers, order, records, at_once_running=2)
    run(driver)

    assert [(each.shard.index, each.attempt) for each in workers.orders] == [(0, 1), (1, 1), (1, 2)]
    assert workers.most_in_flight <= 2
    keys = [keys_in(record.output) for record in records.values()]
    assert keys == [[(task, 0) for task in range(TASKS) if task % 2 == shard] for shard in range(2)]
    lost = records[Shard(1, 2)]
    assert lost.end is not None
    assert lost.end.summary is not None
    assert lost.end.summary["finished_before"] > 0
    log = lost.output.with_suffix(".log").read_text()
    assert "The worker that started this shard is gone" in log
    summary = summary_of(Path("out.jsonl"), records.values(), expected=TASKS, finished_before=0, stopped=None)
    assert (summary.finished, summary.missing, summary.exit_code) == (TASKS, 0, 0)


def test_a_node_that_does_not_share_the_folder_is_a_mistake_to_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.distributed.shard_task._SEEN_WITHIN_S", 0.0)

    with pytest.raises(ConfigError, match=r"does not see .*mounted on all nodes"):
        run(Driver(Threads({}), order, shards(1), at_once_running=1))


def test_a_mistake_in_a_shard_is_told_with_its_words_and_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    (tmp_path / "config.yaml").write_text("my_key: 3\n")
    workers = Threads({})

    with pytest.raises(ConfigError, match=r"shard 1/2 on .*: the configuration defines no server"):
        run(Driver(workers, order, shards(2), at_once_running=1))
    assert len(workers.orders) == 1


def test_a_shard_that_is_lost_again_and_again_ends_the_run() -> None:
    workers = Told(*(ShardLostError("gone") for _ in range(MAX_LOSSES)))

    with pytest.raises(ShardFailedError, match=r"shard 1/1 was lost 3 times .*out-shard001of001\.log.*gone"):
        run(Driver(workers, order, shards(1), at_once_running=1))
    assert [each.attempt for each in workers.orders] == [1, 2, 3]


def test_losses_count_only_in_a_row_without_a_new_rollout() -> None:
    records = shards(1)
    [record] = records.values()

    class Writing(Told):
        def submit(self, order: ShardOrder) -> "Future[ShardEnd]":
            future = super().submit(order)
            if order.attempt == 2:
                record.output.write_text("{}\n")
            return future

    workers = Writing(*(ShardLostError("gone") for _ in range(3)), complete())
    run(Driver(workers, order, records, at_once_running=1))
    assert len(workers.orders) == 4


@pytest.mark.parametrize(
    "end",
    [ShardEnd(1, "node", None, "a server crashed"), ShardEnd(-9, "node"), ShardEnd(130, "node", {"stopped": None})],
)
def test_a_shard_that_ends_on_its_own_without_a_result_is_run_again(end: ShardEnd) -> None:
    workers = Told(end, complete())
    run(Driver(workers, order, shards(1), at_once_running=1))

    assert len(workers.orders) == 2


def test_what_makes_one_shard_stop_stops_the_run() -> None:
    stopped = {"kind": "doomed_agent", "message": "the key was refused"}
    driver = Driver(Told(complete(stopped=stopped)), order, shards(3), at_once_running=1)
    run(driver)

    assert driver.stopped is not None
    assert driver.stopped.kind is StopKind.DOOMED_AGENT
    assert "shard 1/3: the key was refused" in driver.stopped.message


def test_nothing_new_is_handed_out_once_the_user_wants_to_stop() -> None:
    workers = Told()
    driver = Driver(workers, order, shards(3), at_once_running=1)
    driver.request_stop()
    run(driver)

    assert workers.orders == []
    assert (
        summary_of(Path("o"), driver.records.values(), expected=3, finished_before=0, stopped=driver.stopped).exit_code
        == 130
    )


def test_counts_and_failures_of_shards_add_up() -> None:
    failures = {"timeout": {"attempts": 2, "rollouts": 1, "example": "task 1"}}
    records = shards(3)
    ends = [complete(failed=1, given_up=1, failures=failures, tokens={"input_tokens": 5}) for _ in range(2)]
    for record, end in zip(records.values(), ends, strict=False):
        record.end = end
    list(records.values())[2].output.write_text("{}\n")
    summary = summary_of(Path("out.jsonl"), records.values(), expected=9, finished_before=1, stopped=None)

    assert (summary.finished, summary.missing, summary.given_up, summary.exit_code) == (5, 4, 2, 1)
    assert summary.failures.by_class["timeout"].attempts == 4
    assert summary.as_json()["tokens"] == {"input_tokens": 10}


def test_the_one_bar_shows_all_shards() -> None:
    driver = Driver(Told(complete(), complete()), order, shards(2), at_once_running=2)
    for n, record in enumerate(driver.records.values()):
        rewards = {"a": (1.0 + n, 2, 0)}
        record.state = ProgressState.of_json({"finished": 2 + n, "failed": n, "in_flight": 1, "rewards": rewards})
    progress = Progress(9, finished_before=1, in_flight=driver.in_flight)
    driver._look(progress)

    assert (progress.done, driver.in_flight()) == (6, 2)
    assert "6/9" in progress._snapshot().tail
    assert "a 0.75" in progress._snapshot().tail


def test_a_shard_taken_for_lost_that_reports_after_all_is_told_to_stop() -> None:
    board, shard = Board({TOTAL: 4}), Shard(0, 2)
    assert board.report(Report(shard, 1, "node")) == Instruction({TOTAL: 4})
    board.look({shard: 1}, stop=False, at_once=False)

    assert board.report(Report(shard, 1, "node")).stop
    assert board.report(Report(shard, 2, "node")) == Instruction({TOTAL: 4})
    board.look({}, stop=True, at_once=False)
    assert board.report(Report(shard, 2, "node")).stop


def test_resources_are_asked_for_in_rays_own_words() -> None:
    assert task_options({"CPU": 4, "gpu": 1, "fast_disk": 2}) == {
        "num_cpus": 4,
        "num_gpus": 1,
        "resources": {"fast_disk": 2},
    }


def test_messages_of_a_shard_survive_the_journey() -> None:
    state = ProgressState(finished=3, rewards={})
    assert ProgressState.of_json(json.loads(json.dumps(vars(state)))) == state
