"""Rows are the same everywhere for the same tasks, number and seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.config_types import ConfigError
from resources_servers.reasoning_gym.rows import HASH_DEPENDENT, NOT_GENERATED, generate_rows, task_names
from resources_servers.reasoning_gym.scripts.create_dataset import main

FOLDER = Path(__file__).parents[1]
SCRIPT = FOLDER / "scripts" / "create_dataset.py"


def start(output: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(output), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **variables})


def test_tasks_take_turns_and_every_row_is_complete() -> None:
    rows = list(generate_rows(["gcd", "syllogism"], 5, seed=3))

    assert [row["metadata"]["source_dataset"] for row in rows] == ["gcd", "syllogism", "gcd", "syllogism", "gcd"]
    assert rows[0]["question"] != rows[2]["question"]
    for row in rows:
        developer, user = row["responses_create_params"]["input"]
        assert "<answer>" in developer["content"]
        assert user == {"role": "user", "content": row["question"]}


def test_the_seed_decides() -> None:
    first, again, other = (list(generate_rows(["chain_sum"], 3, seed=seed)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_a_task_nobody_knows_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'chainsum'; did you mean 'chain_sum'"):
        list(generate_rows(["chainsum"], 1, seed=0))


def test_every_exception_in_our_lists_is_still_a_task_of_the_library() -> None:
    assert set(task_names()) >= HASH_DEPENDENT
    assert not NOT_GENERATED & set(task_names())


def test_rows_that_would_differ_between_processes_are_refused_here_but_made_by_the_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"isomorphic_strings.*PYTHONHASHSEED=0"):
        list(generate_rows(["isomorphic_strings"], 1, seed=0))

    files = [tmp_path / "first.jsonl", tmp_path / "folder" / "second.jsonl"]
    arguments = ("--tasks", "isomorphic_strings, gcd", "--size", "6", "--seed", "5")
    makers = [start(file, *arguments, PYTHONHASHSEED=seed) for file, seed in zip(files, ["random", "7"], strict=True)]

    outputs = [maker.communicate(timeout=120) for maker in makers]

    assert [maker.returncode for maker in makers] == [0, 0], outputs
    assert files[0].read_text() == files[1].read_text()
    assert len(files[0].read_text().splitlines()) == 6


def test_the_committed_examples_are_what_the_readme_says_makes_them(tmp_path: Path) -> None:
    (line,) = [line for line in (FOLDER / "README.md").read_text().splitlines() if "data/example.jsonl --" in line]
    arguments = line.split()
    tasks, size, seed = (arguments[arguments.index(name) + 1] for name in ("--tasks", "--size", "--seed"))

    rows = generate_rows(tasks.split(","), int(size), int(seed))

    committed = (FOLDER / "data" / "example.jsonl").read_text().splitlines()
    assert json.loads(json.dumps(list(rows))) == [json.loads(line) for line in committed]


def test_a_mistake_on_the_command_line_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--tasks", "nothing_like_it", "--size", "1", "--output", str(tmp_path / "rows.jsonl")])

    assert code == 2
    assert "nothing_like_it" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_without_the_library_the_script_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(name='reasoning_gym')\n")
    module = "resources_servers.reasoning_gym.scripts.create_dataset"
    command = [sys.executable, "-m", module, "--tasks", "gcd", "--size", "1", "--output", str(tmp_path / "x.jsonl")]

    root = FOLDER.parents[1]
    path = os.pathsep.join([str(tmp_path), str(root)])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("Error: the library reasoning-gym is not installed")
    assert "pip install 'reasoning-gym>=" in done.stderr
    assert not list(tmp_path.glob("x.jsonl*"))
