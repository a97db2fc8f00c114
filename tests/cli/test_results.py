"""The last lines of a run."""

import json
from pathlib import Path

import pytest

from nemo_gym.cli.results import print_resume_hint, print_summary
from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Outcome
from nemo_gym.rollouts.stop_rules import Stop, StopKind
from nemo_gym.rollouts.summary import RunSummary
from nemo_gym.schemas.metrics import AggregateMetrics

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
        (0, "2 rollouts are missing. Go on with: {} +resume_from_cache=true"),
        (
            1,
            "2 rollouts are missing, 1 of them given up. Go on with: {} +resume_from_cache=true "
            "(+retry_exhausted=true also tries again what was given up)",
        ),
        (
            2,
            "2 rollouts are missing, given up. To try again all the same: {} +resume_from_cache=true "
            "+retry_exhausted=true",
        ),
    ],
)
def test_the_hint_is_a_command_to_paste_without_secrets(
    given_up: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_resume_hint(summary(given_up=given_up), COMMAND)

    typed = "nemo_gym_collect_rollouts '+note=a b' '+policy_api_key=****'"
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
