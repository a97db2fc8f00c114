"""Ten thousand rollouts scored again after the verifier changed: right differences, resumable, the agent absent."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named
from tests.collection.conftest import _clean_surroundings  # noqa: F401 - a fixture that every test here needs
from tests.collection.fakes import keys_in, lines_in, serve
from tests.collection.scoring import FakeEnvironment, manifest_of, rollout, rows_made, write_run
from tests.programs import Program

main = command_named("reverify")


TASKS, REPEATS = 2_500, 4
DEADLINE_S = 300.0


def write_ten_thousand(folder: Path) -> float:
    """All scored 1; every fifth answer is wrong. Returns the mean reward of the verifier that notices."""
    rows = rows_made(TASKS, REPEATS)
    texts = ["wrong" if place % 5 == 0 else "right" for place in range(len(rows))]
    write_run(folder, rows, [rollout(row, text, 1.0) for row, text in zip(rows, texts, strict=True)])
    return texts.count("right") / len(texts)


def test_ten_thousand_rollouts_after_the_verifier_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    mean = write_ten_thousand(tmp_path)
    with serve(FakeEnvironment()) as environment:
        assert isinstance(environment, FakeEnvironment)
        command = [f"+head_server.port={environment.port}", "+rollouts_jsonl_fpath=old.jsonl"]
        command += ["+output_jsonl_fpath=new.jsonl", "+json=true"]
        first = Program("ng_reverify", *command)
        deadline = time.monotonic() + DEADLINE_S
        while not Path("new.jsonl").exists() or Path("new.jsonl").stat().st_size < 1 << 20:
            assert time.monotonic() < deadline, first.stderr
            time.sleep(0.02)
        first.send(signal.SIGKILL)
        first.wait()
        done_before = len(keys_in(Path("new.jsonl"))) if _is_whole(Path("new.jsonl")) else None
        environment.verified.clear()
        began_s = time.process_time()
        main.run([*command, "+resume_from_cache=true"])
        cpu_s = time.process_time() - began_s
        if done_before is not None:
            assert len(environment.verified) == TASKS * REPEATS - done_before
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["finished"] == told["expected"] == TASKS * REPEATS
    assert told["delta"]["rollouts"] == {"compared": 10_000, "better": 0, "worse": 2_000}
    assert told["delta"]["mean_reward"]["delta"] == pytest.approx(mean - 1)
    assert told["delta"]["interval"]["low"] < mean - 1 < told["delta"]["interval"]["high"] < 0
    assert manifest_of(Path("new.jsonl"))["delta"] == told["delta"]
    records = lines_in(Path("new.jsonl"))
    assert len(keys_in(Path("new.jsonl"))) == len(set(keys_in(Path("new.jsonl")))) == 10_000
    assert sum(record["reward"] for record in records) == pytest.approx(mean * 10_000)
    assert {record["_ng_previous_verdict"]["reward"] for record in records} == {1.0}
    record_property("cpu_s_of_the_resumed_part", round(cpu_s, 2))


def _is_whole(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")
