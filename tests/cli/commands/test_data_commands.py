"""The commands around data, as users type them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named

dev_test = command_named("dev_test")
download_dataset_from_hf = command_named("download_dataset_from_hf")
list_benchmarks = command_named("list_benchmarks")
prepare_data = command_named("prepare_data")
upload_dataset_to_hf = command_named("upload_dataset_to_hf")


Script = Callable[..., "subprocess.CompletedProcess[str]"]
CONFIG = """
my_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
        - {name: e, type: example, jsonl_fpath: e.jsonl}
"""


def test_offending_rows_end_ng_prepare_data_with_exit_code_2(script: Script, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "e.jsonl").write_text('{"prompt": "q"}\n{"bad": 1}\n')
    options = ["+config_paths=[c.yaml]", "+mode=example_validation", "+output_dirpath=out"]

    refused = script("ng_prepare_data", *options)
    assert refused.returncode == 2
    assert f"{tmp_path}/e.jsonl, line 2: it has no responses_create_params" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "e.jsonl"]

    kept = script("ng_prepare_data", *options, "+keep_offending_rows=true")
    assert kept.returncode == 0, kept.stderr
    assert kept.stdout.split() == ["e_metrics.json", "e_prepare.jsonl", "out/example.jsonl", "out/example_metrics.json"]
    assert len((tmp_path / "out/example.jsonl").read_text().splitlines()) == 2


def test_rows_that_the_environment_would_refuse_end_ng_prepare_data_too(script: Script, tmp_path: Path) -> None:
    environment = "resources_server: {type: resources_servers, name: string_match}\n      model_server"
    included = "config_paths: [resources_servers/string_match/configs/string_match.yaml]\n"
    (tmp_path / "c.yaml").write_text(included + CONFIG.replace("model_server", environment))
    rows = ['{"prompt": "q", "expected_answer": 5}', "", '{"prompt": "q"}', '{"prompt": "r"}']
    (tmp_path / "e.jsonl").write_text("\n".join(rows))
    deaf = "~string_match_simple_agent"  # it has data of its own
    options = ["+config_paths=[c.yaml]", "+mode=example_validation", "+output_dirpath=out", deaf]

    refused = script("ng_prepare_data", *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-3:] == [
        "Error: rows cannot be rolled out, so nothing was written:",
        f"  {tmp_path}/e.jsonl, line 3: expected_answer: it is missing (2 rows are like this)",
        "Correct or remove them, or pass +keep_offending_rows=true to write them as they are.",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "e.jsonl"]

    kept = script("ng_prepare_data", *options, "+keep_offending_rows=true")
    assert kept.returncode == 0, kept.stderr
    assert "e.jsonl, line 3: expected_answer: it is missing" in kept.stderr

    unverified = script("ng_prepare_data", *options, "+skip_verification=true")
    assert unverified.returncode == 0, unverified.stderr
    assert "expected_answer" not in unverified.stderr


def test_examples_of_this_distribution_are_valid_from_anywhere(tmp_path: Path) -> None:
    config = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
    prepare_data.run([f"+config_paths=[{config}]", "+mode=example_validation", "+output_dirpath=out"])
    assert len((tmp_path / "out/example.jsonl").read_text().splitlines()) == 5
    assert not list(tmp_path.rglob("*conflict*"))


def test_benchmarks_are_listed_as_a_table_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    list_benchmarks.run([])
    printed = capsys.readouterr().out
    assert printed.startswith("Available benchmarks in NeMo Gym (")
    assert "gsm8k_math_with_judge_simple_agent" in printed
    list_benchmarks.run(["+json=true", "+query=aime"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["num_repeats"], found["domain"]) == ("aime24", 32, "math")
    list_benchmarks.run(["+query=zebra"])
    assert "No benchmarks match 'zebra'" in capsys.readouterr().out


def test_without_any_benchmark_the_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nemo_gym.paths.PARENT_DIR", tmp_path)
    list_benchmarks.run([])
    assert f"No benchmarks found below {tmp_path}/benchmarks" in capsys.readouterr().out
    list_benchmarks.run(["+json=true"])
    assert json.loads(capsys.readouterr().out) == []


def test_transfers_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        download_dataset_from_hf.run(["+repo_id=o/d"])
    assert ended.value.code == 2
    assert "output_dirpath" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        upload_dataset_to_hf.run(["+input_jsonl_fpath=x.jsonl"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert "+hf_organization=<text> is required" in errors
    assert "+resource_config_path=<text> is required" in errors


def test_an_installation_without_tests_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nemo_gym.cli.commands.about.PARENT_DIR", tmp_path)
    with pytest.raises(SystemExit) as ended:
        dev_test.run([])
    assert ended.value.code == 2
    assert "run this in a checkout" in capsys.readouterr().err


def test_in_a_checkout_its_tests_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nemo_gym.cli.commands.about.PARENT_DIR", tmp_path)
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)  # its coverage is not ours
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text("def test_it() -> None:\n    assert True\n")
    dev_test.run([])
    assert "1 passed" in capfd.readouterr().out
