"""nemo_gym from Python, without commands: with and without a running event loop."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import nemo_gym
from nemo_gym import global_config
from nemo_gym.collect.failures import FailuresOfClass
from nemo_gym.collect.metrics import AgentMetrics
from nemo_gym.collect.summary import RunSummary
from nemo_gym.errors import ConfigError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import Outcome
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics

EXAMPLE = PARENT_DIR / "docs" / "examples" / "quickstart.py"
IN_A_LOOP = """
import asyncio, runpy, sys

async def main():
    return runpy.run_path(sys.argv[1])

names = asyncio.run(main())
assert names["summary"].exit_code == 0
assert "<td>mean/reward</td><td>1</td>" in names["summary"]._repr_html_()
assert list(names["rollouts"]["reward"]) == [1.0] * 10
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_example_runs_where_an_event_loop_is_running_already(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", IN_A_LOOP, str(EXAMPLE))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean/reward = 1\n" in done.stdout
    assert "Rollouts: 10 of 10 finished\n" in done.stdout
    assert (tmp_path / "results/quickstart.jsonl").read_text().count("\n") == 10


def test_a_mistake_is_named_and_leaves_this_processs_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = global_config._GLOBAL_CONFIG_DICT

    with pytest.raises(ConfigError, match=r"no_such_file\.yaml"), nemo_gym.servers_of(["no_such_file.yaml"]):
        pass
    with pytest.raises(ConfigError, match=r"config_paths=\['a.yaml'\]"), nemo_gym.servers_of("a.yaml"):
        pass

    assert global_config._GLOBAL_CONFIG_DICT is before


NAME: ContextVar[str] = ContextVar("name")


async def told() -> str:
    await asyncio.sleep(0)
    return NAME.get()


def test_a_coroutine_can_be_waited_for_with_and_without_a_running_loop() -> None:
    NAME.set("plain")
    assert nemo_gym.run_sync(told()) == "plain"

    async def cell() -> str:
        NAME.set("inside")
        return nemo_gym.run_sync(told())

    assert asyncio.run(cell()) == "inside"

    async def failing() -> None:
        raise TimeoutError("of its own")

    async def failing_cell() -> None:
        nemo_gym.run_sync(failing())

    with pytest.raises(TimeoutError, match="of its own"):
        asyncio.run(failing_cell())


@pytest.mark.parametrize("has_own_handler", [True, False], ids=["asyncio.run", "a notebook"])
def test_ctrl_c_cancels_what_is_waited_for(has_own_handler: bool) -> None:
    ended: list[str] = []
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def cell() -> None:
        if not has_own_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        nemo_gym.run_sync(endless())

    def interrupt() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupter.join()
    assert ended == ["cancelled"]


def summary() -> RunSummary:
    found = RunSummary(RolloutPaths(Path("<b>out</b>.jsonl")), expected=3, owed=3, wall_time_s=1.5)
    found.counts.update({Outcome.SUCCESS: 2, Outcome.FAILURE: 1})
    metrics = AggregateMetrics(key_metrics={"mean/reward": 0.123456, "<i>": "<script>\x1b[2J"})
    found.metrics = [AgentMetrics("agent & co", metrics, percentiles={"duration_s": {"p50": 1.5, "p95": 20.0}})]
    found.failures.by_class["timeout"] = FailuresOfClass("<img src=x onerror=alert(1)>", 3, 1)
    return found


def test_a_summary_prints_well() -> None:
    lines = str(summary()).splitlines()

    assert lines[0] == "agent & co: mean/reward = 0.1235"
    assert lines[1] == "agent & co: <i> = <script>\\x1b[2J"
    assert "timeout  " in lines[3]
    assert "Rollouts: 2 of 3 finished, 1 failed" in lines
    assert "Per rollout: median 1.5 s (p95 20 s)" in lines
    assert lines[-1] == "Failures: <b>out</b>_failures.jsonl"


def test_a_summary_is_a_table_in_which_text_stays_text() -> None:
    shown = summary()._repr_html_()

    assert shown.startswith("<table><tr><td>agent &amp; co</td><td>mean/reward</td><td>0.1235</td></tr>")
    assert "<th>Rollouts</th><td colspan=2>2 of 3 finished, 1 failed</td>" in shown
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown
    assert set(re.findall(r"<(\w+)", shown)) == {"table", "tr", "td", "th"}
    assert "\x1b" not in shown


RECORDS: list[dict[str, Any]] = [
    {
        "reward": 1.0,
        "is_right": True,
        "agent": "of the row",
        "responses_create_params": {"input": "?"},
        "response": {
            "output": [
                {"type": "message", "content": [{"type": "output_text", "text": "4"}, {"text": "2"}]},
                {"type": "function_call", "name": "x"},
            ],
            "usage": {"total_tokens": 7, "output_tokens_details": {"reasoning_tokens": 0}},
        },
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
        "agent_ref": {"name": "alpha"},
        "_ng_timing": {"started_at": "2026-01-01T00:00:00.000Z", "duration_s": 0.5, "calls": []},
    },
    {"_ng_task_index": 4, "_ng_rollout_index": 0, "_ng_failure_class": "timeout", "agent_ref": None, "reward": "no"},
]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_rollouts_become_a_table_of_their_numbers_and_texts(library: Any, tmp_path: Path) -> None:
    pytest.importorskip(library)
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    frame = nemo_gym.to_dataframe(path, library)

    first, second = frame.to_dict("records") if library == "pandas" else frame.to_dicts()
    assert first["answer"] == "42"
    assert {name: first[name] for name in ("task_index", "rollout_index", "agent", "record.agent", "is_right")} == {
        "task_index": 3,
        "rollout_index": 1,
        "agent": "alpha",
        "record.agent": "of the row",
        "is_right": True,
    }
    assert (first["total_tokens"], first["duration_s"], first["started_at"][:4]) == (7, 0.5, "2026")
    assert (second["task_index"], second["failure_class"]) == (4, "timeout")
    assert not {"response", "responses_create_params", "calls", "output_tokens_details"} & set(frame.columns)


def test_what_keeps_rollouts_from_becoming_a_table_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        nemo_gym.to_dataframe(tmp_path / "rollouts.jsonl")
    probe = (
        "import sys, nemo_gym; sys.modules.update(pandas=None, polars=None)\n"
        "try: nemo_gym.to_dataframe('x.jsonl')\nexcept nemo_gym.notebooks.ConfigError as error: print(error)"
    )
    done = python(tmp_path, "-c", probe)
    assert f"-e '{nemo_gym.PARENT_DIR}[dataframe]'" in done.stdout, done.stderr
