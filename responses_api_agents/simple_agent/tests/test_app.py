"""How a conversation goes: what is sent to whom, with which cookies, and when it ends."""

import json
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

import pytest
from fastapi.testclient import TestClient

from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseReasoningItem,
    NeMoGymSummary,
)
from nemo_gym.server_utils import ServerClient
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_agents.simple_agent.cookies import merged

CITY_CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {}}]
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def model_answer(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "created_at": 1.0, "model": "m", "object": "response", "output": list(output), **fields}


def usage(total: int, **details: Any) -> dict[str, Any]:
    return {"input_tokens": total - 1, "output_tokens": 1, "total_tokens": total, **details}


def answer(body: Any, *, ok: bool = True, status: int = 200, cookies: Any = None) -> MagicMock:
    """What a server answered, as far as an agent looks at it."""
    text = body if isinstance(body, str) else json.dumps(body)
    response = MagicMock(ok=ok, status=status, cookies=cookies or {}, headers={}, url="http://server", method="POST")
    response.read = response.content.read = AsyncMock(return_value=text.encode())
    return response


def make_agent(*answers: MagicMock, agent_class: type[SimpleAgent] = SimpleAgent, **settings: Any) -> SimpleAgent:
    """An agent whose calls to other servers get these answers, in order."""
    config = SimpleAgentConfig(
        name="agent",
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        resources_server=ResourcesServerRef(type="resources_servers", name="environment"),
        model_server=ModelServerRef(type="responses_api_models", name="model"),
        **settings,
    )
    agent = agent_class(config=config, server_client=MagicMock(spec=ServerClient))
    agent.server_client.post.side_effect = list(answers)  # type: ignore[attr-defined]
    return agent


def calls_of(agent: SimpleAgent) -> list[Any]:
    calls: list[Any] = agent.server_client.post.call_args_list  # type: ignore[attr-defined]
    return calls


def paths_of(agent: SimpleAgent) -> list[tuple[str, str]]:
    return [(made.kwargs["server_name"], made.kwargs["url_path"]) for made in calls_of(agent)]


def respond(agent: SimpleAgent, body: Any = None) -> dict[str, Any]:
    answered = TestClient(agent.complete_app()).post("/v1/responses", json=body or {"input": "hello", "tools": TOOLS})
    assert answered.status_code == 200, answered.text
    result: dict[str, Any] = answered.json()
    return result


def test_a_text_becomes_a_user_message_and_only_set_fields_are_sent() -> None:
    agent = make_agent(answer(model_answer(message("hi"))))

    respond(agent, {"input": "hello", "temperature": 0.3})

    asked = NeMoGymResponseCreateParamsNonStreaming(
        input=[NeMoGymEasyInputMessage(role="user", content="hello")], temperature=0.3
    )
    assert calls_of(agent) == [call(server_name="model", url_path="/v1/responses", json=asked, cookies=None)]
    sent = calls_of(agent)[0].kwargs["json"]
    assert sent.model_dump(exclude_unset=True)["temperature"] == 0.3
    assert "tools" not in sent.model_dump(exclude_unset=True)


def test_tools_are_called_and_their_outputs_shown_to_the_model() -> None:
    agent = make_agent(
        answer(model_answer(CITY_CALL), cookies={"model-session": "1"}),
        answer({"weather": "cold"}, cookies={"tool-session": "1"}),
        answer(model_answer(message("It is cold."), id="resp_2"), cookies={"model-session": "2"}),
    )

    result = respond(agent)

    assert paths_of(agent) == [("model", "/v1/responses"), ("environment", "/get_weather"), ("model", "/v1/responses")]
    assert calls_of(agent)[1].kwargs["json"] == {"city": "Oslo"}
    assert calls_of(agent)[2].kwargs["cookies"] == {"model-session": "1"}
    assert [item.type for item in calls_of(agent)[2].kwargs["json"].input] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert result["id"] == "resp_2"
    assert [item["type"] for item in result["output"]] == ["function_call", "function_call_output", "message"]
    assert result["output"][1]["output"] == '{"weather": "cold"}'


def test_a_tools_error_is_shown_to_the_model_and_keeps_the_session() -> None:
    agent = make_agent(
        answer(model_answer(CITY_CALL, CITY_CALL | {"call_id": "c2"})),
        answer({}, cookies={"session": "s1", "other": "o1"}),
        answer("\"ValueError('x')\"", ok=False, status=500, cookies={}),
        answer(model_answer(CITY_CALL)),
        answer({}, cookies={"session": "s1"}),
        answer(model_answer(message("done"))),
    )

    result = respond(agent)

    assert calls_of(agent)[2].kwargs["cookies"] == {"session": "s1", "other": "o1"}
    assert calls_of(agent)[4].kwargs["cookies"] == {"session": "s1", "other": "o1"}
    assert "ValueError" in result["output"][3]["output"]


