"""Answers against schemas: what fits, what does not, which schemas are refused, and whole rollouts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from nemo_gym.testing import MALFORMED, check_examples, play
from resources_servers.structured_outputs.app import (
    StructuredOutputsResourcesServer,
    StructuredOutputsResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "structured_outputs_json.yaml"
RIGHT = FOLDER / "scripts" / "right_answers.yaml"
ROWS = check_examples(FOLDER)
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "integer", "minimum": 0}}}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}},
}


def client_of(**settings: Any) -> TestClient:
    block = {"name": "shapes", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", **settings}
    config = StructuredOutputsResourcesServerConfig(**block)
    server = StructuredOutputsResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    return TestClient(server.complete_app())


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(pattern_timeout_s=1) as client:
        yield client


def ask(client: TestClient, schema: Any, text: str) -> Any:
    said = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [said]}
    response = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [message]}
    written = schema if isinstance(schema, str) else json.dumps(schema)
    row = {"responses_create_params": {"input": "go"}, "schema_str": written, "response": response}
    return client.post("/verify", json=row)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (POINT, ['{"x": 1.5, "y": 2}', ' {"y": 2.0, "x": 1}\n'], ['{"x": 1}', '{"x": 1, "y": 2, "z": 3}', "[]"]),
        (POINT, [], ['{"x": "1", "y": 2}', '{"x": 1, "y": -1}', '{"x": true, "y": 1}', '{"x": 1, "y": 1.5}']),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "{}"]),
        ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["true", '"b"']),
        ({"const": False}, ["false"], ["0"]),
        ({"uniqueItems": True, "minItems": 2, "maxItems": 3}, ["[1, 2]"], ["[1]", "[1, 1]", "[1, 2, 3, 4]"]),
        ({"multipleOf": 0.5, "exclusiveMaximum": 2}, ["1.5", '"text"'], ["1.2", "2"]),
        ({"multipleOf": 3}, ["9", "9" * 1000], ["10"]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["1.5"], ["1"]),
        ({"allOf": [{"minLength": 2}, {"maxLength": 3}]}, ['"ab"'], ['"a"', '"abcd"']),
        ({"not": {"type": "string"}}, ["1"], ['"a"']),
        ({"type": "string", "pattern": "^[a-z]+$"}, ['"abc"'], ['"ABC"']),
        ({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "integer"}]}, ['"ab"', "1"], ['"b"']),
        ({"anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, ['"ab"', '"b"'], ['"c"']),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, ['"a"', '"b"'], ['"ab"', '"c"']),
        ({"not": {"pattern": "^a"}}, ['"b"'], ['"a"']),
        ({"not": {"not": {"pattern": "^a"}}}, ['"a"'], ['"b"']),
        ({"enum": [[1, {"a": 0}]]}, ["[1, {\"a\": 0.0}]"], ["[true, {\"a\": 0}]", "[1, {\"a\": false}]", "[1]"]),
        ({"uniqueItems": True}, ["[1, true, \"1\", [1], [[1]]]"], ["[1, 1.0]", "[{\"a\": 0}, {\"a\": -0.0}]"]),
        ({"type": "array", "items": {"type": "integer"}}, [f"[{'1,' * 300_000}1]"], [f"[{'1,' * 300_000}1.5]"]),
        (TREE, ["1", "[1, [2, [3]]]"], ['["a"]', "[" * 200 + "]" * 200]),
        ({"additionalProperties": {"type": "integer"}, "maxProperties": 2}, ['{"a": 1}'], ['{"a": "b"}']),
        (False, [], ["1"]),
        ({}, ["1"], ["", "Here it is: 1", "```json\n1\n```", "NaN", "[1,]", "1 2", "[" * 100_000]),
    ],
)  # fmt: skip
def test_answers_are_right_when_they_fit(client: TestClient, schema: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        verdict = ask(client, schema, text).json()
        assert (verdict["reward"], verdict["problem"]) == (1.0, None), text[:50]
    for text in wrong:
        verdict = ask(client, schema, text).json()
        assert verdict["reward"] == 0.0, text[:50]
        assert verdict["problem"]


def test_schemas_are_taken_as_they_are_unless_strict() -> None:
    with client_of(strict=False) as client:
        assert ask(client, POINT, '{"z": 3}').json()["reward"] == 1.0
        assert ask(client, {**POINT, "required": ["x"]}, "{}").json()["problem"] == "$.x is missing"
        closed = {**POINT, "additionalProperties": False}
        assert ask(client, closed, '{"z": 3}').json()["problem"] == "$.z must not be there"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "schema_str cannot be used"),
        ([], "# must be an object"),
        (
            {"properties": {"a": {"dependentSchemas": {}}}},
            "#/properties/a uses dependentSchemas, which cannot be checked",
        ),
        ({"type": "text"}, "there is no type 'text'"),
        ({"type": [{}]}, "there is no type"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"$ref": "https://elsewhere.example/schema"}, "leads out of the schema"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"minimum": "1"}, "minimum must be a number"),
        ({"multipleOf": 0}, "multipleOf must be a number"),
        ({"properties": []}, "properties must be an object"),
        ({"anyOf": {}}, "anyOf must be a list"),
        ({"required": "a"}, "required must be a list"),
    ],
)
def test_schemas_that_cannot_be_checked_are_refused_and_never_scored(
    client: TestClient, schema: Any, words: str
) -> None:
    answer = ask(client, schema, "1")
    assert answer.status_code == 422
    assert words in answer.text


def test_nothing_takes_for_ever(client: TestClient) -> None:
    slow = {"type": "string", "pattern": "^(a+)+$"}
    assert ask(client, slow, json.dumps("a" * 40 + "b")).json()["reward"] == 0.0
    both = {"type": "array", "items": {"$ref": "#"}}
    doubling = {"anyOf": [both, both, {"type": "integer"}]}
    assert ask(client, doubling, "[" * 50 + '"x"' + "]" * 50).json()["reward"] == 0.0
    assert ask(client, {"$ref": "#"}, "1").json()["problem"] == "$ is nested too deep"
    many = json.dumps(list(range(30_000)))
    assert ask(client, {"type": "array", "uniqueItems": True}, many).json()["reward"] == 1.0


@pytest.mark.parametrize("habit", MALFORMED)
def test_a_model_that_does_not_play_along_scores_zero_or_fails(habit: str) -> None:
    (result,) = play(CONFIG, ROWS[:1], script=MALFORMED[habit])

    assert result.get("reward") == 0.0 or result["_ng_failure_class"] == "agent_error"


def test_whole_rollouts_are_right_and_wrong() -> None:
    assert [result["reward"] for result in play(CONFIG, ROWS, script=str(RIGHT))] == [1.0] * 5
    wrong = play(CONFIG, ROWS, script={"rules": [{"reply": {"text": '{"name": "Anna"}'}}]})
    assert [result["reward"] for result in wrong] == [0.0] * 5


def test_an_answer_of_any_depth_is_scored(client: TestClient) -> None:
    schema = {"type": "array", "uniqueItems": True}

    verdicts = [ask(client, schema, "[" * depth + "]" * depth) for depth in range(850, 1001)]

    assert {verdict.status_code for verdict in verdicts} == {200}
    assert verdicts[0].json()["reward"] == 1.0
    assert verdicts[-1].json()["reward"] == 0.0


def test_half_of_a_surrogate_pair_in_a_name_is_scored(client: TestClient) -> None:
    verdict = ask(client, {"type": "object", "additionalProperties": False}, '{"\\ud800": 1}')

    assert (verdict.status_code, verdict.json()["reward"]) == (200, 0.0)
    assert verdict.json()["problem"] == "$.\ufffd must not be there"
