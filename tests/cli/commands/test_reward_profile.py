import json
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.reward_profile import RewardProfileConfig

main = command_named("reward_profile")


GOLDEN = Path(__file__).parents[2] / "metrics" / "golden"
FILES = ("+materialized_inputs_jsonl_fpath=rows.jsonl", "+rollouts_jsonl_fpath=rollouts.jsonl")

Run = Callable[..., str]


@pytest.fixture
def profile(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on the golden data, or on what a test put in its place; what it prints."""
    shutil.copy(GOLDEN / "rows.jsonl", "rows.jsonl")
    shutil.copy(GOLDEN / "results.jsonl", "rollouts.jsonl")

    def run(*arguments: str, code: int = 0) -> str:
        if not code:
            main.run([*FILES, *arguments])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main.run([*FILES, *arguments])
        assert ended.value.code == code
        return capsys.readouterr().err

    return run


def write(path: str, *records: dict[str, Any]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_files_match_the_golden_data_byte_for_byte(profile: Run) -> None:
    printed = profile("++allow_partial_rollouts=True")

    for name in ("rollouts_reward_profiling.jsonl", "rollouts_agent_metrics.json"):
        assert Path(name).read_bytes() == (GOLDEN / name).read_bytes()
    assert printed == (
        "Rollouts: 3 of 6 (50.00 %)\n"
        "Input rows: 3, of them 1 complete, 1 partial, 1 dropped\n"
        "Profile of each task: rollouts_reward_profiling.jsonl\n"
        "Metrics of each agent: rollouts_agent_metrics.json\n"
        "Page: rollouts_reward_profile.html\n"
    )


def test_programs_get_one_line_of_json(profile: Run) -> None:
    told = json.loads(profile("+allow_partial_rollouts=true", "+json=true", "+select=mean == 1"))

    summary = json.loads((GOLDEN / "completion_summary.json").read_text())
    assert summary.items() <= told.items()
    assert told["reward_profile_html_fpath"] == "rollouts_reward_profile.html"
    assert (told["selected_tasks"], told["selected_jsonl_fpath"]) == (1, "rollouts_selected.jsonl")
    assert [agent["agent_ref"]["name"] for agent in told["agent_metrics"]] == ["alpha", "beta"]


def test_missing_rollouts_are_an_error_that_names_them_and_the_flag(profile: Run) -> None:
    errors = profile(code=2)

    assert "3 materialized input rows have no result" in errors
    assert "[(1, 1), (2, 0), (2, 1)]" in errors
    assert "++allow_partial_rollouts=True" in errors
    assert not Path("rollouts_reward_profile.html").exists()


def test_results_that_nobody_asked_for_are_an_error_even_with_the_flag(profile: Run) -> None:
    write("rows.jsonl", {"_ng_task_index": 0, "_ng_rollout_index": 0})
    write("rollouts.jsonl", {"_ng_task_index": 1, "_ng_rollout_index": 0})

    errors = profile("++allow_partial_rollouts=True", code=2)

    assert "no matching materialized input" in errors
    assert "[(1, 0)]" in errors


@pytest.mark.parametrize(
    ("file", "kind", "key"), [("rows.jsonl", "materialized input", "(0, 0)"), ("rollouts.jsonl", "result", "(1, 0)")]
)
def test_repeated_keys_are_an_error(profile: Run, file: str, kind: str, key: str) -> None:
    first = Path(file).read_text().splitlines()[0]
    with Path(file).open("a") as opened:
        opened.write(first + "\n")

    assert f"Duplicate {kind} row with key {key}" in profile("++allow_partial_rollouts=True", code=2)


def test_a_record_without_indices_is_an_error_that_says_so(profile: Run) -> None:
    write("rollouts.jsonl", {"reward": 1.0})

    assert "_ng_task_index=None" in profile("++allow_partial_rollouts=True", code=2)


@pytest.mark.parametrize("option", ["materialized_inputs_jsonl_fpath", "rollouts_jsonl_fpath"])
def test_a_file_that_does_not_exist_is_named_with_its_option(profile: Run, option: str) -> None:
    assert f"+{option}=gone.jsonl does not exist" in profile(f"+{option}=gone.jsonl", code=2)


@pytest.mark.parametrize(("line", "problem"), [("nonsense", "not valid JSON"), ("5", "expected a JSON object")])
def test_a_malformed_line_is_named(profile: Run, line: str, problem: str) -> None:
    with Path("rollouts.jsonl").open("a") as file:
        file.write(line + "\n")

    assert f"rollouts.jsonl, line 4: {problem}" in profile("++allow_partial_rollouts=True", code=2)


def test_a_torn_last_line_is_left_out(profile: Run) -> None:
    with Path("rollouts.jsonl").open("a") as file:
        file.write('{"_ng_task_index": 2')

    assert "Rollouts: 3 of 6" in profile("++allow_partial_rollouts=True")
    assert (
        Path("rollouts_reward_profiling.jsonl").read_bytes()
        == (GOLDEN / "rollouts_reward_profiling.jsonl").read_bytes()
    )


def test_the_sample_of_a_task_is_the_row_of_its_first_rollout_that_is_there(profile: Run) -> None:
    rows = [{"_ng_task_index": 0, "_ng_rollout_index": n, "agent_ref": {"name": "a"}, "seed": n} for n in range(4)]
    write("rows.jsonl", *rows)
    write("rollouts.jsonl", *({"_ng_task_index": 0, "_ng_rollout_index": n, "reward": 1} for n in (3, 2)))

    profile("++allow_partial_rollouts=True")

    assert read("rollouts_reward_profiling.jsonl")[0]["sample"] == {"agent_ref": {"name": "a"}, "seed": 2}


def test_selected_tasks_come_out_as_input_rows_that_can_be_rolled_out_again(profile: Run) -> None:
    printed = profile("++allow_partial_rollouts=True", "+select=0 < mean < 1 and mean/total_tokens < 20")

    assert "Selected: 1 tasks, in rollouts_selected.jsonl" in printed
    assert read("rollouts_selected.jsonl") == [
        {"agent_ref": {"name": "alpha"}, "responses_create_params": {"input": "q0"}, "level": 0, "_ng_task_index": 0}
    ]


def test_the_selection_goes_where_it_is_told(profile: Run) -> None:
    profile("++allow_partial_rollouts=True", "+select=num_rollouts >= 1", "+select_output_jsonl_fpath=deep/er/x.jsonl")

    assert [row["_ng_task_index"] for row in read("deep/er/x.jsonl")] == [0, 1]
    assert not Path("rollouts_selected.jsonl").exists()


def test_a_selection_that_makes_no_sense_writes_nothing(profile: Run) -> None:
    errors = profile("++allow_partial_rollouts=True", "+select=0 < mena < 1", code=2)

    assert "+select, position 5: there is no 'mena' (did you mean 'mean'?)" in errors
    assert sorted(path.name for path in Path().iterdir()) == ["rollouts.jsonl", "rows.jsonl"]


def test_failures_beside_the_rollouts_are_shown_by_class(profile: Run) -> None:
    failed = [{"_ng_task_index": 2, "_ng_rollout_index": 0, "_ng_failure_class": name} for name in ("x<y", "x<y", None)]
    write("rollouts_failures.jsonl", *failed, {"no": "key"})
    with Path("rollouts_failures.jsonl").open("a") as file:
        file.write("damaged\n[]\n")

    profile("++allow_partial_rollouts=True")

    page = Path("rollouts_reward_profile.html").read_text()
    assert "Failures by class" in page
    assert "x&lt;y: 2 of 1 rollouts" in page
    assert "(none): 2 of 1 rollouts" in page


def test_no_results_at_all_make_an_empty_profile(profile: Run) -> None:
    Path("rollouts.jsonl").write_text("")

    assert "Rollouts: 0 of 6 (0.00 %)" in profile("++allow_partial_rollouts=True")
    assert Path("rollouts_reward_profiling.jsonl").read_bytes() == b""
    assert Path("rollouts_agent_metrics.json").read_bytes() == b"[]"


def test_the_public_module_offers_the_arguments() -> None:
    config = RewardProfileConfig(materialized_inputs_jsonl_fpath="a", rollouts_jsonl_fpath="b")

    assert (config.allow_partial_rollouts, config.select) == (False, None)


LINK = re.compile(r'<a href="([^"]*)">task (\d+)</a>')


def test_tasks_lead_to_their_rollouts_on_a_page_that_is_written_for_them(profile: Run) -> None:
    printed = profile("++allow_partial_rollouts=True", "+rollouts_page=pages/its rollouts.html")

    assert "Rollouts of its tasks: pages/its rollouts.html\n" in printed
    links = LINK.findall(Path("rollouts_reward_profile.html").read_text())
    tasks = [record["_ng_task_index"] for record in read("rollouts_reward_profiling.jsonl")]
    assert sorted(int(task) for _, task in links) == sorted(tasks)
    page = Path("pages/its rollouts.html").read_text()
    data = json.loads(re.findall(r'id="export-data">(.*?)</script>', page)[0])
    (run,) = data["run"]
    for link, task in links:
        file, _, place = unescape(link).partition("#")
        assert unquote(file) == "pages/its rollouts.html"
        assert place == f"/runs/{run}?where=task%20%3D%3D%20{task}"
        rows = [row for row in data["rollouts"][run]["rows"] if row["task"] == int(task)]
        assert len(rows) == sum(record["_ng_task_index"] == int(task) for record in read("rollouts.jsonl"))


def test_tasks_lead_to_a_viewer_that_runs_without_giving_its_token_away(profile: Run) -> None:
    profile("++allow_partial_rollouts=True", "'+rollouts_page=http://127.0.0.1:8123/?token=secret#/runs'".strip("'"))

    page = Path("rollouts_reward_profile.html").read_text()
    assert all(link.startswith("http://127.0.0.1:8123/#/runs/") for link, _ in LINK.findall(page))
    assert LINK.findall(page)
    assert "secret" not in page


def test_tasks_lead_nowhere_unless_somebody_says_where(profile: Run) -> None:
    profile("++allow_partial_rollouts=True")

    page = Path("rollouts_reward_profile.html").read_text()
    assert "<td>task 0</td>" in page
    assert "<a " not in page


@pytest.mark.parametrize("target", ["rollouts.jsonl", "rollouts_reward_profile.html", "rows.jsonl/page.html"])
def test_a_page_of_rollouts_replaces_nothing_else(profile: Run, target: str) -> None:
    before = Path("rollouts.jsonl").read_bytes()
    errors = profile("++allow_partial_rollouts=True", f"+rollouts_page={target}", code=2)

    assert len(errors.splitlines()) == 1
    assert Path("rollouts.jsonl").read_bytes() == before
    assert not Path("rollouts_reward_profile.html").exists()