def test_an_answer_without_cookies_takes_none_away() -> None:
    assert merged({"a": "1", "b": "2"}, {}) == {"a": "1", "b": "2"}
    assert merged({"a": "1", "b": "2"}, {"b": "3"}) == {"a": "1", "b": "3"}
    assert merged(None, {"b": "3"}) == {"b": "3"}


def test_malformed_arguments_go_back_to_the_model_without_a_call() -> None:
    agent = make_agent(answer(model_answer(CITY_CALL | {"arguments": "{oops"})), answer(model_answer(message("sorry"))))

    result = respond(agent)

    assert paths_of(agent) == [("model", "/v1/responses")] * 2
    error = json.loads(result["output"][1]["output"])["error"]
    assert "Invalid tool call arguments" in error
    assert "JSONDecodeError" in error


def test_a_strange_tool_name_is_a_path_of_its_own() -> None:
    name = "get weather?now#1"
    odd = CITY_CALL | {"name": name}
    agent = make_agent(
        answer(model_answer(odd)), answer("not found", ok=False, status=404), answer(model_answer(message("ok")))
    )

    respond(agent, {"input": "hello", "tools": [TOOLS[0] | {"name": name}]})

    assert paths_of(agent)[1] == ("environment", "/get%20weather%3Fnow%231")


def test_reasoning_alone_is_no_answer() -> None:
    model_cookies = {"model-session": "1"}
    agent = make_agent(answer(model_answer(THOUGHT), cookies=model_cookies), answer(model_answer(message("hi"))))

    respond(agent)

    asked = [NeMoGymEasyInputMessage(role="user", content="hello")]
    thought = NeMoGymResponseReasoningItem(id="rs_1", summary=[NeMoGymSummary(text="hm")])
    first, second = calls_of(agent)
    assert (first.kwargs["cookies"], first.kwargs["json"].input) == (None, asked)
    assert (second.kwargs["cookies"], second.kwargs["json"].input) == (model_cookies, [*asked, thought])


@pytest.mark.parametrize("idle", [(THOUGHT,), ()])
def test_a_model_that_never_says_anything_is_stopped_with_an_explanation(idle: tuple[dict[str, Any], ...]) -> None:
    agent = make_agent(*[answer(model_answer(*idle)) for _ in range(3)])

    result = respond(agent)

    assert len(calls_of(agent)) == 3
    assert result["status"] == "incomplete"
    assert result["incomplete_details"]["reason"] == "no_actionable_output"
    assert "3 model turns in a row" in result["incomplete_details"]["message"]
    assert len(result["output"]) == 3 * len(idle)


def test_idle_turns_count_only_in_a_row() -> None:
    idle, busy = model_answer(THOUGHT), model_answer(CITY_CALL)
    turns = [
        answer(idle),
        answer(idle),
        answer(busy),
        answer({}),
        answer(idle),
        answer(idle),
        answer(model_answer(message("ok"))),
    ]

    assert respond(make_agent(*turns))["incomplete_details"] is None
    impatient = make_agent(answer(idle), max_idle_turns=1)
    respond(impatient)
    assert len(calls_of(impatient)) == 1


