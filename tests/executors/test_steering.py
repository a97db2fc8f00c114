"""A run in shards that is steered through its driver; the shards are real processes with real servers."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.collect.stopping import StopKind
from nemo_gym.errors import ConfigError
from nemo_gym.executors.base import Job
from nemo_gym.executors.caps import Board, Budgets
from nemo_gym.executors.driver import run_in_shards
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import address_in
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.sockets import ask, find_run
from tests.executors.conftest import AGENT, write_environment
from tests.executors.test_driver import Threads


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets of this test alone, in a place whose name is short enough."""
    with tempfile.TemporaryDirectory(prefix="ng", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("runtime_folder")
def test_a_run_in_shards_is_steered_through_its_driver(tmp_path: Path) -> None:
    write_environment(tmp_path, latency_s=600.0)
    options = {
        "agent_name": AGENT,
        "input_jsonl_fpath": "train.jsonl",
        "output_jsonl_fpath": "out.jsonl",
        "num_samples_in_parallel": 2,
    }
    config = RolloutCollectionConfig.model_validate({**options, "executor": "ray", "num_shards": 2})
    job = Job(
        OmegaConf.create({}),
        ["ng", "+config_paths=[config.yaml]", *(f"+{name}={value}" for name, value in options.items())],
    )

    @contextmanager
    def connect(caps: Mapping[str, int], budget: Budgets) -> Iterator[Threads]:
        yield Threads(caps)

    def ask_run(**request: Any) -> dict[str, Any]:
        return ask(find_run("out.jsonl"), request, 60.0)

    def until_in_flight(count: int) -> None:
        by_s = time.monotonic() + 120
        while ask_run(do="status")["in_flight"] != count:
            assert time.monotonic() < by_s
            assert not running.done(), running.result()
            time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_shards, config, job, connect, tmp_path)
        while address_in(RolloutPaths(Path("out.jsonl"))) is None:
            assert not running.done(), running.result()
            time.sleep(0.05)
        until_in_flight(2)
        with pytest.raises(ConfigError, match="stays as it is"):
            ask_run(do="set", values={"num_samples_in_parallel": "auto"})
        ask_run(do="set", values={"num_samples_in_parallel": {AGENT: 3}})
        until_in_flight(3)
        ask_run(do="set", values={"num_samples_in_parallel": 5, "rollout_timeout_s": 500, "run_timeout_s": 3000})
        until_in_flight(5)
        listed = ask_run(do="in_flight")["in_flight"]
        assert {each["agent"] for each in listed} == {f"{AGENT} (shard {shard}/2)" for shard in (1, 2)}
        assert {each["call"]["server"] for each in listed} == {"policy_model"}, "what the agents say is not there"
        assert ask_run(do="pause")["state"] == "paused"
        wanted = listed[0]["rollout"]
        assert ask_run(do="cancel", rollout=wanted)["cancelled"] == [wanted]
        until_in_flight(4)
        with pytest.raises(ConfigError, match="is not in flight"):
            ask_run(do="cancel", rollout=wanted)
        assert ask_run(do="retry", what="failed")["retried"] == 1
        assert ask_run(do="resume")["state"] == "running"
        until_in_flight(5)
        ask_run(do="stop")
        ask_run(do="stop")
        summary = running.result(timeout=120)

    assert summary.stopped is not None
    assert (summary.stopped.message, summary.exit_code) == ("stopped by ng_control", 130)
    did = [each["did"] for each in steered_in(Shard(0, 2)) + steered_in(Shard(1, 2))]
    assert {kind: did.count(kind) for kind in set(did)} == {"set": 4, "pause": 2, "cancel": 1, "retry": 1, "resume": 2}
    assert not address_in(RolloutPaths(Path("out.jsonl")))


@pytest.mark.usefixtures("runtime_folder")
@pytest.mark.parametrize(
    ("values", "kind"),
    [({"max_total_tokens": 1}, StopKind.BUDGET), ({"run_timeout_s": 1}, StopKind.RUN_TIMEOUT)],
    ids=lambda value: str(value),
)
def test_what_the_whole_run_may_take_is_changed_while_it_goes_on(
    tmp_path: Path, values: dict[str, Any], kind: StopKind
) -> None:
    write_environment(tmp_path, latency_s=1.0)
    options = {
        "agent_name": AGENT,
        "input_jsonl_fpath": "train.jsonl",
        "output_jsonl_fpath": "out.jsonl",
        "num_repeats": 1000,
        "num_samples_in_parallel": 2,
        "max_total_tokens": 10**9,
        "run_timeout_s": 3000,
    }
    config = RolloutCollectionConfig.model_validate({**options, "executor": "ray", "num_shards": 2})
    job = Job(
        OmegaConf.create({}),
        ["ng", "+config_paths=[config.yaml]", *(f"+{name}={value}" for name, value in options.items())],
    )

    @contextmanager
    def connect(caps: Mapping[str, int], budget: Budgets) -> Iterator[Threads]:
        threads = Threads(caps)
        threads._board = Board(caps, budget)
        yield threads

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_shards, config, job, connect, tmp_path)
        while address_in(RolloutPaths(Path("out.jsonl"))) is None:
            assert not running.done(), running.result()
            time.sleep(0.05)
        while not ask(find_run("out.jsonl"), {"do": "status"}, 60.0)["finished"]:
            assert not running.done(), running.result()
            time.sleep(0.1)
        with pytest.raises(ConfigError, match="not be lifted"):
            ask(find_run("out.jsonl"), {"do": "set", "values": {"max_total_tokens": None}}, 60.0)
        ask(find_run("out.jsonl"), {"do": "set", "values": values}, 60.0)
        summary = running.result(timeout=120)

    assert summary.stopped is not None
    assert summary.stopped.kind is kind
    assert summary.budgets == {"max_total_tokens": values.get("max_total_tokens", 10**9)}
    assert 0 < summary.finished < summary.expected


def steered_in(shard: Shard) -> list[dict[str, Any]]:
    manifest = RolloutPaths(shard.file(Path("out.jsonl"))).manifest
    steered: list[dict[str, Any]] = json.loads(manifest.read_text())["steered"]
    return steered
