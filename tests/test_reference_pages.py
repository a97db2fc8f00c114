"""Every command of the README and of the pages for looking things up: typed here, or it is said where or why not.

The pages of docs/start and docs/guides are followed as a whole, by `tests/test_guides.py`.
"""

import json
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.compare.test_command import strong, weak, write_run
from tests.guides import Walk
from tests.programs import WAIT_S, Program

PAGES = [PARENT_DIR / "README.md", *sorted((PARENT_DIR / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:ng_|gym |make |python |pip |bash |source |\.venv)")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AGENT = "example_single_tool_call_simple_agent"
EXAMPLES = PARENT_DIR / "resources_servers/example_single_tool_call/data/example.jsonl"

ELSEWHERE = {
    "ng_collect_rollouts +agent_name=a +input_jsonl_fpath=in.jsonl +output_jsonl_fpath=out.jsonl": "heads a picture",
    "ng_collect_rollouts ─/run─▶": "words in a picture",
    "make quickstart": "tests/test_tutorial.py, without the installation",
    "make test": "these tests",
    "pip install": "installs something",
    "ng_e2e_collect_rollouts +benchmark=gsm8k": "downloads rows, asks an endpoint; tests/cli/test_shortcuts.py has a "
    "stand-in for the endpoint, tests/data/benchmarks/test_readmes.py for the download",
    "ng_e2e_collect_rollouts +executor=ray": "wants a cluster; tests/executors/test_ray.py makes one (make test-ray)",
    "bash results/gsm8k_slurm/submit.sh": "tests/cli/commands/test_slurm.py, with a stand-in for sbatch",
    "NEMO_GYM_EXTRA_ROOTS=/path/to/checkout ng_run": "tests/compat/test_foreign_checkout.py, with a checkout",
    "ng_run +auth_token=auto": "tests/cli/launch/test_token.py",
    "ng_control +run": "wants a run that is being collected; tests/collection/test_control.py",
    "ng_collect_rollouts +agent_name=a +input_jsonl_fpath=in.jsonl +output_jsonl_fpath=results/mended.jsonl": "wants "
    "rollouts that failed; tests/collection/test_growing.py",
    "ng_aggregate_rollouts '+input_glob=results/rollouts.jsonl,results/mended.jsonl'": "goes on from there",
    "ng_collect_rollouts +detach=true": "tests/collection/test_control.py",
    "ng_attach": "wants a run that has not ended yet; tests/collection/test_control.py",
    ".venv-ray/bin/python tests/perf/scale_costs.py": "minutes, and wants Ray",
    "python tests/perf/simulate_scale.py": "minutes; tests/executors/test_simulation.py runs a part and reads the page",
    "ng_collect_rollouts +input_jsonl_fpath=hard.jsonl": "wants the servers of those tasks; tests/data/test_curate.py",
    "python docs/examples/tiny_grpo.py": "wants torch; tests/rl/test_tiny_grpo.py (make test-rl)",
    "python docs/examples/async_grpo.py": "wants torch; tests/rl/test_bridges.py (make test-rl)",
    "python docs/examples/trl_grpo.py": "wants torch and TRL; tests/rl/test_bridges.py (make test-rl)",
    "python docs/examples/verl_agent_loop.py": "wants torch; tests/rl/test_bridges.py (make test-rl)",
}
"""Commands, by their beginnings, that are not typed here."""
WALKED_ELSEWHERE = {
    "recording.md": "asks an endpoint that wants a key first; tests/cli/commands/test_recordings.py",
    "first-environment.md": "tests/data/test_first_environment.py",
    "troubleshooting.md": "tests/test_guides.py",
}


def commands_of(page: Path) -> list[str]:
    """The commands on a page, without comments."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    shell = "\n".join(content for language, content in blocks if language in ("", "bash"))
    lines = shell.replace("\\\n", " ").splitlines()
    found = [re.sub(r"\s+#\s.*$", "", line).strip() for line in lines]
    return [re.sub(r" {2,}", " ", line) for line in found if COMMAND.match(line)]


def typed_commands(page: Path) -> list[str]:
    return [line for line in commands_of(page) if not line.startswith(tuple(ELSEWHERE))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Somebody with the files that the pages speak of, and the servers of the README up."""
    folder = tmp_path_factory.mktemp("reader")
    with ExitStack() as up:
        walking = Walk(folder, up)
        walking.write("env.yaml", "policy_api_key: none\n")
        environment = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
        model = "responses_api_models/scripted_model/configs/scripted_model.yaml"
        walking.write("servers.yaml", f"config_paths: [{environment}]\n")
        for name in ("model.yaml", "my_model.yaml"):
            walking.write(name, f"config_paths: [{model}]\n")
        walking.write("my_config.yaml", f"config_paths: [{environment}, {model}]\n")
        walking.write("in.jsonl", EXAMPLES.read_text())
        (folder / "results/new").mkdir(parents=True)
        for name, reward in (("results/base", weak), ("results/new", strong), ("a", weak), ("b", strong)):
            write_run(folder / f"{name}.jsonl", reward)
        write_run(folder / "results/new/part.jsonl", strong)
        yield walking


def typed(reader: Walk, line: str) -> str:
    """What a command prints; names on a page that stand for the reader's own are those of the examples."""
    line = re.sub(r"\+agent_name=a\b", f"+agent_name={AGENT}", line)
    return reader.type(line.replace("~/", f"{reader.folder}/"))


@pytest.mark.parametrize("page", ["README.md", "collecting-rollouts.md", "commands.md", "comparing.md"])
def test_every_command_of_a_page_works(page: str, reader: Walk) -> None:
    lines = typed_commands(next(path for path in PAGES if path.name == page))
    assert len(lines) >= 3
    for line in lines:
        printed = typed(reader, line)
        assert printed or ">>" in line or line.startswith("source"), line
    if page == "collecting-rollouts.md":
        rollouts = (reader.folder / "results/sharded.jsonl").read_text().splitlines()
        assert len(rollouts) == len(EXAMPLES.read_text().splitlines())
        assert (reader.folder / "results/gsm8k_slurm/submit.sh").is_file()


def message(text: str) -> dict[str, Any]:
    said = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [said]}


def write_finished(path: Path, tasks: Iterable[int]) -> None:
    """A run of the servers that are up, in which some rollouts of a task are better than others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_run(path, weak, tasks)
    for each in (path, path.with_name(f"{path.stem}_materialized_inputs.jsonl")):
        records = [json.loads(line) for line in each.read_text().splitlines()]
        for record in records:
            record["agent_ref"] = {"name": AGENT}
            if "response" in record:
                record["response"]["output"] = [message(f"answer {record['reward']}")]
        each.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_commands_of_pages_about_finished_runs_work(reader: Walk, tmp_path: Path) -> None:
    walking = reader.beside(tmp_path)
    for shard in (1, 2):
        write_finished(tmp_path / f"shards/rollouts-{shard}.jsonl", range(shard - 1, 20, 2))
        write_finished(tmp_path / f"results/shards/rollouts-{shard}.jsonl", range(shard - 1, 20, 2))
    write_finished(tmp_path / "results/rollouts.jsonl", range(6))
    rows = [path.read_text() for path in sorted((tmp_path / "shards").glob("*_materialized_inputs.jsonl"))]
    walking.write("rollouts_materialized_inputs.jsonl", "".join(rows))
    pages = [PARENT_DIR / "docs" / name for name in ("metrics.md", "training.md")]
    lines = [line for page in pages for line in typed_commands(page)]
    assert len(lines) >= 4
    for line in lines:
        assert typed(walking, line), line
    assert (tmp_path / "rollouts_reward_profile.html").is_file()
    assert (tmp_path / "sft.jsonl").read_text()
    assert (tmp_path / "dpo.parquet").stat().st_size


def test_the_viewer_is_started_as_its_page_says(reader: Walk) -> None:
    lines = typed_commands(PARENT_DIR / "docs" / "viewing.md")
    assert len(lines) >= 4
    write_run(reader.folder / "results/rollouts.jsonl", weak, range(5))
    for line in lines:
        if "+export" in line or "+json" in line:
            assert typed(reader, line), line
            continue
        words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
        program = Program(*words, "+open=false", folder=reader.folder)
        try:
            deadline_s = time.monotonic() + WAIT_S
            while "http://127.0.0.1:" not in program.stdout:
                assert program.is_running, program.stderr
                assert time.monotonic() < deadline_s, program.stderr
                time.sleep(0.05)
            program.send(signal.SIGINT)
            assert program.wait() in (0, 130), program.stderr
        finally:
            program.stop()
    assert (reader.folder / "report.html").is_file()


def test_stored_rollouts_are_scored_again_checked_and_chosen_as_the_page_says(tmp_path: Path) -> None:
    made = (PARENT_DIR / "resources_servers/mcqa/data/example_rollouts.jsonl").read_text().splitlines()
    twice = [{**json.loads(line), "_ng_rollout_index": repeat, "reward": repeat} for line in made for repeat in (0, 1)]
    rows = [{key: value for key, value in record.items() if key not in ("response", "reward")} for record in twice]
    with ExitStack() as up:
        walking = Walk(tmp_path, up)
        for name in ("old", "rollouts", "shards/one"):
            path = tmp_path / f"results/{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in twice))
            path.with_name(f"{path.stem}_materialized_inputs.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
        lines = typed_commands(PARENT_DIR / "docs" / "scoring-again.md")
        assert len(lines) >= 5
        printed = {line: walking.type(line) for line in lines}
    assert "Verdicts: 5 better, 0 worse, 5 as before" in printed[lines[0]]
    checked = [said for line, said in printed.items() if line.startswith("ng_check_rollouts")]
    assert "judge_disagreement" in checked[0]  # equal answers, of which one was right and the other wrong
    assert "Nothing odd in 5 rollouts" in checked[1]
    assert len((tmp_path / "hard.jsonl").read_text().splitlines()) == len(made)


def test_no_command_is_forgotten() -> None:
    here = {
        "README.md",
        "collecting-rollouts.md",
        "commands.md",
        "comparing.md",
        "metrics.md",
        "scoring-again.md",
        "training.md",
        "viewing.md",
    }
    pages = {page.name: typed_commands(page) for page in PAGES}
    assert {name for name, lines in pages.items() if lines} - here == set(WALKED_ELSEWHERE)
    every = [line for page in PAGES for line in commands_of(page)]
    assert [known for known in ELSEWHERE if not any(line.startswith(known) for line in every)] == []
    named = re.findall(r"tests/[\w/]+\.py", " ".join([*ELSEWHERE.values(), *WALKED_ELSEWHERE.values()]))
    assert [name for name in named if not (PARENT_DIR / name).is_file()] == []
