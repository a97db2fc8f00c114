"""Programs of others around a run: a function that collects in place of the collector, and skills for agents."""

import json
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from nemo_gym.skills import hash_skill_dir
from tests.programs import run_program

DRIVER = """
    import json
    from pathlib import Path

    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper


    async def collect(config: RolloutCollectionConfig, global_config_dict) -> None:
        results = await RolloutCollectionHelper().run_from_config(config)
        seen = {"rewards": [result["reward"] for result in results], "servers": sorted(
            name for name in global_config_dict if "example_single_tool_call" in name)}
        Path("seen.json").write_text(json.dumps(seen))


    async def fail(config, global_config_dict) -> None:
        raise OSError("the disk is full")
"""
RUN = [
    *("gym", "eval", "run", "--environment", "example_single_tool_call", "--model-type", "scripted_model"),
    *("--split", "example", "-o", "results/out.jsonl", "--limit", "2"),
]


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path) -> None:
    package = tmp_path / "benchmarks/mine"
    package.mkdir(parents=True)
    (package / "driver.py").write_text(dedent(DRIVER))
    skill = tmp_path / "skills/counting"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text(
        "---\nname: counting\ndescription: To ten.\nmetadata: {version: 2}\n---\nOne, two.\n"
    )


def typed(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return run_program(*words, "+head_server.port=0", folder=folder)  # other tests hold the usual port


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_collects_with_the_servers_of_the_run(tmp_path: Path) -> None:
    done = typed(tmp_path, *RUN, "+rollout_collection_driver=benchmarks.mine.driver:collect")
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["rewards"] == [1.0, 1.0]
    assert seen["servers"] == ["example_single_tool_call", "example_single_tool_call_simple_agent"]
    assert len(records(tmp_path / "results/out.jsonl")) == 2


@pytest.mark.parametrize(
    ("driver", "code", "said"),
    [
        ("benchmarks.mine.driver", 2, "it is written <module>:<function>"),
        ("benchmarks.mine.drivers:collect", 2, "cannot be imported: No module named"),
        ("benchmarks.mine.driver:colect", 2, "has no function 'colect'; did you mean 'collect'?"),
        ("benchmarks.mine.driver:fail", 1, "failed: OSError: the disk is full"),
    ],
)
def test_a_function_that_is_not_there_or_fails_is_one_line(tmp_path: Path, driver: str, code: int, said: str) -> None:
    done = typed(tmp_path, *RUN, f"+rollout_collection_driver={driver}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "results/out/preprocessed_datasets").exists() == (code == 1)


def test_skills_are_named_in_rows_and_results_and_survive_a_resumed_run(tmp_path: Path) -> None:
    run = [*RUN, "+skills.path=skills"]
    done = typed(tmp_path, *run)
    assert done.returncode == 0, done.stderr
    said = {
        "path": "skills",
        "hash": hash_skill_dir(tmp_path / "skills"),
        "skills": [{"name": "counting", "description": "To ten.", "version": "2"}],
    }
    for name in ("out", "out_materialized_inputs"):
        assert [record["skills_ref"] for record in records(tmp_path / f"results/{name}.jsonl")] == [said, said]
    (tmp_path / "results/out.jsonl").write_text((tmp_path / "results/out.jsonl").read_text().splitlines()[0] + "\n")
    shutil.rmtree(tmp_path / "skills")
    resumed = typed(tmp_path, *run, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [record["skills_ref"] for record in records(tmp_path / "results/out.jsonl")] == [said, said]
    without = typed(tmp_path, *RUN, "--resume")
    assert without.returncode == 2
    assert "skills.path" in without.stderr


def test_skills_that_are_not_there_stop_a_run_before_it_begins(tmp_path: Path) -> None:
    done = typed(tmp_path, *RUN, "+skills.path=nowhere")
    assert done.returncode == 2
    assert "skills path 'nowhere' is not a folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_input_is_rolled_out_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Mine?"}\n')
    for given in (["-i", "mine.jsonl"], ["+input_jsonl_fpath=mine.jsonl"]):
        done = typed(tmp_path, *RUN, *given)
        assert done.returncode == 0, done.stderr
        asked = [record["responses_create_params"]["input"] for record in records(tmp_path / "results/out.jsonl")]
        assert asked == ["Mine?"]
