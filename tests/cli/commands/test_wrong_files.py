"""Files given in place of others are recognised by what they hold; nothing is written, and nothing written over."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import Command, command_named

aggregate_rollouts = command_named("aggregate_rollouts")
export = command_named("export")
materialize_prompts = command_named("materialize_prompts")
reward_profile = command_named("reward_profile")


KEY = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}}
PARAMS = {"responses_create_params": {"input": "a"}}
ROLLOUT = {**KEY, **PARAMS, "reward": 1.0, "response": {"output": []}}
CONTENTS = {
    "r.jsonl": json.dumps(ROLLOUT),
    "r_materialized_inputs.jsonl": json.dumps({**KEY, **PARAMS}),
    "r_failures.jsonl": json.dumps({**KEY, "_ng_failure_class": "timeout"}),
    "r_manifest.json": json.dumps({"manifest_version": 1}, indent=2),
    "r_aggregate_metrics.json": json.dumps([{"agent_ref": {"name": "a"}, "agent_metrics": {}}], indent=2),
    "data.jsonl": json.dumps(PARAMS),
    "train.jsonl": json.dumps({"messages": [], "provenance": {}}),
    "thesis.txt": "Chapter 1.\nIn the beginning\n",
}
KINDS = {
    "r_materialized_inputs.jsonl": "is a materialized-inputs file",
    "r_failures.jsonl": "is a failures file",
    "r_manifest.json": "is the manifest of a run",
    "r_aggregate_metrics.json": "is a metrics file",
    "data.jsonl": "is a data set",
    "train.jsonl": "is a training data set",
    "thesis.txt": "is a text file",
}
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must end with exit code 2 and leave the folder as it was; what it says."""
    monkeypatch.chdir(tmp_path)
    for name, content in CONTENTS.items():
        Path(name).write_text(content)

    def run(command: Command[Any], *arguments: str) -> str:
        before = _state(tmp_path)
        with pytest.raises(SystemExit, match="2"):
            command.run(list(arguments))
        assert _state(tmp_path) == before
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_rollouts_is_not_exported(refused: Refused, name: str) -> None:
    errors = refused(export, f"+rollouts_jsonl_fpath={name}", "+output_fpath=out.jsonl", "+format=sft")
    assert f"{name} {KINDS[name]}" in errors
    assert ("beside it are in r.jsonl" in errors) is name.startswith("r_")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_rollouts_is_not_profiled(refused: Refused, name: str) -> None:
    errors = refused(
        reward_profile,
        "+materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl",
        f"+rollouts_jsonl_fpath={name}",
    )
    assert f"{name} {KINDS[name]}" in errors


@pytest.mark.parametrize("name", ["r.jsonl", *list(KINDS)[1:]])
def test_what_is_no_materialized_inputs_is_named(refused: Refused, name: str) -> None:
    given = (f"+materialized_inputs_jsonl_fpath={name}", "+rollouts_jsonl_fpath=r.jsonl")
    errors = refused(reward_profile, *given)
    assert f"{name} {KINDS.get(name, 'is a rollouts file')}" in errors
    assert "that of these rollouts is r_materialized_inputs.jsonl" in errors


def test_two_swapped_files_are_told_apart(refused: Refused) -> None:
    errors = refused(
        reward_profile,
        "+materialized_inputs_jsonl_fpath=r.jsonl",
        "+rollouts_jsonl_fpath=r_materialized_inputs.jsonl",
    )
    assert "the two files are swapped" in errors
    assert "+materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl +rollouts_jsonl_fpath=r.jsonl" in errors


@pytest.mark.parametrize("name", ["data.jsonl", "train.jsonl", "inputs.jsonl"])
@pytest.mark.parametrize("pattern", ["{}", "r.jsonl,{}", "*{}"])
def test_what_is_no_rollouts_is_not_aggregated(refused: Refused, name: str, pattern: str) -> None:
    Path("inputs.jsonl").write_text(CONTENTS["r_materialized_inputs.jsonl"])
    Path("r_materialized_inputs.jsonl").unlink()
    glob = pattern.format(name)
    errors = refused(aggregate_rollouts, f"+input_glob='{glob}'", "+output_jsonl_fpath=all.jsonl", "+offline=true")
    assert f"{name} {KINDS.get(name, 'is a materialized-inputs file')}" in errors


@pytest.mark.parametrize("name", ["thesis.txt", "data.jsonl", "pipe", "link"])
def test_an_aggregation_replaces_only_an_earlier_one(refused: Refused, name: str) -> None:
    _odd_files()
    errors = refused(aggregate_rollouts, "+input_glob=r.jsonl", f"+output_jsonl_fpath={name}", "+offline=true")
    assert f"+output_jsonl_fpath={name} is a" in errors
    assert "stays as it is" in errors


@pytest.mark.parametrize("name", ["r2.jsonl", "pipe", "link"])
def test_an_export_never_replaces_results(refused: Refused, name: str) -> None:
    _odd_files()
    Path("r2.jsonl").write_text(CONTENTS["r.jsonl"])
    given = ("+rollouts_jsonl_fpath=r.jsonl", f"+output_fpath={name}", "+format=sft", "+overwrite=true")
    assert f"{name} is a" in refused(export, *given)


@pytest.mark.parametrize("name", ["thesis.txt", "data.jsonl", "r.jsonl", "pipe", "link"])
def test_a_selection_replaces_only_an_earlier_one(refused: Refused, name: str) -> None:
    _odd_files()
    errors = refused(
        reward_profile,
        "+materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl",
        "+rollouts_jsonl_fpath=r.jsonl",
        "+select=mean > 0",
        f"+select_output_jsonl_fpath={name}",
    )
    assert f"{name} is a" in errors
    assert "name another +select_output_jsonl_fpath" in errors


def test_a_profile_is_not_written_over_something_else(refused: Refused) -> None:
    Path("r_reward_profile.html").write_text("My notes\n")
    errors = refused(
        reward_profile,
        "+materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl",
        "+rollouts_jsonl_fpath=r.jsonl",
    )
    assert "r_reward_profile.html is a text file" in errors


@pytest.mark.parametrize("name", ["thesis.txt", "data.jsonl", "pipe", "link"])
def test_prompts_replace_only_rows_that_were_made_like_that(refused: Refused, name: str) -> None:
    _odd_files()
    Path("prompt.yaml").write_text("user: '{question}'\n")
    Path("q.jsonl").write_text('{"question": "why?"}\n')
    given = ("+input_jsonl_fpath=q.jsonl", "+prompt_config=prompt.yaml", f"+output_jsonl_fpath={name}")
    assert name in refused(materialize_prompts, *given)


def test_what_a_command_has_written_it_may_write_again(refused: Refused) -> None:
    Path("prompt.yaml").write_text("user: '{question}'\n")
    for question in ("why?", "how?"):
        Path("q.jsonl").write_text(json.dumps({"question": question}) + "\n")
        materialize_prompts.run(
            ["+input_jsonl_fpath=q.jsonl", "+prompt_config=prompt.yaml", "+output_jsonl_fpath=filled.jsonl"]
        )
        reward_profile.run(
            [
                "+materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl",
                "+rollouts_jsonl_fpath=r.jsonl",
                "+select=mean > 0",
            ]
        )
        assert question in Path("filled.jsonl").read_text()


def _state(folder: Path) -> dict[Path, tuple[int, ...]]:
    stats = {path: path.lstat() for path in folder.iterdir()}
    return {path: (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _odd_files() -> None:
    os.mkfifo("pipe")
    Path("linked.txt").touch()
    Path("link").symlink_to("linked.txt")
