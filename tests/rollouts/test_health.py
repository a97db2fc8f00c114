"""Every check finds what it is for, and nothing else; the bundled environments' rollouts are all sound."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.collect.health import Check, HealthCounts, HealthScan, ends_in_loop
from nemo_gym.paths import PARENT_DIR

main = command_named("check_rollouts")


Record = dict[str, Any]
TOOLS = [{"type": "function", "name": "look", "parameters": {}}]
LOOP = "and then we look at the next case, " * 9
LONG = "The answer follows from the three facts that are given in the question."


def message(text: str) -> Record:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(arguments: Any = '{"at": 1}', name: str = "look") -> Record:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": "c"}


def told(output: str = "nothing") -> Record:
    return {"type": "function_call_output", "call_id": "c", "output": output}


def record(*output: Record, task: int = 0, repeat: int = 0, reward: Any = 1.0, **more: Any) -> Record:
    params = {"input": f"task {task}", **more.pop("params", {})}
    response = {"output": list(output), **more.pop("response", {})}
    keys = {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": "alpha"}}
    return {"responses_create_params": params, "response": response, "reward": reward, **keys, **more}


def scanned(folder: Path, records: Sequence[Record], **options: Any) -> dict[Check, int]:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    scan = HealthScan(**options)
    scan.read(path)
    return {finding.check: finding.count for finding in scan.findings() if finding.count}


def hot(text: str, *, task: int = 0, repeat: int = 0, temperature: float | None = 1.0, reward: float = 1.0) -> Record:
    return record(message(text), task=task, repeat=repeat, params={"temperature": temperature}, reward=reward)


REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "As an AI language model, I am unable to provide that.",
    "Sorry, I won\u2019t write such a text.",
)
ODD: list[tuple[Check, list[Record]]] = [
    (Check.EMPTY, [record()]),
    (Check.EMPTY, [record(message(" \n"))]),
    (Check.EMPTY, [record({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]})]),
    (Check.TRUNCATED, [record(message("and so"), response={"incomplete_details": {"reason": "max_output_tokens"}})]),
    (Check.NO_TOOLS, [record(message("It is cold."), params={"tools": TOOLS})]),
    (Check.LOOP, [record(call(), told(), call(), told(), call(), told(), message("so"), params={"tools": TOOLS})]),
    (Check.REPEATED_TEXT, [record(message("First, " + LOOP))]),
    (Check.REPEATED_TEXT, [record(message(LOOP + "and then we lo"))]),
    (Check.REPEATED_TEXT, [record({"type": "reasoning", "content": [{"text": LOOP}]}, message("four"))]),
    (Check.REPEATED_TEXT, [record(*[message(LONG)] * 3)]),
    (Check.BAD_ARGUMENTS, [record(call('{"at": '), told(), message("so"))]),
    (Check.BAD_ARGUMENTS, [record(call("[1, 2]"), told(), message("so"))]),
    *((Check.REFUSAL, [record(message(text))]) for text in REFUSALS),
    (
        Check.REFUSAL,
        [record({"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})],
    ),
    (Check.OUT_OF_RANGE, [record(message("four"), reward=1.5)]),
    (Check.OUT_OF_RANGE, [record(message("four"), reward="high")]),
    (Check.IDENTICAL, [hot(LONG, repeat=repeat) for repeat in range(3)]),
    (Check.DISAGREEMENT, [record(message("a"), judge_evaluations=[{"verdict_label": "="}, {"verdict_label": "!="}])]),
    (Check.DISAGREEMENT, [hot("four", repeat=0, reward=1.0), hot("four", repeat=1, reward=0.0)]),
    (Check.CONSTANT, [record(message(f"it is {n}"), task=n // 2, repeat=n % 2, reward=0.0) for n in range(20)]),
]
SOUND: list[tuple[Check, list[Record]]] = [
    (Check.EMPTY, [record(call(), told(), params={"tools": TOOLS})]),
    (Check.EMPTY, [record(message("B"))]),
    (Check.TRUNCATED, [record(message("and so"), response={"incomplete_details": {"reason": "content_filter"}})]),
    (Check.TRUNCATED, [record(message("all of it"), response={"incomplete_details": None})]),
    (Check.NO_TOOLS, [record(message("It is cold."), params={"tools": TOOLS, "tool_choice": "none"})]),
    (Check.NO_TOOLS, [record(message("It is cold."), params={"tools": []})]),
    (Check.LOOP, [record(call(), told(), call(), told(), call('{"at": 2}'), told(), call(), told(), message("so"))]),
    (Check.REPEATED_TEXT, [record(message("| a | b |\n|---|---|\n" + "-" * 300))]),
    (Check.REPEATED_TEXT, [record(message("\n".join(f"case {n}: we look at the case number {n}" for n in range(60))))]),
    (Check.REPEATED_TEXT, [record(message("ha ha ha ha"))]),
    (Check.REPEATED_TEXT, [record(message(f"First. {f'{LONG} ' * 3}"))]),
    (Check.BAD_ARGUMENTS, [record(call(""), told(), call("{}"), told(), message("so"))]),
    (Check.REFUSAL, [record(message("I can't find an error in the proof, so the claim holds."))]),
    (Check.REFUSAL, [record(message("Sorry, I made a mistake above: it is 4."))]),
    (Check.REFUSAL, [record(message('He said: "I cannot help with that." That was the last line.'))]),
    (Check.OUT_OF_RANGE, [record(message("four"), reward=0.0), record(message("five"), task=1, reward=True)]),
    (Check.OUT_OF_RANGE, [record(message("four"), reward=None)]),
    (Check.IDENTICAL, [hot(LONG, repeat=0), hot(LONG + " So four.", repeat=1)]),
    (Check.IDENTICAL, [hot(LONG, repeat=repeat, temperature=0.0) for repeat in range(3)]),
    (Check.IDENTICAL, [hot(LONG, repeat=repeat, temperature=repeat) for repeat in range(2)]),
    (Check.IDENTICAL, [hot("B", repeat=repeat) for repeat in range(3)]),
    (Check.IDENTICAL, [hot(LONG, task=task) for task in range(3)]),
    (Check.DISAGREEMENT, [record(message("a"), judge_evaluations=[{"verdict_label": "="}, {"verdict_label": "="}])]),
    (Check.DISAGREEMENT, [record(message("a"), judge_evaluations=[{"verdict_label": "="}, {"verdict_label": None}])]),
    (Check.DISAGREEMENT, [hot("four", repeat=0, reward=1.0), hot("five", repeat=1, reward=0.0)]),
    (Check.DISAGREEMENT, [hot("four", task=0, reward=1.0), hot("four", task=1, reward=0.0)]),
    (Check.CONSTANT, [record(message(f"it is {n}"), task=n // 2, repeat=n % 2, reward=n % 3 / 2) for n in range(20)]),
    (Check.CONSTANT, [record(message(f"it is {n}"), task=n, reward=0.0) for n in range(19)]),
    (Check.CONSTANT, [record(message(f"it is {n}"), task=n, reward=0.0) for n in range(9)]),
    (Check.CONSTANT, [record(message(f"it is {n}"), repeat=n, reward=0.0) for n in range(64)]),
]


@pytest.mark.parametrize(("check", "records"), ODD)
def test_what_is_odd_is_found_and_nothing_else(tmp_path: Path, check: Check, records: list[Record]) -> None:
    assert set(scanned(tmp_path, records)) == {check}


@pytest.mark.parametrize(("check", "records"), SOUND)
def test_what_is_sound_is_left_alone(tmp_path: Path, check: Check, records: list[Record]) -> None:
    assert scanned(tmp_path, records) == {}


def test_every_check_is_tried_both_ways() -> None:
    assert {check for check, _ in ODD} == {check for check, _ in SOUND} == set(Check)


def test_rewards_of_another_range_are_no_alarm(tmp_path: Path) -> None:
    records = [record(message("four"), reward=-1.0), record(message("five"), task=1, reward=7)]
    assert scanned(tmp_path, records)[Check.OUT_OF_RANGE] == 2
    assert scanned(tmp_path, records, reward_range=(-1.0, 10.0)) == {}
    assert scanned(tmp_path, records, reward_range=None) == {}


@pytest.mark.parametrize(
    "odd", [None, [], {"output": None}, {"output": [None, 3, {"type": "message"}]}, {"output": "x"}]
)
def test_records_of_any_form_are_survived(odd: object) -> None:
    counts = HealthCounts()
    counts.add({"response": odd, "responses_create_params": 3, "reward": 0.5})
    assert counts.rollouts == 1


def test_a_loop_is_found_in_time_that_grows_with_nothing() -> None:
    assert not ends_in_loop("ab" * 50 + "c" * 1_000_000)
    assert ends_in_loop("x" * 1_000_000 + LOOP * 20)


def test_what_shards_found_adds_up() -> None:
    parts = [HealthCounts(), HealthCounts()]
    parts[0].add(record(message("four"), reward=1.5))
    parts[0].add(record(message("four")))
    parts[1].add(record(reward=2))
    whole = HealthCounts()
    for part in parts:
        whole.add_told(part.as_json(), part.rollouts)
    assert whole.line() == "2 of 3 rollouts look odd (2 reward_out_of_range, 1 empty_answer)"
    assert HealthCounts().as_json() == {}
    assert HealthCounts().line() == ""


def test_no_false_alarm_on_the_rollouts_of_the_bundled_environments() -> None:
    paths = sorted(PARENT_DIR.glob("resources_servers/*/data/example_rollouts.jsonl"))
    assert len(paths) >= 10
    scan = HealthScan()
    for path in paths:
        scan.read(path)
    assert scan.counts.rollouts >= 50
    assert {finding.check: finding.count for finding in scan.findings() if finding.count} == {}


class Checked:
    """`ng_check_rollouts` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        self.exit_code = 0
        try:
            main.run(options)
        except SystemExit as ended:
            self.exit_code = int(ended.code or 0)
        self.stdout, self.stderr = capsys.readouterr()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten rollouts of which two are cut off, one of them a refusal."""
    monkeypatch.chdir(tmp_path)
    cut = {"incomplete_details": {"reason": "max_output_tokens"}}
    records = [record(message(f"it is {n}"), task=n, reward=n % 2, level="hard" if n < 5 else "easy") for n in range(8)]
    records += [record(message("so"), task=8, level="easy", response=cut, reward=0)]
    records += [record(message(REFUSALS[0]), task=9, repeat=1, level="hard", response=cut, reward=0)]
    found = tmp_path / "rollouts.jsonl"
    found.write_text("".join(json.dumps(each) + "\n" for each in records))
    return found


def test_the_command_counts_names_examples_and_says_how_to_look(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = Checked(capsys, "+input=rollouts.jsonl")
    assert done.exit_code == 0
    assert "cut off at the token limit" in done.stdout
    assert (
        "refusal: rollouts.jsonl, line 10: ng_view +path=rollouts.jsonl '+where=task == 9 and repeat == 1'"
        in done.stdout
    )
    told = json.loads(Checked(capsys, "+input=[rollouts.jsonl]", "+json=true", "+examples=1").stdout)
    assert told["rollouts"] == 10
    assert told["odd"] == 2
    assert told["checks"]["truncated"] == {
        "count": 2,
        "of": 10,
        "what": "rollouts",
        "examples": [{"file": "rollouts.jsonl", "line": 9, "task": 8, "repeat": 0}],
    }
    assert told["checks"]["empty_answer"]["count"] == 0


def test_where_narrows_and_a_glob_takes_shards(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(Checked(capsys, "+input=*.jsonl", '+where=level == "hard"', "+json=true").stdout)
    assert (told["rollouts"], told["odd"]) == (6, 1)
    nothing = Checked(capsys, "+input=rollouts.jsonl", "+where=reward == 1")
    assert "Nothing odd in 4 rollouts" in nothing.stdout


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("truncated > 2", 0),
        ("truncated.share > 0.1 and refusal > 0", 1),
        ("odd >= 3 or empty_answer > 0", 0),
        ("odd == 2", 1),
    ],
)
def test_the_gate(path: Path, capsys: pytest.CaptureFixture[str], condition: str, code: int) -> None:
    done = Checked(capsys, "+input=rollouts.jsonl", f"+fail_if={condition}")
    assert done.exit_code == code
    assert f"Gate: rollouts: {condition} {'applies' if code else 'does not apply'}" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["+input=gone.jsonl"], "+input=gone.jsonl does not exist"),
        (["+input=rollouts.jsonl", "+fail_if=truncatd > 0"], "did you mean 'truncated'?"),
        (["+input=rollouts.jsonl", "+reward_range=[1,0]"], "write the lowest reward first"),
        (["+input=rollouts.jsonl", "+where=lavel == 1"], "did you mean 'level'?"),
    ],
)
def test_mistakes_are_one_line(path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    done = Checked(capsys, *options)
    assert done.exit_code == 2
    assert said in done.stderr
