"""What runs cost is a metric like others, and a gate can be set on it."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from tests.collection.fakes import write_rows

main = command_named("compare")


PRICES = "+prices={m: {input: 1, output: 10}}"


def rollouts(path: Path, output: int, *, prices: dict[str, Any] | None = None) -> Path:
    records = []
    for task in range(40):
        usage = {"input_tokens": 1_000, "output_tokens": output + task, "total_tokens": 1_000 + output + task}
        params = {"input": f"task {task}"}
        answer = {"model": "m", "usage": usage}
        indices = {"_ng_task_index": task, "_ng_rollout_index": 0}
        records.append({**indices, "responses_create_params": params, "response": answer, "reward": task % 2})
    if prices is not None:
        path.with_name(f"{path.stem}_manifest.json").write_text(json.dumps({"options": {"prices": prices}}))
    return write_rows(path, records)


def compare(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = 0
    try:
        main.run(["+runs=[base.jsonl,new.jsonl]", *options])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rollouts(tmp_path / "base.jsonl", 100)
    rollouts(tmp_path / "new.jsonl", 300)


def test_cost_is_compared_at_the_prices_given(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = compare(capsys, "+metric=cost", PRICES, "+json=true")

    compared = json.loads(printed)["metrics"][0]
    assert code == 0
    assert compared["metric"] == "cost"
    assert compared["found"]["delta"] == pytest.approx(200 * 10 / 1e6)


def test_a_gate_on_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(capsys, PRICES, "+fail_if=cost.delta > 0.001")[0] == 1
    assert compare(capsys, PRICES, "+fail_if=cost.delta > 0.003")[0] == 0


def test_runs_bring_the_prices_they_were_collected_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = {"m": {"input": 1, "output": 20}}
    for name, output in (("base", 100), ("new", 300)):
        rollouts(tmp_path / f"{name}.jsonl", output, prices=prices)

    assert compare(capsys, "+fail_if=cost.delta > 0.0039")[0] == 1
    assert compare(capsys, "+fail_if=cost.delta > 0.0041")[0] == 0


def test_without_prices_there_is_no_cost(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        ["+metric=cost"],
        ["+fail_if=cost.delta > 0"],
        ["+metric=cost", "+prices={other: {input: 1, output: 1}}"],
    ):
        code, _, said = compare(capsys, *options)
        assert code == 2
        assert "what the rollouts of base cost is not known" in said
        assert "+prices={my-model: {input: 2.5, output: 10}}" in said
