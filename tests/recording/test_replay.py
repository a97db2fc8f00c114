"""A run that was recorded against a noisy endpoint, replayed without it, gives the same rollouts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.paths import PARENT_DIR
from nemo_gym.recording.files import call_files
from nemo_gym.recording.upkeep import take_inventory
from tests.recording.harness import GONE, Endpoint, noisy_endpoint, roll_out, rows_of_example

MODELS = ["openai_model", "vllm_model", "azure_openai_model", "inference_provider"]
AGENT = "example_multi_step_simple_agent"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with noisy_endpoint() as running:
        yield running


def recording(folder: Path, mode: str) -> dict[str, Any]:
    return {"recording_folder": str(folder), "recording_mode": mode}


def test_sixty_rollouts_are_the_same_again(endpoint: Endpoint, tmp_path: Path) -> None:
    rows = rows_of_example(12)
    recorded = roll_out(rows, endpoint.port, **recording(tmp_path, "record"))
    asked = endpoint.asked
    replayed = roll_out(rows, GONE, policy_api_key="another", **recording(tmp_path, "replay"))

    assert len(recorded) == 60
    assert recorded == replayed
    assert len({json.dumps(each["response"]["output"]) for each in recorded}) == 60  # so it was noisy
    assert roll_out(rows, endpoint.port, **recording(tmp_path, "auto")) == recorded
    assert endpoint.asked == asked


@pytest.mark.parametrize("model", MODELS)
def test_every_model_server_can(model: str, endpoint: Endpoint, tmp_path: Path) -> None:
    rows = rows_of_example(1)
    recorded = roll_out(rows, endpoint.port, model=model, **recording(tmp_path, "auto"))

    assert all("reward" in each for each in recorded)
    assert recorded == roll_out(rows, GONE, model=model, **recording(tmp_path, "replay"))
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"key-that-nobody" not in content


def test_more_of_the_same_run_asks_only_for_what_is_new(endpoint: Endpoint, tmp_path: Path) -> None:
    first = roll_out(rows_of_example(1), endpoint.port, **recording(tmp_path, "auto"))
    asked = endpoint.asked
    both = roll_out(rows_of_example(2), endpoint.port, **recording(tmp_path, "auto"))

    assert [each for each in both if each["_ng_rollout_index"] == 0] == first
    assert asked < endpoint.asked < 2.5 * asked


def test_a_call_that_is_not_recorded_is_a_terminal_failure_that_names_it(endpoint: Endpoint, tmp_path: Path) -> None:
    rows = rows_of_example(1)
    roll_out(rows, endpoint.port, **recording(tmp_path, "record"))
    rows[0]["responses_create_params"]["input"][1]["content"] = "Something else."
    rows[1]["_ng_rollout_index"] = 5
    failed = roll_out(rows, GONE, **recording(tmp_path, "replay"))

    assert [each.get("_ng_failure_class") for each in failed] == ["not_recorded", "not_recorded", None, None, None]
    assert all(each["_ng_failure_terminal"] is True for each in failed[:2])
    assert failed[0]["_ng_failure_server"] == "policy_model"
    said = failed[0]["_ng_failure_message"]
    assert "call 1 of rollout 0-0 (responses) is not in the recording" in said
    assert "request.input[1].content was 'Here are words" in said
    assert "is 'Something else.' now" in said
    assert "no call of this rollout is" in failed[1]["_ng_failure_message"]


def test_calls_that_failed_are_not_recorded(tmp_path: Path) -> None:
    rows = rows_of_example(4)
    with noisy_endpoint("--failing", "0.1") as unreliable:
        recorded = roll_out(rows, unreliable.port, **recording(tmp_path, "record"))
    failed = [each for each in recorded if "_ng_failure_class" in each]
    replayed = roll_out(rows, GONE, **recording(tmp_path, "replay"))

    assert 0 < len(failed) < len(rows)
    for before, after in zip(recorded, replayed, strict=True):
        assert after == before or (before in failed and after["_ng_failure_class"] == "not_recorded")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recording_folder": "r"}, "recording_folder is given, but nothing says what to do with it"),
        ({"recording_mode": "auto"}, "mode auto needs a folder"),
        ({"recording_folder": "r", "recording_mode": "play"}, "recording_mode=play: Input should be 'off', 'record'"),
        ({"recording_folder": "nowhere", "recording_mode": "replay"}, "nowhere: there is no such recording to replay"),
        ({"recording_folder": "r", "recording_mode": "record", "recording_max_bytes": 0}, "recording_max_bytes=0"),
        (
            {"policy_model": {"responses_api_models": {"openai_model": {"recording": {"foldr": "r"}}}}},
            "policy_model.responses_api_models.openai_model.recording.foldr: .*there are folder, mode, max_bytes",
        ),
        ({"policy_model": {"responses_api_models": {"openai_model": {"recording": "r"}}}}, "is no mapping"),
        (
            {
                "recording_folder": "r",
                "recording_mode": "record",
                "policy_model": {"responses_api_models": {"openai_model": {"num_workers": 2}}},
            },
            "recording and num_workers=2 do not go together",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_one_line(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words) as refused:
        roll_out([], GONE, **settings)
    assert "\n" not in str(refused.value)


def test_off_is_off_whatever_yaml_makes_of_it(tmp_path: Path, endpoint: Endpoint) -> None:
    for off in (False, "off"):
        roll_out(rows_of_example(1)[:1], endpoint.port, recording_folder=str(tmp_path / "r"), recording_mode=off)
    assert not (tmp_path / "r").exists()


RECORDING = """
import json, sys
from tests.recording.harness import Stage, rows_of_example
with Stage(int(sys.argv[1]), recording_folder=sys.argv[2], recording_mode="record") as stage:
    stage.roll_out(rows_of_example(100), at_once=4, told=lambda done: print(json.dumps(done), flush=True))
"""


def test_a_killed_server_loses_at_most_the_call_in_flight(endpoint: Endpoint, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RECORDING, str(endpoint.port), str(tmp_path)]
    answered: list[dict[str, Any]] = []
    with subprocess.Popen(command, cwd=PARENT_DIR, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            answered.append(json.loads(line))
            if len(answered) == 5:
                break
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().splitlines()
    answered += [json.loads(line) for line in rest if line.endswith("}")]
    rows = [
        {**rows_of_example(1)[each["_ng_task_index"]], "_ng_rollout_index": each["_ng_rollout_index"]}
        for each in answered
    ]

    assert take_inventory(tmp_path, verify=True).damage == []
    assert roll_out(rows, GONE, **recording(tmp_path, "replay")) == answered
    assert 5 <= len(answered) < 500


def test_a_flipped_byte_is_named_and_what_it_hit_recorded_again(endpoint: Endpoint, tmp_path: Path) -> None:
    rows = rows_of_example(1)
    roll_out(rows, endpoint.port, **recording(tmp_path, "record"))
    (path,) = call_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    failed = [each for each in roll_out(rows, GONE, **recording(tmp_path, "replay")) if "_ng_failure_class" in each]

    assert [each["_ng_failure_class"] for each in failed] == ["not_recorded"]
    assert f"{path}, offset 0: the recorded call is damaged" in failed[0]["_ng_failure_message"]
    assert [(place.file, place.offset) for place in take_inventory(tmp_path, verify=True).damage] == [(path, 0)]
    roll_out(rows, endpoint.port, **recording(tmp_path, "auto"))
    assert not [e for e in roll_out(rows, GONE, **recording(tmp_path, "replay")) if "_ng_failure_class" in e]
