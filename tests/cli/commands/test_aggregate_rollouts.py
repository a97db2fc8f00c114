"""The command as a user runs it: real servers, real shards, and the same with the servers gone."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import Piped

Script = Callable[..., subprocess.CompletedProcess[str]]

ENVIRONMENT = """
from pydantic import ConfigDict

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from nemo_gym.reward_profile import compute_pass_majority_metrics, highest_k_metrics


class Request(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class Verdict(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class Puzzle(SimpleResourcesServer):
    async def verify(self, body: Request) -> Verdict:
        task, rollout = body.model_extra["_ng_task_index"], body.model_extra["_ng_rollout_index"]
        if (task, rollout) == (4, 1):
            raise RuntimeError("this one cannot be scored")
        right = (task * 3 + rollout * 5) % 4 < 2
        answer = None if rollout == 3 else f"answer {(task + rollout) % 3}"
        return Verdict(**body.model_dump(), reward=float(right), extracted_answer=answer, effort=task / 3)

    def compute_metrics(self, tasks):
        return compute_pass_majority_metrics(tasks, answer_key="extracted_answer")[0]

    def get_key_metrics(self, agent_metrics):
        return {"mean/reward": agent_metrics["mean/reward"], **highest_k_metrics(agent_metrics, "pass@{k}")}


if __name__ == "__main__":
    Puzzle.run_webserver()
"""
SERVERS = {
    "puzzle": {"resources_servers": {"puzzle": {"entrypoint": "app.py", "domain": "other"}}},
    "puzzle_agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "resources_server": {"type": "resources_servers", "name": "puzzle"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
        }
    },
}
SCRIPTED = "responses_api_models/scripted_model/configs/scripted_model.yaml"
OPENAI = "responses_api_models/openai_model/configs/openai_model.yaml"
TASKS, SHARDS = 12, 4


@pytest.fixture
def puzzle(tmp_path: Path) -> None:
    folder = tmp_path / "resources_servers" / "puzzle"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(ENVIRONMENT)
    (folder / "requirements.txt").touch()
    (tmp_path / "puzzle.yaml").write_text(yaml.safe_dump(SERVERS))
    rows = [
        {"_ng_task_index": task, "responses_create_params": {"input": [{"role": "user", "content": f"puzzle {task}"}]}}
        for task in range(TASKS)
    ]
    slices = {"all": rows, **{f"slice{n}": rows[n * TASKS // SHARDS :][: TASKS // SHARDS] for n in range(SHARDS)}}
    for name, of_slice in slices.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_slice))


class Servers:
    """A run of `ng_run`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.head = f"+head_server.port={probe.getsockname()[1]}"
        options = [f"+config_paths=[puzzle.yaml,{SCRIPTED}]", self.head, f"+cache_dir={folder / 'cache'}"]
        self._process = Piped("ng_run", *options, folder=folder, in_one=True)
        printed = []
        for line in self._process.stdout:
            printed.append(line)
            if "servers ready!" in line:
                return
        pytest.fail(f"not started: {''.join(printed)}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.communicate(timeout=30)


@pytest.fixture
def servers(tmp_path: Path, puzzle: None) -> Iterator[Servers]:
    started = Servers(tmp_path)
    yield started
    started.stop()


def ran(done: subprocess.CompletedProcess[str], codes: tuple[int, ...] = (0,)) -> str:
    assert done.returncode in codes, done.stderr
    return done.stdout


def without_durations(name: str) -> bytes:
    """Metrics without what differs from run to run: how long rollouts took."""
    text, found = re.subn(rb'"duration_s": \{[^}]*\}', b"", Path(name).read_bytes())
    assert found == 1
    return text


def test_shards_give_the_metrics_of_one_run_with_servers_and_without(servers: Servers, script: Script) -> None:
    collect = ["+agent_name=puzzle_agent", "+num_repeats=4", "+max_attempts=1", servers.head]
    ran(
        script("ng_collect_rollouts", *collect, "+input_jsonl_fpath=all.jsonl", "+output_jsonl_fpath=whole.jsonl"), (1,)
    )
    for number in range(SHARDS):
        paths = [f"+input_jsonl_fpath=slice{number}.jsonl", f"+output_jsonl_fpath=shards/rollouts-{number}.jsonl"]
        ran(script("ng_collect_rollouts", *collect, *paths, "+disable_aggregation=true"), (0, 1))
    shards = "+input_glob=shards/rollouts-*.jsonl"

    table = ran(script("ng_aggregate_rollouts", shards, "+output_jsonl_fpath=online/all.jsonl", servers.head))
    servers.stop()
    without_policy = [servers.head, f"+config_paths=[puzzle.yaml,{OPENAI}]", "+json=true"]
    told = ran(script("ng_aggregate_rollouts", shards, "+output_jsonl_fpath=offline/all.jsonl", *without_policy))

    expected = without_durations("whole_aggregate_metrics.json")
    assert without_durations("online/all_aggregate_metrics.json") == expected
    assert Path("online/all_aggregate_metrics.json").read_bytes() == (
        Path("offline/all_aggregate_metrics.json").read_bytes()
    )
    assert Path("online/all.jsonl").read_bytes() == Path("offline/all.jsonl").read_bytes()
    assert keys("online/all.jsonl") == sorted(keys("whole.jsonl"))
    assert_honest(json.loads(Path("whole_aggregate_metrics.json").read_bytes()), table, json.loads(told))


def keys(path: str) -> list[tuple[int, int]]:
    records = map(json.loads, Path(path).read_text().splitlines())
    return [(record["_ng_task_index"], record["_ng_rollout_index"]) for record in records]


def assert_honest(metrics: list[dict[str, Any]], table: str, told: dict[str, Any]) -> None:
    coverage = metrics[0]["coverage"]
    assert coverage["expected"] == {"rollouts": 48, "tasks": 12}
    assert (coverage["scored"]["rollouts"], coverage["failed"]["rollouts"]) == (47, 1)
    assert "majority@4/accuracy" in metrics[0]["agent_metrics"]
    for text in ("puzzle_agent", "pass@4/accuracy", "47 of 48", "by the running servers", "(task, rollout): (4, 1)"):
        assert text in table
    assert told["coverage"]["puzzle_agent"] == coverage
    assert told["key_metrics"]["puzzle_agent"] == metrics[0]["key_metrics"]
    assert (told["offline"], told["missing"], told["records"], len(told["shards"])) == (True, 1, 47, SHARDS)


def test_an_agent_the_running_servers_do_not_have_is_an_error_that_points_to_offline(
    servers: Servers, script: Script
) -> None:
    Path("r.jsonl").write_text('{"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"puzzle_agnt"}}\n')

    done = script("ng_aggregate_rollouts", "+input_glob=r.jsonl", "+output_jsonl_fpath=o.jsonl", servers.head)

    assert done.returncode == 2
    assert "did you mean 'puzzle_agent'?" in done.stderr
    assert "+offline=true" in done.stderr


def test_mistakes_are_one_message_and_exit_code_2(script: Script) -> None:
    Path("a.jsonl").write_text('{"_ng_task_index":0,"_ng_rollout_index":0,"reward":1}\nnonsense\n')

    for argument, message in (
        ("+input_glob=x*.jsonl", "Error: No shards matched input_glob='x*.jsonl'"),
        ("+input_glob=a.jsonl", "Error: a.jsonl, line 2: not valid JSON"),
    ):
        done = script("ng_aggregate_rollouts", argument, "+output_jsonl_fpath=out.jsonl", "+offline=true")
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not Path("out.jsonl").exists()


def test_what_is_not_known_is_shown_as_such(script: Script) -> None:
    record = '{"_ng_task_index":%d,"_ng_rollout_index":0,"agent_ref":{"name":"nobody"},"reward":1.0}\n'
    Path("a.jsonl").write_text("".join(record.replace("%d", str(task)) for task in range(3)))
    Path("a_failures.jsonl").write_text(record.replace("%d", "7"))

    done = script("ng_aggregate_rollouts", "+input_glob=a.jsonl", "+output_jsonl_fpath=out.jsonl", "+offline=true")

    assert done.returncode == 0
    assert "3 of ?" in done.stdout
    assert "1 / ?" in done.stdout
    assert "how many there should be is not known" in done.stdout
    assert "here, without servers" in done.stdout
    assert "'nobody' gets only the metrics every agent has" in done.stderr


def test_nothing_merged_is_said(script: Script) -> None:
    Path("a.jsonl").touch()

    options = ["+output_jsonl_fpath=out.jsonl", "+offline=true", "+merge_shards=false"]
    printed = ran(script("ng_aggregate_rollouts", "+input_glob=a.jsonl", *options))

    assert "Merged rollouts: not merged" in printed
    assert "Aggregate metrics: none: the shards have no records" in printed
