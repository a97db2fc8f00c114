"""A run in shards with threads in place of a cluster's workers; the shards are real processes with real servers."""

import contextlib
import json
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from nemo_gym import global_config, runtime
from nemo_gym.cli.config import load_config
from nemo_gym.cli.pages import Loading
from nemo_gym.collect.adaptive import Load
from nemo_gym.collect.progress import Progress, ProgressState
from nemo_gym.collect.stopping import StopKind
from nemo_gym.collect.summary import RunSummary
from nemo_gym.errors import ConfigError
from nemo_gym.executors.base import Job
from nemo_gym.executors.caps import PACE, TOTAL, WHOLE_PACE, Board, Instruction, Leader, Report
from nemo_gym.executors.driver import (
    MAX_LOSSES,
    Driver,
    ShardFailedError,
    ShardLostError,
    ShardRecord,
    run_in_shards,
    summary_of,
)
from nemo_gym.executors.ray import task_options
from nemo_gym.executors.shard import ShardEnd, ShardOrder, run_shard
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.options.steering import Bounds
from tests.collection.fakes import FakeRun, rows_of, serve, write_rows
from tests.collection.pace_lab import endpoint_allowing, times_in
from tests.executors.conftest import AGENT, TASKS, keys_in, write_environment
from tests.programs import WAIT_S


class Threads:
    """Workers that are threads; one of them loses its first shard as soon as it has written something.

    With `together`, so many shards begin at the same moment, however long their servers take to start.
    """

    def __init__(self, caps: Mapping[str, int], lose: Shard | None = None, together: int = 1) -> None:
        self._board, self._lock = Board(caps), threading.Lock()
        self._pool = ThreadPoolExecutor(8)
        self._lose = lose
        self._beginning = threading.Barrier(together)
        self._in_flight: dict[Shard, int] = {}
        self._pace: dict[Shard, int] = {}
        self.of_the_pace: list[int] = [0]
        """What each shard went by at any time, and all of them together."""
        self.most_in_flight = 0
        self.orders: list[ShardOrder] = []

    def submit(self, order: ShardOrder) -> "Future[ShardEnd]":
        self.orders.append(order)
        return self._pool.submit(run_shard, order, self._tell)

    def _tell(self, report: Report) -> Instruction:
        if report.shard == self._lose and report.attempt == 1 and report.state and report.state.finished:
            self._in_flight[report.shard] = 0
            raise ShardLostError("the node is on fire")
        if report.shard not in self._in_flight and self._beginning.parties > 1:
            self._beginning.wait(WAIT_S)
        with self._lock:
            self._in_flight[report.shard] = report.in_flight.get(TOTAL, 0)
            self._pace[report.shard] = report.caps.get(PACE, 0)
            self.of_the_pace += [*self._pace.values(), sum(self._pace.values())]
            self.most_in_flight = max(self.most_in_flight, sum(self._in_flight.values()))
            return self._board.report(report)

    def look(self, over: Mapping[Shard, int], *, stop: bool, at_once: bool) -> Sequence[Report]:
        with self._lock:
            return list(self._board.look(over, stop=stop, at_once=at_once))

    def set_caps(self, caps: Mapping[str, int]) -> None:
        with self._lock:
            self._board.set_caps(caps)

    def set_orders(self, orders: Mapping[str, Any]) -> None:
        with self._lock:
            self._board.set_orders(json.loads(json.dumps(orders)))

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


def order_with_caps_that_adapt(shard: Shard, attempt: int) -> ShardOrder:
    given = order(shard, attempt)
    fixed = "+num_samples_in_parallel=2"
    adaptive = [each if each != fixed else "+num_samples_in_parallel=auto" for each in given.arguments]
    return replace(given, arguments=adaptive)


