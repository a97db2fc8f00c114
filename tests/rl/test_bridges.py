"""Each bridge to a trainer learns: the programs of docs/trainers.md, run as they stand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.batches import token_sequence
from nemo_gym.rl.buffer import RolloutBuffer
from nemo_gym.rl.interfaces import Completion

pytest.importorskip("torch", reason="the policies are torch modules: install the extra `rl` (make test-rl)")

EXAMPLES = PARENT_DIR / "docs" / "examples"
LEARNED = 0.6
"""One answer in ten is right by chance; in a dozen runs of each bridge it was 0.89 and more after training."""
MAX_AGE = 4
KILLED_AT = 8


def started(program: str, *arguments: str, folder: Path) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    result: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return result


def kill_after(process: "subprocess.Popen[str]", words: str, ledger: Path) -> None:
    """Kill it once it has said that, at a moment at which groups wait, or are being trained on."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith(words):
            break
    else:
        pytest.fail(f"it ended before {words!r}: {''.join(told[-20:])}")
    end_s = time.monotonic() + 120
    while True:
        assert time.monotonic() < end_s, "no group waited for two minutes"
        process.send_signal(signal.SIGSTOP)
        committed, trained = numbers_in(ledger)
        if len(committed - trained) >= 3:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def numbers_in(ledger: Path) -> tuple[set[int], set[int]]:
    """The groups that were committed, and those that were trained on; a last line may be half written."""
    lines = ledger.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    committed = {entry["committed"] for entry in entries if "committed" in entry}
    return committed, {number for entry in entries for number in entry.get("trained", ())}


def test_asynchronous_grpo_learns_and_loses_no_group_over_pauses_and_a_killed_trainer(tmp_path: Path) -> None:
    ledger_file = tmp_path / "run" / "ledger.jsonl"
    kill_after(started("async_grpo.py", "run", folder=tmp_path), f"step {KILLED_AT}:", ledger_file)

    result = result_of(started("async_grpo.py", "run", folder=tmp_path))

    steps = [json.loads(line) for line in ledger_file.read_text().splitlines() if line.startswith('{"step"')]
    committed, trained = numbers_in(ledger_file)
    left = {group.record.prompt_idx for group in RolloutBuffer(path=tmp_path / "run" / "buffer.ngb").take_ready()}
    assert result["after"] > LEARNED
    assert result["restored"] > 0, "the killed trainer left groups behind, which were trained on"
    assert committed - trained - left == set(), "every group that was committed was trained on, or waits"
    assert result["too_old"] == 0
    assert max(age for entry in steps for age in entry["ages"]) <= MAX_AGE
    assert {age for entry in steps for age in entry["ages"]} != {0}, "some were made with older weights"
    assert [entry["step"] for entry in steps][-1] == 30
    assert result["pauses"] >= 10
    assert result["interrupted"] > 0


def test_trl_trains_on_the_rollouts_of_a_manager(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="test-only: make test-rl installs it")

    result = result_of(started("trl_grpo.py", folder=tmp_path))

    assert result["first"] < 0.3
    assert result["last"] > LEARNED


def test_a_verl_style_agent_loop_learns(tmp_path: Path) -> None:
    result = result_of(started("verl_agent_loop.py", folder=tmp_path))

    assert result["before"] < 0.3
    assert result["after"] > LEARNED


def message(role: str, *ids: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": "", "token_ids": list(ids), **more}


def test_a_completion_as_prompt_and_response() -> None:
    log = [
        message("system", 1),
        message("user", 2, 3),
        message("assistant", 4, 5, generation_logprobs=[-0.5, -0.25], token_loss_mask=[0, 1]),
        message("environment", 6),
        message("assistant", 7, generation_logprobs=[-1.0]),
        message("environment", 8),
    ]
    sequence = token_sequence(Completion(log, None, truncated=False, reward=1.0))

    assert sequence.prompt_ids == [1, 2, 3]
    assert sequence.response_ids == [4, 5, 6, 7]
    assert sequence.response_mask == [0, 1, 0, 1]
    assert sequence.response_logprobs == [-0.5, -0.25, 0.0, -1.0]


def test_a_completion_without_a_turn_of_the_policy_is_all_prompt() -> None:
    sequence = token_sequence(Completion([message("user", 2, 3)], None, truncated=True, reward=0.0))

    assert sequence == ([2, 3], [], [], [])
