"""Workloads with manifests: written whole, held against their configs, tried, and fit for others or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.cli.catalog import Profile, Workload, find_workload
from nemo_gym.cli.manifests import publish, run_cases, validate
from nemo_gym.cli.scaffolds import Scaffold, create_workload
from nemo_gym.collect.environments import Environment, Mode
from nemo_gym.errors import ConfigError
from nemo_gym.launch.reverify_modes import declared_mode
from tests.programs import run_program

EXAM = Scaffold("environment", "school/exam")
CASES = Path("resources_servers/exam/tests/verifier_cases.jsonl")


def settings(tmp_path: Path) -> Any:
    return OmegaConf.create({"cache_dir": str(tmp_path / "cache")})


def made(scaffold: Scaffold) -> Workload:
    create_workload(scaffold)
    return find_workload(scaffold.name, scaffold.kind, None)


def change(path: str | Path, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "scaffold",
    [
        EXAM,
        replace(EXAM, profile="custom-gym-agent-loop"),
        replace(EXAM, profile="external-agent-loop"),
        Scaffold("benchmark", "quiz", "external-rollout-driver", "mcqa", (0, 1), higher_is_better=True),
    ],
    ids=lambda each: each.profile,
)
def test_a_new_workload_is_valid_and_is_what_it_says(scaffold: Scaffold) -> None:
    report = validate(made(scaffold))
    assert list(report) == [
        *("name", "version", "kind", "declared_profile", "inferred_profile", "profile_evidence", "manifest_path"),
        *("config_path", "components", "datasets", "rollout_driver", "grading_mode", "synchronized_fields", "warnings"),
    ]
    assert (report["name"], report["kind"]) == (scaffold.name, scaffold.kind)
    assert report["inferred_profile"] == report["declared_profile"] == scaffold.profile
    assert [part["role"] for part in report["components"]] == ["resources_server", "agent_server", "model_server"]
    assert [data["rows"] for data in report["datasets"] if data["type"] == "example"] == [5]
    assert len(report["warnings"]) == (scaffold.kind == "benchmark")  # its rows are made when it is run


@pytest.mark.parametrize("profile", get_args(Profile))
@pytest.mark.parametrize("kind", ["environment", "benchmark"])
def test_a_new_workload_says_whether_it_can_score_again(kind: str, profile: Profile) -> None:
    name = f"exam_as_{kind}_{profile.replace('-', '_')}"  # a process loads a module of a name once
    create_workload(Scaffold(kind, name, profile))
    config = OmegaConf.load(f"{kind}s/{name}/config.yaml")
    assert isinstance(config, DictConfig)
    server = f"{name}_resources_server"
    assert declared_mode(config, server) == Environment(server, Mode.STATELESS)


def test_rollouts_of_a_new_workload_can_be_scored_again(tmp_path: Path) -> None:
    assert run_program("gym", "env", "init", "--environment", "exam", folder=tmp_path).returncode == 0
    words = ["--environment", "exam", "--model-type", "scripted_model", "--split", "example", "-o", "out.jsonl"]
    assert run_program("gym", "eval", "run", *words, folder=tmp_path).returncode == 0
    words = ["--environment", "exam", "--rollouts", "out.jsonl", "-o", "again.jsonl"]
    done = run_program("gym", "eval", "reverify", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "again.jsonl").read_text().splitlines()) == 5


def test_a_program_of_its_own_plays_a_new_workload(tmp_path: Path) -> None:
    begun = run_program(
        "gym", "env", "init", "--environment", "exam", "--profile", "external-agent-loop", folder=tmp_path
    )
    assert begun.returncode == 0, begun.stderr
    words = ["--environment", "exam", "--model-type", "scripted_model", "--split", "example", "-o", "out.jsonl"]
    done = run_program("gym", "eval", "run", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    assert (tmp_path / "out_failures.jsonl").read_text() == ""


def test_nothing_is_written_over_what_is_there_and_the_same_may_be_written_again() -> None:
    create_workload(EXAM)
    create_workload(EXAM)
    change("environments/school/exam/README.md", "TODO", "Done")
    Path("environments/school/exam/config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"exam/README\.md is there and says something else; nothing was written"):
        create_workload(EXAM)
    assert not Path("environments/school/exam/config.yaml").exists()


@pytest.mark.parametrize(
    ("scaffold", "said"),
    [
        (Scaffold("environment", "../up"), "a name is made of letters"),
        (Scaffold("environment", "my-exam"), "a name is made of letters"),
        (Scaffold("environment", "exam", reuse_verifier="mcqa"), "say what its rewards mean: --reward-range"),
        (
            Scaffold("environment", "exam", "custom-gym-verifier", "mcaq", (0, 1), higher_is_better=True),
            "no such resources server; did you mean 'mcqa'",
        ),
    ],
)
def test_what_cannot_be_begun_is_told(scaffold: Scaffold, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        create_workload(scaffold)
    assert not [*tmp_path.iterdir()]


def test_a_manifest_that_says_otherwise_is_told_and_can_be_written_from_the_config() -> None:
    workload = made(EXAM)
    change(workload.config_path, "num_repeats: 1", "num_repeats: 3")
    change(workload.config_path, "exam_workload_agent", "exam_player")
    with pytest.raises(
        ConfigError, match=r"agent_server is \"exam_workload_agent\" there and \"exam_player\" in the"
    ) as no:
        validate(workload)
    assert "datasets is" in str(no.value)
    report = validate(workload, sync=True)
    assert report["synchronized_fields"] == ["agent_server", "datasets"]
    assert "# TODO: an SPDX identifier" in workload.manifest_path.read_text()  # whatever else it says stays
    assert validate(workload)["synchronized_fields"] == []


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("environments/exam/data/example.jsonl", '"input"', '"inputs"', r"example\.jsonl, line 1: no run request"),
        (
            "environments/exam/manifest.yaml",
            "name: exam\n",
            "name: other\n",
            "its folder is that of the environment 'exam'",
        ),
        ("environments/exam/manifest.yaml", "kind:", "kinds:", "kinds: Extra inputs are not permitted"),
        ("environments/exam/config.yaml", "name: exam_resources_server", "name: nobody", "nobody"),
        ("environments/exam/manifest.yaml", "version:", "- version:", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_workload_is_told(path: str, old: str, new: str, said: str) -> None:
    workload = made(Scaffold("environment", "exam"))
    change(path, old, new)
    with pytest.raises(ConfigError, match=said):
        validate(workload)


def test_the_verifier_is_tried_and_what_it_says_can_be_written_down(tmp_path: Path) -> None:
    workload = made(EXAM)
    report = run_cases(workload, settings(tmp_path))
    assert list(report) == ["name", "kind", "resources_server", "manifest_path", "fixture_path", "cases"]
    assert [case["observed_rewards"] for case in report["cases"]] == [[1.0], [0.0], [], [1.0, 1.0]]
    change("resources_servers/exam/app.py", "reward=float(is_right)", "reward=0.5 if is_right else 0.0")
    with pytest.raises(ConfigError) as caught:
        run_cases(workload, settings(tmp_path))
    assert "the right answer (full_reward): expected the reward 1.0, got 0.5" in str(caught.value)
    assert "the manifest's end of the range is 1.0, got 0.5" in str(caught.value)
    change(workload.manifest_path, "range: [0, 1]", "range: [0, 0.5]")
    run_cases(workload, settings(tmp_path), update=True)
    written = [json.loads(line) for line in CASES.read_text().splitlines()]
    assert [case.get("expected_reward") for case in written] == [0.5, 0.0, None, 0.5]
    assert written[2]["expected_error"] == "ValidationError"
    assert len(run_cases(workload, settings(tmp_path))["cases"]) == 4


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("resources_servers/exam/app.py", "VERIFIER_FIXTURE", "FIXTURE", "has no VERIFIER_FIXTURE"),
        (str(CASES), '"zero_reward"', '"zero"', "there is no case of the kind zero_reward"),
        (str(CASES), '"kind"', '"kinds"', "line 1: a case is an object with name, kind and request"),
        ("resources_servers/exam/app.py", "import FastAPI", "import FastAPIs", "cannot be imported: ImportError"),
    ],
)
def test_a_fixture_that_cannot_be_used_is_one_message(path: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    workload = made(EXAM)
    change(path, old, new)
    with pytest.raises(ConfigError, match=said):
        run_cases(workload, settings(tmp_path))


def test_a_workload_is_published_when_nothing_is_left_to_say(tmp_path: Path) -> None:
    workload = made(EXAM)
    with pytest.raises(ConfigError, match=r"still has something to be filled in: README\.md, line 3: TODO"):
        publish(workload, settings(tmp_path))
    for path in (workload.manifest_path, workload.manifest_path.with_name("README.md")):
        change(path, "TODO", "")
    with pytest.raises(ConfigError, match="say its licensing"):
        publish(workload, settings(tmp_path))
    change(workload.manifest_path, "licensing: unknown", "licensing: Apache-2.0")
    report = publish(workload, settings(tmp_path))
    assert report == {
        "name": "school/exam",
        "version": "0.1.0",
        "kind": "environment",
        "status": "experimental",
        "manifest_path": str(workload.manifest_path),
        "verifier_cases": 4,
    }


def test_a_workload_is_found_by_name_and_by_manifest() -> None:
    made(Scaffold("environment", "twin"))
    create_workload(
        replace(Scaffold("benchmark", "twin"), reuse_verifier="mcqa", reward_range=(0, 1), higher_is_better=True)
    )
    with pytest.raises(ConfigError, match="both an environment and a benchmark: add --kind"):
        find_workload("twin", None, None)
    assert find_workload("twin", "benchmark", None).kind == "benchmark"
    assert find_workload(None, None, "environments/twin/manifest.yaml").name == "twin"
    with pytest.raises(ConfigError, match=r"no environment 'twn' with a manifest\.yaml\. Did you mean `twin`"):
        find_workload("twn", "environment", None)
    made(EXAM)
    with pytest.raises(ConfigError, match="school/exam is an environment: --kind environment, or no --kind"):
        find_workload("school/exam", "benchmark", None)
    with pytest.raises(ConfigError, match="there is no such file"):
        find_workload(None, None, "manifest.yaml")