def test_an_incomplete_answer_ends_the_conversation_before_its_tools_run() -> None:
    agent = make_agent(answer(model_answer(CITY_CALL, incomplete_details={"reason": "max_output_tokens"})))

    result = respond(agent)

    assert paths_of(agent) == [("model", "/v1/responses")]
    assert result["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_step_limit_lets_the_last_tools_run() -> None:
    agent = make_agent(answer(model_answer(CITY_CALL)), answer({"weather": "cold"}), max_steps=1)

    result = respond(agent)

    assert [item["type"] for item in result["output"]] == ["function_call", "function_call_output"]


@pytest.mark.parametrize("bad", [{"arguments": "{oops"}, {"arguments": "[]"}, {"name": "get weather!"}, {"name": ""}])
def test_an_endpoint_that_refuses_a_call_the_model_made_up_ends_the_conversation(bad: dict[str, str]) -> None:
    refusal = answer("Expecting property name", ok=False, status=400)
    agent = make_agent(answer({}), answer(model_answer(CITY_CALL | bad)), refusal, answer(verdict(reward=0.0)))

    result = run(agent)

    assert (result.status_code, result.json()["ng_stop_reason"]) == (200, "call_refused")
    sent = json.loads(calls_of(agent)[-1].kwargs["data"])["response"]
    assert sent["incomplete_details"]["reason"] == "call_refused"
    assert "Expecting property name" in sent["incomplete_details"]["message"]


@pytest.mark.parametrize(("name", "status"), [("get_weather", 400), ("no_such_tool", 400), ("get weather!", 500)])
def test_an_endpoint_that_refuses_for_other_reasons_fails_the_rollout(name: str, status: int) -> None:
    row = {**ROW, "responses_create_params": {"input": "hello", "tools": TOOLS}}
    called = answer(model_answer(CITY_CALL | {"name": name}))
    tool = [answer({})] if name == "get_weather" else []
    agent = make_agent(answer({}), called, *tool, answer("no", ok=False, status=status), answer({}))

    assert run(agent, row).status_code == 500
    assert paths_of(agent)[-1] == ("environment", "/end_session")


FILTERED = [
    answer({"error": {"code": "content_filter", "message": "The prompt triggered a policy"}}, ok=False, status=400),
    answer({"error": {"message": "Your input was flagged"}}, ok=False, status=403),
    answer(
        model_answer(error={"code": "invalid_prompt", "message": "It may violate our usage policy"}, status="failed")
    ),
]


@pytest.mark.parametrize("refusal", FILTERED)
def test_an_endpoint_whose_filter_refuses_what_the_model_said_ends_the_conversation(refusal: MagicMock) -> None:
    agent = make_agent(answer({}), answer(model_answer(CITY_CALL)), refusal, answer(verdict(reward=0.0)))

    result = run(agent)

    assert (result.status_code, result.json()["ng_stop_reason"]) == (200, "content_refused")


@pytest.mark.parametrize("refusal", FILTERED)
def test_a_row_that_the_filter_of_the_endpoint_refuses_fails(refusal: MagicMock) -> None:
    agent = make_agent(answer({}), refusal, answer({}))

    assert run(agent).status_code == 500


@pytest.mark.parametrize(
    "failure",
    [
        answer({"error": {"message": "Incorrect API key"}}, ok=False, status=403),
        answer({"error": {"message": "content_filter"}}, ok=False, status=500),
        answer(model_answer(error={"code": "server_error", "message": "overloaded"}, status="failed")),
    ],
)
def test_an_endpoint_that_fails_for_other_reasons_fails_the_rollout(failure: MagicMock) -> None:
    agent = make_agent(answer({}), answer(model_answer(CITY_CALL)), failure, answer({}))

    assert run(agent).status_code == 500


def test_usage_is_summed_with_its_details() -> None:
    details = {"input_tokens_details": {"cached_tokens": 2}, "output_tokens_details": {"reasoning_tokens": 3}}
    agent = make_agent(
        answer(model_answer(CITY_CALL, usage=usage(10, **details))),
        answer({}),
        answer(model_answer(THOUGHT)),
        answer(model_answer(message("ok"), usage=usage(20, **details))),
    )

    total = respond(agent)["usage"]

    assert total["total_tokens"] == 30
    assert total["input_tokens_details"]["cached_tokens"] == 4
    assert total["output_tokens_details"]["reasoning_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"object": "chat.completion"}, "Received an invalid response from model server 'model'"),
        ("<html>", "Received an invalid response from model server"),
        (model_answer(error={"code": "server_error", "message": "out of memory"}), "out of memory"),
    ],
)
def test_a_model_server_that_does_not_answer_properly_fails_the_rollout(body: Any, words: str) -> None:
    answered = TestClient(make_agent(answer(body)).complete_app()).post("/v1/responses", json={"input": "hello"})

    assert answered.status_code == 500
    assert words in answered.text


ROW = {"responses_create_params": {"input": "hello"}, "expected": 4, "uuid": None}


def run(agent: SimpleAgent, row: Any = None) -> Any:
    return TestClient(agent.complete_app()).post("/run", json=ROW if row is None else row)


def verdict(**fields: Any) -> dict[str, Any]:
    return {**ROW, "response": model_answer(message("4")), "reward": 1.0, **fields}


def test_a_rollout_is_seeded_answered_and_verified_in_one_session() -> None:
    agent = make_agent(
        answer({}, cookies={"session": "s"}),
        answer(model_answer(message("4")), cookies={"model": "m"}),
        answer(verdict(accuracy=True)),
    )

    result = run(agent).json()

    assert paths_of(agent) == [("environment", "/seed_session"), ("model", "/v1/responses"), ("environment", "/verify")]
    seed, _, verify = calls_of(agent)
    assert json.loads(seed.kwargs["data"])["expected"] == 4
    assert verify.kwargs["cookies"] == {"session": "s"}
    assert verify.kwargs["headers"]["x-nemo-gym-end-session"] == "true"
    sent = json.loads(verify.kwargs["data"])
    assert (sent["expected"], sent["uuid"], sent["response"]["id"]) == (4, None, "resp_1")
    assert sent["responses_create_params"] == {"input": "hello"}
    assert (result["reward"], result["accuracy"], result["expected"]) == (1.0, True, 4)
    assert "ng_stop_reason" not in result


