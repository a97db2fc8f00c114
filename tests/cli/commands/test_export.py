import json
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named

main = command_named("export")


def write_run(folder: Path) -> Path:
    records = [
        {
            "_ng_task_index": 0,
            "_ng_rollout_index": index,
            "responses_create_params": {"input": "hi"},
            "response": {"output": [{"type": "message", "role": "assistant", "content": str(index)}]},
            "reward": reward,
        }
        for index, reward in enumerate([0.0, 1.0, None])
    ]
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_data_set_is_written_and_what_was_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, output = write_run(tmp_path), tmp_path / "new" / "dpo.jsonl"
    arguments = [f"+rollouts_jsonl_fpath={rollouts}", f"+output_fpath={output}", "+format=dpo"]

    main.run([*arguments, "+filter=0 < mean < 1"])

    assert json.loads(output.read_text())["chosen"] == [{"role": "assistant", "content": "1"}]
    assert capsys.readouterr().out.splitlines() == [
        f"1 examples of 1 tasks are in {output}",
        "Left out: 1 rollouts (no reward)",
    ]


def test_the_result_can_be_had_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, output = write_run(tmp_path), tmp_path / "sft.jsonl"
    main.run([f"+rollouts_jsonl_fpath={rollouts}", f"+output_fpath={output}", "+format=sft", "+json=true"])
    assert json.loads(capsys.readouterr().out)["examples"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["+filter=mean > 2"], "nothing passed +filter=mean > 2: "),
        (["+where=reward > 2", "+min_reward=1"], "nothing passed +min_reward=1.0 and +where=reward > 2: "),
        (["+filter=mean > 2", "+json=true"], "nothing passed +filter=mean > 2: "),
    ],
)
def test_a_filter_that_nothing_passes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    rollouts, output = write_run(tmp_path), tmp_path / "sft.jsonl"
    main.run([f"+rollouts_jsonl_fpath={rollouts}", f"+output_fpath={output}", "+format=sft", *options])
    printed = capsys.readouterr()
    assert printed.err == f"Warning: {said}{output} is empty\n"
    assert printed.out.startswith("{" if "+json=true" in options else "0 examples of 0 tasks are in")
    assert output.read_text() == ""


def test_a_format_that_does_not_exist_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run([f"+rollouts_jsonl_fpath={write_run(tmp_path)}", "+output_fpath=x.jsonl", "+format=sfd"])
    assert ended.value.code == 2
    assert "did you mean 'sft'?" in capsys.readouterr().err