class NotingLeader(Leader):
    """Remembers what it was last told."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__({"_default": bounds}, [AGENT], 0.0)
        self.told: dict[Hashable, Mapping[str, Load]] = {}

    def note(self, shard: Hashable, loads: Mapping[str, Load]) -> None:
        super().note(shard, loads)
        self.told[shard] = loads


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


def test_the_driver_decides_for_all_shards_on_caps_that_adapt(tmp_path: Path) -> None:
    write_environment(tmp_path, latency_s=0.3)
    (tmp_path / "token").touch()
    records, leader = shards(2), NotingLeader(Bounds(2, 3))
    workers = Threads({AGENT: 3})
    driver = Driver(workers, order_with_caps_that_adapt, records, at_once_running=2, leader=leader)
    run(driver)

    assert sum(len(keys_in(record.output)) for record in records.values()) == TASKS
    assert workers.most_in_flight <= 3
    assert sum(loads[AGENT].ended for loads in leader.told.values()) == TASKS
    assert leader.notice() == "auto: 3 in parallel"
    for record in records.values():
        manifest = json.loads(RolloutPaths(record.output).manifest.read_text())
        assert all(change["cap"] <= 3 for change in manifest["adaptive"][AGENT]["changes"][1:])
        assert manifest["adaptive"][AGENT]["changes"][-1]["why"] == "told"


def test_shards_divide_the_pace_of_their_model_servers(tmp_path: Path) -> None:
    pace = {"requests_per_minute": 120, "openai_api_key": "none", "openai_model": "m", "entrypoint": "app.py"}
    (tmp_path / "token").touch()
    with endpoint_allowing(1e6, tmp_path / "arrived.log") as port:
        address = {"openai_base_url": f"http://127.0.0.1:{port}/v1"}
        write_environment(tmp_path, model={"openai_model": {**pace, **address}})
        workers = Threads({TOTAL: 8, PACE: WHOLE_PACE}, together=2)
        run(Driver(workers, order, shards(2), at_once_running=2))
    arrived = [at for at, _ in times_in(tmp_path / "arrived.log")]

    assert max(workers.of_the_pace) <= WHOLE_PACE
    assert any(0 < share < WHOLE_PACE for share in workers.of_the_pace)
    assert len(arrived) == TASKS
    assert arrived[-1] - arrived[0] >= 2.0  # 8 calls at 2 a second, the first of each shard at once; undivided 1.5 s


def test_a_node_that_does_not_share_the_folder_is_a_mistake_to_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.executors.shard._SEEN_WITHIN_S", 0.0)

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


class Here(Told):
    """Workers that collect their shards at once, in this process, from the servers of a fake run."""

    def __init__(self, fake_run: FakeRun) -> None:
        super().__init__()
        self._head = f"++head_server.port={fake_run.port}"

    def submit(self, order: ShardOrder) -> "Future[ShardEnd]":
        loaded = load_config([*order.arguments, self._head], RolloutCollectionConfig, Loading(needs_model=False))
        summary = runtime.run(RolloutCollectionHelper().collect(RolloutCollectionConfig.model_validate(loaded)))
        self._ends.append(ShardEnd(summary.exit_code, "here", summary.as_json()))
        return super().submit(order)


def test_a_run_in_shards_has_the_tasks_that_are_chosen_and_can_ask_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    write_rows(tmp_path / "in.jsonl", rows_of(9))

    def collect(*options: str) -> RunSummary:
        files = ["+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl"]
        arguments = ["+agent_name=alpha", *files, "+executor=ray", "+num_shards=2", "+disable_aggregation=true"]
        loaded = load_config([*arguments, *options], RolloutCollectionConfig, Loading(needs_model=False))
        assert isinstance(loaded, DictConfig)
        job = Job(loaded, ["ng_collect_rollouts", *arguments, *options])
        connect = lambda caps, budget: contextlib.nullcontext(Here(fake_run))  # noqa: E731
        return run_in_shards(RolloutCollectionConfig.model_validate(loaded), job, connect, None)

    with serve(FakeRun("alpha")) as fake_run:
        summary = collect("+tasks=[1-6]", "+where=n != 3", "+num_repeats=2")
        assert (summary.expected, summary.finished, summary.exit_code) == (10, 10, 0)
        files = [Path("out-shard001of002.jsonl"), Path("out-shard002of002.jsonl")]
        assert [keys_in(path) for path in files] == [
            [(task, rollout) for task in tasks for rollout in range(2)] for tasks in ((2, 4, 6), (1, 5))
        ]

        summary = collect("+tasks=[0-2]", "+resume_from_cache=true")
        assert (summary.expected, summary.finished, summary.exit_code) == (3, 3, 0)
        assert (summary.finished_before, summary.no_longer_asked) == (2, 8)
        assert fake_run.keys()[10:] == [(0, 0)]

        missing = ["+only=missing", "+of=out-shard001of002.jsonl", "++output_jsonl_fpath=rest.jsonl", "+num_repeats=2"]
        summary = collect(*missing)
        assert summary.expected == summary.finished == 2 * 9 - 7
        assert sorted(fake_run.keys()[11:]) == [
            (task, rollout) for task in range(9) for rollout in range(2) if (task, rollout) not in keys_in(files[0])
        ]
