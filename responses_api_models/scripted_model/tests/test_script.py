"""A script says what the model says, and its mistakes are reported by key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.config_types import ConfigError
from responses_api_models.scripted_model.brain import Answer, Brain, drawn
from responses_api_models.scripted_model.conversation import Called, Conversation, Entry, Returned, Said, Thought, Tool
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.script import Distribution, load_script
from responses_api_models.scripted_model.tokens import entry_text

ADD = Tool(
    "add",
    "Adds",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a", "b"]},
)


def answer(script: dict[str, Any], *entries: Entry, tools: tuple[Tool, ...] = (), seed: int | None = None) -> Answer:
    brain = Brain(*load_script(script))
    conversation = Conversation(entries, tools=tools, seed=seed)
    return brain.answer(conversation, brain.draws_for(conversation))


def say(script: dict[str, Any], text: str, seed: int | None = None) -> str:
    return "".join(entry_text(entry) for entry in answer(script, Said("user", text), seed=seed).entries)


def test_the_first_rule_that_matches_is_used() -> None:
    script = {
        "rules": [
            {"match": {"last_user_contains": ["cat", "dog"]}, "reply": {"text": "a pet"}},
            {"match": {"last_user_contains": "CAR"}, "reply": {"text": "a machine"}},
            {"reply": {"text": "no idea"}},
        ]
    }

    assert say(script, "my Dog") == "a pet"
    assert say(script, "a car with a cat") == "a pet"
    assert say(script, "racecar") == "a machine"
    assert say(script, "a tree") == "no idea"


def test_groups_of_a_pattern_fill_text_and_arguments() -> None:
    call = {"name": "add", "arguments": {"a": "{x}", "b": "{y}", "note": ["{x} and {y}", {"more": "{x}"}, 1]}}
    rule = {
        "match": {"last_user_regex": r"(?P<x>\d+) plus (?P<y>\d+)"},
        "reply": {"text": "{x}+{y}={z}", "tool_call": call},
    }

    said, called = answer({"rules": [rule]}, Said("user", "what is 3 plus 4"), tools=(ADD,)).entries

    assert said == Said("assistant", "3+4={z}")
    assert isinstance(called, Called)
    assert json.loads(called.arguments) == {"a": 3, "b": 4.0, "note": ["3 and 4", {"more": "3"}, 1]}


def test_arguments_left_out_are_drawn_from_the_conversation_and_text_is_sent_as_it_is() -> None:
    drawn_call, broken_call = answer(
        {"rules": [{"reply": {"tool_calls": [{"name": "add"}, {"name": "add", "arguments": "{oops"}]}}]},
        Said("user", "add 3 and 4.5"),
        tools=(ADD,),
    ).entries

    assert isinstance(drawn_call, Called)
    assert isinstance(broken_call, Called)
    assert json.loads(drawn_call.arguments) == {"a": 3, "b": 4.5}
    assert broken_call.arguments == "{oops"
    assert drawn_call.call_id != broken_call.call_id


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"turn": 2}, True),
        ({"turn": [1, 3]}, False),
        ({"after_tool": "look"}, True),
        ({"after_tool": "*"}, True),
        ({"after_tool": ["listen", "smell"]}, False),
        ({"after_user": True}, False),
        ({"after_user": False}, True),
        ({"tool_output_contains": "green"}, True),
        ({"tool_output_contains": "blue"}, False),
        ({"tool_output_regex": r"sees (?P<what>\w+)"}, True),
        ({"tool_output_regex": "^tree"}, False),
        ({"tool_available": "add"}, True),
        ({"tool_available": ["subtract"]}, False),
        ({"instructions_contain": "brief"}, True),
        ({"instructions_contain": "verbose"}, False),
        ({"conversation_contains": "distance"}, True),
        ({"conversation_contains": "nowhere"}, False),
        ({"last_user_contains": "look", "turn": 2, "after_tool": "look"}, True),
        ({"last_user_contains": "look", "turn": 1}, False),
    ],
)
def test_conditions_look_at_the_whole_conversation(condition: dict[str, Any], holds: bool) -> None:
    entries = (
        Said("system", "Be brief."),
        Said("user", "Look around"),
        Thought("Where?"),
        Called("c1", "look", '{"where": "in the distance"}'),
        Returned("c1", "sees a green tree"),
    )
    script = {"rules": [{"match": condition, "reply": {"text": "matched"}}, {"reply": {"text": "not"}}]}

    (said,) = answer(script, *entries, tools=(ADD,)).entries

    assert said == Said("assistant", "matched" if holds else "not")


def test_a_reply_may_be_thoughts_only_or_nothing() -> None:
    script = {
        "rules": [
            {"match": {"last_user_contains": "think"}, "reply": {"reasoning": "hm"}},
            {"reply": {"incomplete": "content_filter"}},
        ]
    }

    assert answer(script, Said("user", "think")).entries == (Thought("hm"),)
    nothing = answer(script, Said("user", "x"))
    assert (nothing.entries, nothing.incomplete) == ((), "content_filter")


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def test_answers_come_from_the_row_whose_question_was_asked(tmp_path: Path) -> None:
    rows = [
        {"q": {"text": "What is 2+2?"}, "a": [4]},
        {"q": {"text": "What is 2+2? And 3+3?"}, "a": ["4 and 6"]},
        {"q": {"text": "Name a\n  colour."}, "a": ["red"]},
    ]
    script = {
        "answers": {
            "jsonl": write_rows(tmp_path / "rows.jsonl", rows),
            "question_field": "q.text",
            "answer_field": "a.0",
            "template": "It is \\boxed{{answer}}",
        }
    }

    assert say(script, "Be exact. What is  2+2?") == "It is \\boxed{4}"
    assert say(script, "Solve: What is 2+2? And 3+3? Think first") == "It is \\boxed{4 and 6}"
    assert say(script, "Name a colour. Please.") == "It is \\boxed{red}"
    assert "boxed" not in say(script, "Name an animal.")


def test_the_probability_of_being_right_decides_how_many_are(tmp_path: Path) -> None:
    rows = [{"question": f"Question number {n}?", "answer": str(n * 7)} for n in range(200)]
    answers = {
        "jsonl": write_rows(tmp_path / "rows.jsonl", rows),
        "probability_right": 0.7,
        "wrong_template": "Maybe {answer}",
    }

    given = [say({"answers": answers}, row["question"]) for row in rows]

    right = sum(text == row["answer"] for text, row in zip(given, rows, strict=True))
    wrong = [text for text in given if text.startswith("Maybe ")]
    assert right + len(wrong) == 200
    assert 120 < right < 160
    assert all(
        text.removeprefix("Maybe ") != row["answer"] for text, row in zip(given, rows, strict=True) if text in wrong
    )
    other_seed = [say({"answers": answers, "seed": 1}, row["question"]) for row in rows[:50]]
    assert other_seed != given[:50]


def test_a_wrong_answer_is_wrong_even_when_all_rows_agree(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "How many?", "answer": "7"}])

    assert say({"answers": {"jsonl": path, "probability_right": 0.0}}, "How many?") == "8"


def test_a_script_file_finds_its_answers_beside_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"question": "Who?", "answer": "me"}])
    (tmp_path / "script.yaml").write_text("answers: {jsonl: rows.jsonl}\n")
    brain = Brain(*load_script(str(tmp_path / "script.yaml")))
    conversation = Conversation((Said("user", "Who?"),))

    assert brain.answer(conversation, Draws(0, b"")).entries == (Said("assistant", "me"),)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"rule": []}, ["rule: there is no such key", "did you mean `rules`"]),
        (
            {"rules": [{"match": {"last_user_contain": "x"}, "reply": {}}]},
            ["rules[0].match.last_user_contain", "last_user_contains"],
        ),
        ({"rules": [{"reply": {"text": 3}}]}, ["rules[0].reply.text", "string"]),
        (
            {"rules": [{"match": {"last_user_regex": "("}, "reply": {}}]},
            ["last_user_regex", "not a regular expression"],
        ),
        ({"rules": [{"reply": {}, "probability": 2}]}, ["rules[0].probability"]),
        ({"latency_s": {"fixed": 1, "uniform": [0, 1]}}, ["latency_s", "exactly one of fixed, uniform"]),
        ({"latency_s": {"uniform": [2, 1]}}, ["latency_s", "ascending"]),
        ({"faults": [{"kind": "explode"}]}, ["faults[0]", "explode"]),
        ({"faults": [{"kind": "status", "status": 200}]}, ["faults[0].status.status", "400"]),
        ({"faults": [{"kind": "hang", "second": 3}]}, ["did you mean `seconds`"]),
    ],
)
def test_a_mistake_in_a_script_is_reported_by_key(script: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_script(script)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rules: [", "is not YAML"),
        ("- a\n- b\n", "must be a mapping"),
    ],
)
def test_a_broken_file_is_reported_by_name(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)

    with pytest.raises(ConfigError, match=words) as caught:
        load_script(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read"):
        load_script(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"}\n', "answers.answer_field: line 2 of"),
        ("nonsense\n", "line 1 of"),
        ('{"question": " ", "answer": "b"}\n', "is empty in line 1"),
        ("\n", "has no rows"),
    ],
)
def test_a_bad_row_is_reported_by_line(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)

    with pytest.raises(ConfigError, match=words):
        Brain(*load_script({"answers": {"jsonl": str(path)}}))


def test_numbers_follow_their_distribution() -> None:
    def sample(distribution: Distribution) -> list[float]:
        return [drawn(distribution, Draws(seed, b"request"), "latency") for seed in range(2000)]

    uniform = sample(Distribution(uniform=(1.0, 3.0)))
    assert min(uniform) >= 1
    assert max(uniform) <= 3
    assert 1.9 < sum(uniform) / 2000 < 2.1
    exponential = sample(Distribution(exponential=2.0))
    assert 1.8 < sum(exponential) / 2000 < 2.2
    lognormal = sorted(sample(Distribution(lognormal=(0.5, 1.0))))
    assert 0.45 < lognormal[1000] < 0.55
    assert max(sample(Distribution(exponential=2.0, max=1.0))) == 1.0
    assert sample(Distribution(fixed=0.25))[:2] == [0.25, 0.25]


def test_latency_grows_with_the_answer() -> None:
    script = {
        "latency_s": {"fixed": 0.5, "per_output_token": 0.1, "max": 1.5},
        "rules": [{"reply": {"text": "{last_user}"}}],
    }

    short = answer(script, Said("user", "a"))
    assert short.latency_s == pytest.approx(0.5 + 0.1 * short.counts.generation)
    assert answer(script, Said("user", "a b c d e f g h i j k l m")).latency_s == 1.5
    assert answer({}, Said("user", "a")).latency_s == 0


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "scripts").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_shipped_scripts_can_be_loaded(path: Path) -> None:
    brain = Brain(*load_script(str(path)))
    conversation = Conversation((Said("user", "a"),), tools=(), seed=None)
    assert brain.answer(conversation, brain.draws_for(conversation)).counts.generation > 0


def test_the_scripts_in_the_manual_can_be_loaded() -> None:
    manual = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", manual, re.DOTALL)]
    scripts = [
        block for block in blocks if set(block) & {"rules", "answers", "usage", "faults"} and "seed" not in block
    ]

    assert len(scripts) == 4
    for script in scripts:
        load_script(script)
