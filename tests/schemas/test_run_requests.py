import asyncio
import json
import pickle
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ConfigDict, ValidationError

from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.schemas.run_requests import (
    BaseMultiRewardVerifyResponse,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    undeclared_fields,
)
from nemo_gym.servers.json_route import answers_with_row

ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "hi"}]},
    "expected_answer": "4",
    "verifier_metadata": {"level": 2},
    "_ng_task_index": 7,
}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
RESPONSE = {"id": "resp_1", "created_at": 1.0, "model": "m", "object": "response", "output": [MESSAGE]}


class SumVerifyRequest(BaseVerifyRequest):
    expected_answer: str


class SumVerifyResponse(BaseVerifyResponse):
    expected_answer: str
    extracted_answer: str


async def verify(body: SumVerifyRequest) -> SumVerifyResponse:
    answer = body.response.output_text
    reward = float(answer == body.expected_answer)
    return SumVerifyResponse(**body.model_dump(), reward=reward, extracted_answer=answer)


async def post(app: FastAPI, path: str, payload: Any) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(payload).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def test_a_verify_route_answers_with_the_whole_row_and_the_verdict() -> None:
    app = FastAPI()
    app.post("/verify")(answers_with_row(verify))

    status, answer = asyncio.run(post(app, "/verify", {**ROW, "response": RESPONSE}))

    assert status == 200
    assert answer["reward"] == 1.0
    assert answer["extracted_answer"] == "4"
    assert (answer["expected_answer"], answer["verifier_metadata"]) == ("4", {"level": 2})
    assert "_ng_task_index" not in answer
    assert answer["response"]["tools"] == []
    assert answer["responses_create_params"]["parallel_tool_calls"] is True


def test_a_bad_trajectory_is_answered_422_with_its_place() -> None:
    app = FastAPI()
    app.post("/verify")(verify)

    status, answer = asyncio.run(
        post(app, "/verify", {**ROW, "response": {**RESPONSE, "output": [MESSAGE, {"role": "tool"}]}})
    )

    assert status == 422
    assert [problem["loc"] for problem in answer["detail"]] == [["body", "response", "output", 1]]


def test_a_rollout_can_be_verified_again() -> None:
    rollout = {**ROW, "response": RESPONSE, "reward": 0.0, "reward_components": {"format": 0.0}}

    request = SumVerifyRequest.model_validate(rollout)
    answer = asyncio.run(verify(request))

    assert answer.reward == 1.0
    assert "reward" not in request.model_dump(exclude_unset=True)


def test_a_verdict_in_a_verify_response_is_kept() -> None:
    parts = {"format": 0.25, "answer": 0.5}

    rollout = {**ROW, "response": RESPONSE, "reward": 0.75, "reward_components": parts}
    plain = BaseVerifyResponse.model_validate(rollout)
    multi = BaseMultiRewardVerifyResponse.model_validate(rollout)

    assert plain.reward == 0.75
    assert (multi.reward, multi.reward_components) == (0.75, parts)


def test_a_type_shows_what_it_declares_and_no_more() -> None:
    row = SumVerifyRequest.model_validate_json(json.dumps({**ROW, "response": RESPONSE}))

    assert set(row.model_dump()) == set(dict(row)) == {"responses_create_params", "response", "expected_answer"}
    assert (row.model_extra, hasattr(row, "verifier_metadata")) == ({}, False)
    assert set(row.model_dump(exclude_unset=True)) == row.model_fields_set == set(row.model_dump())
    assert undeclared_fields(row) == {"verifier_metadata": {"level": 2}}
    assert undeclared_fields(pickle.loads(pickle.dumps(row.model_copy()))) == undeclared_fields(row)


def test_a_type_that_allows_more_shows_the_row_unchanged() -> None:
    class Open(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    assert Open.model_validate_json(json.dumps(ROW)).model_dump(exclude_unset=True) == ROW


def test_a_type_that_allows_more_by_one_of_its_bases_does_so_in_any_order() -> None:
    class OpenRun(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class First(OpenRun, BaseVerifyRequest): ...

    class Last(BaseVerifyRequest, OpenRun): ...

    for kind in (First, Last):
        row = kind.model_validate({**ROW, "response": RESPONSE, "reward": 0.0})
        assert row.model_dump()["verifier_metadata"] == {"level": 2}
        assert "reward" not in row.model_dump()


def test_a_verify_response_without_reward_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValidationError, match="reward"):
        BaseVerifyResponse.model_validate({**ROW, "response": RESPONSE})


def test_seeding_a_session_takes_the_row_and_answers_nothing() -> None:
    class CounterSeedRequest(BaseSeedSessionRequest):
        initial_count: int

    assert BaseSeedSessionRequest.model_validate(ROW).model_dump() == {}
    assert CounterSeedRequest.model_validate({**ROW, "initial_count": 3}).initial_count == 3
    assert BaseSeedSessionResponse().model_dump() == {}


def test_the_types_describe_themselves_in_an_openapi_document() -> None:
    app = FastAPI()

    @app.post("/v1/responses")
    async def responses(body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        raise NotImplementedError

    @app.post("/v1/chat/completions")
    async def chat(body: NeMoGymChatCompletionCreateParamsNonStreaming) -> NeMoGymChatCompletion:
        raise NotImplementedError

    schemas = app.openapi()["components"]["schemas"]

    assert {"NeMoGymResponse", "NeMoGymResponseFunctionToolCall", "NeMoGymChatCompletion"} <= set(schemas)


def test_metrics_of_nothing_are_empty() -> None:
    assert AggregateMetrics().model_dump() == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    with pytest.raises(ValidationError, match="verify_responses"):
        AggregateMetricsRequest.model_validate({})
