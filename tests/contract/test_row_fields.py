"""Environments written elsewhere, on rows with more fields than they know: none is refused, none gets in the way.

Each is built the way its kind is built in the wild, and verifies rows that hold its own verdict of an earlier run.
"""

import json
from typing import Annotated, Any
from unittest.mock import MagicMock

import pytest
from fastapi import Body, Header, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from pydantic import ConfigDict, Field, computed_field

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.judge import JudgeError
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.rl.rewards import _agent_metrics
from nemo_gym.server_utils import ServerClient

ADDRESS: dict[str, Any] = {"name": "", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
RESPONSE = {"id": "resp_1", "created_at": 1.0, "model": "m", "object": "response", "output": [MESSAGE]}
ROW: dict[str, Any] = {
    "responses_create_params": {"input": "2 + 2?"},
    "expected_answer": "4",
    "uuid": "row-1",
    "difficulty": 3,
    "verifier_metadata": {"level": 2},
    "agent_ref": {"name": "a"},
}
EARLIER = {"reward": 0.0, "extracted_answer": "5", "reward_components": {"format": 0.0}, "judge_evaluations": None}
BOOKKEEPING = {"_ng_task_index": 7, "_ng_rollout_index": 0, "_note": 1, "_ng_failure_class": "old"}


class SumRun(BaseRunRequest):
    expected_answer: str


class SumRequest(SumRun, BaseVerifyRequest): ...


class SumResponse(BaseVerifyResponse):
    expected_answer: str
    extracted_answer: str | None = None


class OpenRun(SumRun):
    model_config = ConfigDict(extra="allow")


class OpenRequest(OpenRun, BaseVerifyRequest): ...


class OpenResponse(SumResponse):
    model_config = ConfigDict(extra="allow")


def verdict(body: Any) -> dict[str, Any]:
    answer = body.response.output_text
    return {"reward": float(answer == body.expected_answer), "extracted_answer": answer}


class Plain(SimpleResourcesServer):
    async def verify(self, body: SumRequest) -> SumResponse:
        return SumResponse(**body.model_dump(), **verdict(body))


class WithRequest(SimpleResourcesServer):
    async def verify(self, request: Request, body: SumRequest) -> SumResponse:
        return SumResponse(**body.model_dump(), **verdict(body))


class ByDict(SimpleResourcesServer):
    async def verify(self, body: SumRequest) -> SumResponse:
        return SumResponse(**dict(body), **verdict(body))


class Revalidating(SimpleResourcesServer):
    async def verify(self, body: SumRequest) -> SumResponse:
        return SumResponse.model_validate(body.model_dump() | verdict(body))


class Picking(SimpleResourcesServer):
    async def verify(self, body: SumRequest) -> SumResponse:
        return SumResponse(
            responses_create_params=body.responses_create_params,
            response=body.response,
            expected_answer=body.expected_answer,
            **verdict(body),
        )


class DeclaredInBody(SimpleResourcesServer):
    async def verify(self, body: Annotated[SumRequest, Body()]) -> SumResponse:
        return SumResponse(**body.model_dump(), **verdict(body))


class Synchronous(SimpleResourcesServer):
    def verify(self, body: SumRequest) -> SumResponse:  # type: ignore[override]
        return SumResponse(**body.model_dump(), **verdict(body))


class WithHeader(SimpleResourcesServer):
    async def verify(self, body: SumRequest, trace: Annotated[str | None, Header()] = None) -> SumResponse:
        return SumResponse(**body.model_dump(), **verdict(body))


class AnsweringDicts(SimpleResourcesServer):
    async def verify(self, body: SumRequest) -> dict[str, Any]:  # type: ignore[override]
        return {**body.model_dump(mode="json"), **verdict(body)}


class Open(SimpleResourcesServer):
    async def verify(self, body: OpenRequest) -> OpenResponse:
        assert body.model_extra
        assert body.model_extra["uuid"] == "row-1"
        return OpenResponse(**body.model_dump(), **verdict(body))


class OpenRequestOnly(SimpleResourcesServer):
    async def verify(self, body: OpenRequest) -> SumResponse:
        return SumResponse(**body.model_dump(), **verdict(body))


ENVIRONMENTS = [
    Plain,
    WithRequest,
    ByDict,
    Revalidating,
    Picking,
    DeclaredInBody,
    Synchronous,
    WithHeader,
    AnsweringDicts,
    Open,
    OpenRequestOnly,
]


def client_of(kind: type[SimpleResourcesServer], **options: Any) -> TestClient:
    config = BaseResourcesServerConfig(**ADDRESS, **options)
    return TestClient(kind(config=config, server_client=MagicMock(spec=ServerClient)).complete_app())


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_an_environment_verifies_its_own_rollouts_whatever_else_they_hold(kind: type[SimpleResourcesServer]) -> None:
    client = client_of(kind)
    row = {**ROW, **EARLIER, **BOOKKEEPING, "response": RESPONSE}

    answer = client.post("/verify", json=row)
    again = client.post("/verify", json={**answer.json(), **BOOKKEEPING})

    assert (answer.status_code, again.status_code) == (200, 200)
    got = answer.json()
    assert (got["reward"], got["extracted_answer"]) == (1.0, "4")
    assert {name: got[name] for name in ROW if name != "responses_create_params"} == {
        name: value for name, value in ROW.items() if name != "responses_create_params"
    }
    assert again.json() == got


@pytest.mark.parametrize("kind", [kind for kind in ENVIRONMENTS if kind is not Open])
def test_what_belongs_to_the_sender_and_old_verdicts_do_not_come_back(kind: type[SimpleResourcesServer]) -> None:
    got = client_of(kind).post("/verify", json={**ROW, **EARLIER, **BOOKKEEPING, "response": RESPONSE}).json()

    assert not {name for name in got if name.startswith("_")}
    assert "reward_components" not in got


@pytest.mark.parametrize("kind", [kind for kind in ENVIRONMENTS if kind is not Open])
def test_a_trainer_gets_what_the_environment_declares_and_no_row_fields(kind: type[SimpleResourcesServer]) -> None:
    got = client_of(kind).post("/verify", json={**ROW, "_rowidx": 5, "response": RESPONSE}).json()

    assert set(got) == {"responses_create_params", "response", "reward", "expected_answer", "extracted_answer"}
    assert {name for name in _agent_metrics([got], "a") if name.endswith("/mean")} == {"a/reward/mean"}


@pytest.mark.parametrize("kind", [Plain, Picking, Synchronous, WithHeader])
def test_the_answer_can_be_as_narrow_as_the_types(kind: type[SimpleResourcesServer]) -> None:
    got = client_of(kind, echo_row_fields=False).post("/verify", json={**ROW, **EARLIER, "response": RESPONSE}).json()

    assert set(got) == {"responses_create_params", "response", "reward", "expected_answer", "extracted_answer"}


def test_an_environment_sees_no_field_that_it_does_not_declare() -> None:
    seen: list[Any] = []

    class Looking(Plain):
        async def verify(self, body: SumRequest) -> SumResponse:
            seen.append((set(body.model_dump()), getattr(body, "uuid", None), body.model_extra))
            return await super().verify(body)

    client_of(Looking).post("/verify", json={**ROW, "response": RESPONSE})

    assert seen == [({"responses_create_params", "response", "expected_answer"}, None, {})]


def test_a_response_of_the_authors_own_making_is_left_alone() -> None:
    class Own(SimpleResourcesServer):
        async def verify(self, body: SumRequest) -> JSONResponse:  # type: ignore[override]
            return JSONResponse({"reward": 0.5})

    assert client_of(Own).post("/verify", json={**ROW, "response": RESPONSE}).json() == {"reward": 0.5}


def test_a_judge_that_fails_leaves_the_whole_row() -> None:
    class Judged(SimpleResourcesServer):
        async def verify(self, body: SumRequest) -> SumResponse:
            raise JudgeError("no answer")

    got = client_of(Judged).post("/verify", json={**ROW, **BOOKKEEPING, "response": RESPONSE}).json()

    assert got["_ng_failure_class"] == "judge_failed"
    assert (got["uuid"], got["expected_answer"]) == ("row-1", "4")
    assert "_ng_task_index" not in got


def test_a_field_that_the_answer_declares_is_its_own_even_when_it_says_nothing() -> None:
    class Quiet(BaseVerifyResponse):
        uuid: str | None = None
        difficulty: int = Field(0, exclude=True)
        its_answer: str = Field("said", serialization_alias="expected_answer")

        @computed_field
        def agent_ref(self) -> str:
            return "me"

    class Silent(SimpleResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> Quiet:
            return Quiet(**body.model_dump(), reward=1.0)

    text = client_of(Silent).post("/verify", json={**ROW, "response": RESPONSE}).text
    got = json.loads(text)

    assert (text.count('"expected_answer"'), text.count('"agent_ref"')) == (1, 1)
    assert (got["uuid"], got["expected_answer"], got["agent_ref"]) == (None, "said", "me")
    assert "difficulty" not in got
    assert got["verifier_metadata"] == {"level": 2}


class PlainAgent(SimpleResponsesAPIAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(RESPONSE)

    async def run(self, request: Request, body: SumRun) -> SumResponse:  # type: ignore[override]
        answer = await self.responses(body.responses_create_params)
        return SumResponse(**body.model_dump(), response=answer, reward=1.0, extracted_answer=answer.output_text)


class OpenAgent(PlainAgent):
    async def run(self, request: Request, body: OpenRun) -> OpenResponse:  # type: ignore[override]
        answer = await self.responses(body.responses_create_params)
        return OpenResponse(**body.model_dump(), response=answer, reward=1.0, extracted_answer=answer.output_text)


@pytest.mark.parametrize("kind", [PlainAgent, OpenAgent])
def test_an_agent_carries_the_row_through(kind: type[PlainAgent]) -> None:
    agent = kind(config=BaseResponsesAPIAgentConfig(**ADDRESS), server_client=MagicMock(spec=ServerClient))
    client = TestClient(agent.complete_app())

    answer = client.post("/run", json={**ROW, **EARLIER, **BOOKKEEPING})

    assert answer.status_code == 200
    assert (answer.json()["reward"], answer.json()["extracted_answer"]) == (1.0, "4")
    assert {name: answer.json()[name] for name in ("uuid", "difficulty", "verifier_metadata")} == {
        "uuid": "row-1",
        "difficulty": 3,
        "verifier_metadata": {"level": 2},
    }
