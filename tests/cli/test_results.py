"""The last lines of a run."""

import json
import re
from pathlib import Path

import pytest

from nemo_gym.cli.show import print_resume_hint, print_summary
from nemo_gym.collect.metrics import AgentMetrics
from nemo_gym.collect.stopping import Stop, StopKind
from nemo_gym.collect.summary import RunSummary
from nemo_gym.metrics.intervals import compute_coverage
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.record import Outcome
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


COMMAND = ["/usr/bin/nemo_gym_collect_rollouts", "+note=a b", "+policy_api_key=hush", "++resume_from_cache=true"]


def summary(finished: int = 8, given_up: int = 0, **fields: object) -> RunSummary:
    made = RunSummary(RolloutPaths(Path("out.jsonl")), expected=10, owed=10, given_up=given_up)
    made.counts[Outcome.SUCCESS] = finished
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("given_up", "expected"),
    [
        (0, "2 rollouts are missing. Go on with: {} +resume_from_cache=true and +policy_api_key as before"),
        (
            1,
            "2 rollouts are missing, 1 of them given up. Go on with: {} +resume_from_cache=true and +policy_api_key as "
            "before (+retry_exhausted=true also tries again what was given up)",
        ),
        (
            2,
            "2 rollouts are missing, given up. To try again all the same: {} +resume_from_cache=true "
            "+retry_exhausted=true and +policy_api_key as before",
        ),
    ],
)
def test_the_hint_is_a_command_to_paste_without_secrets(
    given_up: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_resume_hint(summary(given_up=given_up), COMMAND)

    typed = "nemo_gym_collect_rollouts '+note=a b'"
    assert capsys.readouterr().err == expected.format(typed) + "\n"


def test_a_complete_run_needs_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    print_resume_hint(summary(finished=10), COMMAND)

    assert capsys.readouterr().err == ""


def test_a_run_started_from_elsewhere_is_hinted_at_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = Stop(StopKind.INTERRUPTED, "interrupted")
    print_resume_hint(summary(finished=10, stopped=stopped), ["my_script.py"])

    assert capsys.readouterr().err == (
        "The metrics are missing. Go on with: the same command and +resume_from_cache=true\n"
    )


def test_json_holds_no_number_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = AgentMetrics("alpha", AggregateMetrics(key_metrics={"mean/reward": float("nan")}))

    print_summary(summary(metrics=[metrics]), as_json=True)

    printed = json.loads(capsys.readouterr().out)
    assert printed["key_metrics"] == {"alpha": {"mean/reward": None}}
    assert (printed["finished"], printed["missing"], printed["exit_code"]) == (8, 2, 1)


def test_names_from_elsewhere_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "al\x1b[2Jpha"
    metrics = AgentMetrics(hostile, AggregateMetrics(key_metrics={"\x1b[31mred": "\x1b[0m[bold]"}))

    print_summary(summary(metrics=[metrics], metrics_problem="agent \x1b[2J said no"))

    assert "\x1b" not in capsys.readouterr().out


def printed_table(
    capsys: pytest.CaptureFixture[str], rewards: list[list[float]], **key_metrics: float
) -> dict[str, list[str]]:
    """The cells of the printed table by the name in front; a row of the run has an `id` and a `reward`."""
    paths = RolloutPaths(Path("out.jsonl"))
    paths.materialized_inputs.write_text(
        '{"_ng_task_index": 0, "_ng_rollout_index": 0, "id": 7, "reward": 0, "q": "?"}\n'
    )
    scored = [
        {"_ng_task_index": task, "_ng_rollout_index": number, "reward": reward}
        for task, values in enumerate(rewards)
        for number, reward in enumerate(values)
    ]
    coverage = compute_coverage(scored, expected_rollouts=len(scored), expected_tasks=len(rewards))
    mean = coverage["mean_excluding_failures"]
    metrics = AggregateMetrics(key_metrics={"mean/reward": mean, "mean/id": 7.0, "mean/words": 2.5, **key_metrics})
    print_summary(summary(metrics=[AgentMetrics("alpha", metrics, coverage)]))
    cells = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    return {first: rest for first, *rest in cells}


@pytest.mark.usefixtures("in_tmp_path")
def test_the_table_has_one_interval_and_the_chances_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed_table(capsys, [[1.0] * 4] * 5)

    assert table["metric"] == ["value", "95 % interval", "n"]
    assert table["mean/reward"] == ["1", "[0.4782, 1]", "20"]
    assert (table["pass@4"], table["pass@1[avg-of-4]"]) == (["100 %", "5"], ["100 %"])
    assert sum("[0." in " ".join(cells) for cells in table.values()) == 1


@pytest.mark.usefixtures("in_tmp_path")
def test_numbers_that_rows_brought_along_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed_table(capsys, [[1.0], [0.5]])

    assert table["mean/words"] == ["2.5", "2"]
    assert "mean/reward" in table
    assert "mean/id" not in table
    assert not any(name.startswith("pass@") for name in table)


@pytest.mark.usefixtures("in_tmp_path")
def test_percentages_carry_their_sign_and_what_an_environment_chose_is_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = {"pass@2/accuracy": 75.0, "easy/majority@2/accuracy": 50.0, "pass@1[avg-of-2]/a/avg_sample_std_dev": 0.5}

    table = printed_table(capsys, [[1.0, 0.0], [1.0, 1.0]], **chosen)

    assert (table["pass@2/accuracy"], table["easy/majority@2/accuracy"]) == (["75 %"], ["50 %"])
    assert table["pass@1[avg-of-2]/a/avg_sample_std_dev"] == ["0.5"]
    assert "pass@2" not in table


def test_k_is_that_of_the_repeats_asked_for_where_equal_rows_made_longer_tasks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_k = {f"pass@{k}/accuracy": float(k) for k in range(1, 33)}
    averages = {f"pass@1[avg-of-{k}]/accuracy": float(100 - k) for k in range(1, 33)}
    chosen = {"pass@32/accuracy": 32.0, "pass@1[avg-of-32]/accuracy": 68.0, "majority@16/other": 5.0}
    metrics = AggregateMetrics(agent_metrics={**of_k, **averages}, key_metrics=chosen)
    coverage = compute_coverage([], expected_rollouts=0, expected_tasks=0, repeats=8)

    print_summary(summary(metrics=[AgentMetrics("alpha", metrics, coverage)]))

    printed = capsys.readouterr().out
    assert re.search(r"^pass@8/accuracy +8 %", printed, re.MULTILINE)
    assert re.search(r"^pass@1\[avg-of-8\]/accuracy +92 %", printed, re.MULTILINE)
    assert "majority@16/other" in printed  # nobody has computed it for 8
    assert "32" not in printed