def test_a_stopped_rollout_is_marked_in_its_result() -> None:
    agent = make_agent(answer({}), answer(model_answer()), answer(verdict(reward=0.0)), max_idle_turns=1)

    assert run(agent).json()["ng_stop_reason"] == "no_actionable_output"


def test_verification_can_be_skipped() -> None:
    agent = make_agent(
        answer({}, cookies={"session": "s"}),
        answer(model_answer(message("4"))),
        answer({}),
        skip_verification=True,
        skip_verification_reward=0.25,
    )

    result = run(agent, ROW | {"reward": 7}).json()

    assert (result["reward"], result["verification_skipped"], result["expected"]) == (0.25, True, 4)
    assert result["response"]["output"][0]["content"][0]["text"] == "4"
    assert paths_of(agent)[-1] == ("environment", "/end_session")
    assert calls_of(agent)[-1].kwargs["cookies"] == {"session": "s"}


@pytest.mark.parametrize(
    ("answers", "path"),
    [
        ([answer({"detail": "no such task"}, ok=False, status=422)], "/seed_session"),
        ([answer({}), answer("busy", ok=False, status=429), answer({})], "/end_session"),
        ([answer({}), answer(model_answer(message("4"))), answer("broken", ok=False, status=500)], "/verify"),
        ([answer({}), answer(model_answer(message("4"))), answer({"reward": "high"})], "/verify"),
    ],
)
def test_a_failing_server_fails_the_rollout(answers: list[MagicMock], path: str) -> None:
    agent = make_agent(*answers)

    assert run(agent).status_code == 500
    assert paths_of(agent)[-1] == ("environment", path)


def test_a_session_that_cannot_be_ended_does_not_hide_the_failure() -> None:
    agent = make_agent(answer({}), answer("busy", ok=False, status=429))  # the third call has no answer

    answered = run(agent)

    assert answered.status_code == 500
    assert "busy" in answered.text
    assert answered.headers["x-nemo-gym-error-status"] == "429"


class ShoutingAgent(SimpleAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:  # type: ignore[override]
        raise AssertionError("only reached over HTTP")


def test_a_subclass_with_its_own_responses_is_asked_over_http() -> None:
    agent = make_agent(
        answer({}, cookies={"session": "s", "kept": "k"}),
        answer(model_answer(message("4")), cookies={"session": "s2", "model": "m"}),
        answer(verdict()),
        agent_class=ShoutingAgent,
    )

    assert run(agent).status_code == 200
    assert paths_of(agent) == [("environment", "/seed_session"), ("agent", "/v1/responses"), ("environment", "/verify")]
    assert calls_of(agent)[1].kwargs["cookies"] == {"session": "s", "kept": "k"}
    assert calls_of(agent)[2].kwargs["cookies"] == {"session": "s2", "model": "m", "kept": "k"}


def test_metrics_come_from_the_environment_unless_nothing_was_verified() -> None:
    body = {"verify_responses": [{"reward": 1.0}]}
    agent = make_agent(answer({"agent_metrics": {"mean/reward": 1.0}, "key_metrics": {"mean/reward": 1.0}}))
    unverified = make_agent(skip_verification=True)

    metrics = TestClient(agent.complete_app()).post("/aggregate_metrics", json=body).json()

    assert paths_of(agent) == [("environment", "/aggregate_metrics")]
    as_xml = {"content-type": "application/xml"}
    refused = TestClient(agent.complete_app()).post("/aggregate_metrics", content=b"<a/>", headers=as_xml)
    assert refused.status_code == 415
    assert metrics["key_metrics"] == {"mean/reward": 1.0}
    with pytest.warns(RuntimeWarning, match="not verified"):
        empty = TestClient(unverified.complete_app()).post("/aggregate_metrics", json=body).json()
    assert empty["agent_metrics"] == {}
    assert calls_of(unverified) == []


def test_mocked_cookies_are_passed_on_as_they_are() -> None:
    """Tests of server authors hand in mocks and compare what was sent with them."""
    first, second = answer(model_answer(THOUGHT)), answer(model_answer(message("hi")))
    first.cookies = MagicMock()
    second.cookies = MagicMock()
    agent = make_agent(first, second)

    respond(agent)

    assert calls_of(agent)[1].kwargs["cookies"] is first.cookies
