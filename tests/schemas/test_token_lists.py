"""Trajectories with long lists of numbers: the short way says to the byte what the long one says."""

import asyncio
import math
import random
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, computed_field, field_validator

from nemo_gym.base_resources_server import BaseRunRequest, BaseSeedSessionRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.jsonl import Unread, to_line
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.schemas.run_requests import all_fields
from nemo_gym.schemas.token_lists import LONG, can_be_filled_in, json_of, long_texts_in, with_lists_beside
from nemo_gym.schemas.wire import (
    LONG_TEXT,
    MARK,
    ListsBeside,
    RowWithResponse,
    long_parts_header,
    with_lists_read,
    with_lists_unread,
    with_parts_unread,
)
from nemo_gym.servers import routes
from nemo_gym.servers.routes import DirectCall, DirectRoute, reads_only, to_json
from responses_api_agents.simple_agent.verdicts import with_response
from tests.perf.side_by_side import endpoint, payloads
from tests.schemas.in_process import one_rollout, played

ROW = orjson.dumps(
    {"responses_create_params": {"input": "hi"}, "note": "[1,2]", "response": {"id": "of an earlier run"}}
)


def response_with(*bundles: dict[str, Any] | None, text: str = "said") -> NeMoGymResponse:
    answer = orjson.loads(endpoint.message())
    item = {**answer["output"][0], "content": [{"type": "output_text", "text": text, "annotations": []}]}
    answer["output"] = [{**item, **(bundle or {})} for bundle in bundles]
    return NeMoGymResponse.model_validate(answer)


def long_way(model: BaseModel, **options: Any) -> bytes:
    return model.__pydantic_serializer__.to_json(model, **options)


def numbers(count: int) -> dict[str, list[Any]]:
    chance = random.Random(count)
    log_probs = [-chance.random() * 10.0 ** chance.randint(-12, 3) for _ in range(count)]
    log_probs[:4] = [0.0, -0.0, -1e-7, -1e16]
    return {
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [chance.randrange(2**31) for _ in range(count)],
        "generation_log_probs": log_probs,
    }


ODD_TEXT = '\u00e9\u4e2d\U0001f600\n"\\\x7f'


@pytest.mark.parametrize("text", ["said", ODD_TEXT, "[MARK,0]", "[MARK.0,1.0]", '"MARK:0"'], ids=str.__len__)
def test_json_is_the_same_to_the_byte(text: str) -> None:
    response = response_with(numbers(LONG), None, numbers(LONG + 7), numbers(3), text=text.replace("MARK", str(MARK)))
    verdict = BaseVerifyResponse(responses_create_params={"input": "hi"}, response=response, reward=0.5)
    for model in (response, verdict):
        assert to_json(model) == long_way(model, by_alias=True, warnings=False)
    body = with_response(ROW, response)
    whole = body.whole() if isinstance(body, ListsBeside) else body
    assert whole == ROW[:-1] + b',"response":' + long_way(response, exclude_unset=True) + b"}"
    assert isinstance(body, ListsBeside) is ("MARK" not in text)


def test_short_lists_and_numbers_that_json_cannot_say_take_the_long_way() -> None:
    assert json_of(response_with(numbers(LONG - 1), None)) is None
    odd = response_with(numbers(LONG))
    odd.output[0].generation_log_probs[5] = math.nan  # type: ignore[union-attr]
    assert with_lists_beside(odd, ROW[:-1]) is None
    assert to_json(odd) == long_way(odd, by_alias=True, warnings=False)
    unset = response_with(numbers(LONG))
    unset.output[0].__pydantic_fields_set__.discard("generation_log_probs")
    assert with_lists_beside(unset, ROW[:-1]) is None


class Counting(BaseVerifyResponse):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        return len(self.response.output[0].generation_token_ids)  # type: ignore[union-attr]


def test_a_type_that_looks_at_the_lists_while_it_is_written_sees_them() -> None:
    verdict = Counting(responses_create_params={"input": "hi"}, response=response_with(numbers(LONG)), reward=1)
    assert orjson.loads(to_json(verdict))["tokens"] == LONG


class Open(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class Strict(BaseVerifyRequest):
    @field_validator("response")
    @classmethod
    def check(cls, value: NeMoGymResponse) -> NeMoGymResponse:
        assert len(value.output[0].generation_token_ids) == LONG  # type: ignore[union-attr]
        return value


class Ours(BaseVerifyRequest):
    note: str


def call_of(handler: Any) -> DirectCall:
    app = FastAPI()
    app.router.route_class = DirectRoute
    app.post("/verify")(handler)
    call = app.router.routes[-1].app  # type: ignore[attr-defined]
    assert isinstance(call, DirectCall)
    return call


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_handler_gets_objects_of_its_own() -> None:
    seen: list[Ours] = []

    async def verify(body: Ours) -> dict[str, Any]:
        seen.append(body)
        body.response.output[0].generation_token_ids.append(1)  # type: ignore[union-attr]
        return {}

    response = response_with(numbers(LONG), None, numbers(LONG))
    call, body = call_of(verify), with_response(ROW.replace(b'"note":"[1,2]"', b'"note":"n"'), response)
    assert call.takes(body)
    asyncio.run(call.answer({"type": "http", "headers": []}, b"", never, body))
    assert seen[0].note == "n"
    assert len(response.output[0].generation_token_ids) == LONG  # type: ignore[union-attr]
    seen[0].response.output[0].generation_token_ids.pop()  # type: ignore[union-attr]
    assert seen[0].response == response


def test_a_handler_that_reads_the_body_itself_gets_it_whole() -> None:
    bodies: list[bytes] = []

    async def verify(request: Request, body: BaseVerifyRequest) -> dict[str, Any]:
        bodies.append(await request.body())
        return {}

    response = response_with(numbers(LONG))
    call, body = call_of(verify), with_response(ROW, response)
    assert isinstance(body, ListsBeside)
    asyncio.run(call.answer({"type": "http", "headers": []}, body.envelope, never, body))
    assert bodies == [body.whole()]


def test_types_with_checks_of_their_own_are_read_whole() -> None:
    assert can_be_filled_in(Ours)
    assert not can_be_filled_in(Strict)
    assert not can_be_filled_in(BaseModel)

    async def verify(body: Strict) -> dict[str, Any]:
        return {}

    assert not call_of(verify).takes(with_response(ROW, response_with(numbers(LONG))))


def test_a_handler_that_only_reads_gets_the_response_itself_and_no_other_does() -> None:
    seen: list[Ours] = []

    async def verify(body: Ours) -> dict[str, Any]:
        seen.append(body)
        return {}

    row = ROW.replace(b'"note":"[1,2]"', b'"note":"n"')
    body = with_response(row, NeMoGymResponse.model_validate_json(endpoint.CALL), to_hand_over=True)
    assert isinstance(body, RowWithResponse)
    assert not call_of(verify).takes(body)
    call = call_of(reads_only(verify))
    assert call.takes(body)
    for given, content in ((body.whole(), None), (body.envelope, body)):
        asyncio.run(call.answer({"type": "http", "headers": []}, given, never, content))
    read, handed_over = seen
    assert handed_over.response is body.response
    assert handed_over == read
    assert handed_over.model_dump_json() == read.model_dump_json()
    assert handed_over.model_fields_set == read.model_fields_set


def test_a_handler_that_wants_the_request_or_checks_the_response_is_not_handed_one() -> None:
    async def with_request(request: Request, body: Ours) -> dict[str, Any]:
        return {}

    async def with_checks(body: Strict) -> dict[str, Any]:
        return {}

    body = with_response(ROW, NeMoGymResponse.model_validate_json(endpoint.CALL), to_hand_over=True)
    assert not any(call_of(reads_only(handler)).takes(body) for handler in (with_request, with_checks))


def test_log_probs_that_may_be_no_numbers_are_read_from_json() -> None:
    assert isinstance(with_response(ROW, response_with(numbers(3)), to_hand_over=True), bytes)


class Seed(BaseSeedSessionRequest):
    pass


class KeepingSeed(BaseSeedSessionRequest):
    model_config = ConfigDict(extra="allow")


class NamingSeed(BaseSeedSessionRequest):
    task: str


def test_a_row_with_an_image_is_read_around_it_wherever_it_comes() -> None:
    seen: list[Any] = []

    async def take(request: Request, body: Any) -> dict[str, Any]:
        seen.append((body, await routes.body_as_it_came(request)))
        return {}

    row = orjson.dumps(payloads.row_with(payloads.image_of(100_000)))
    elsewhere = orjson.dumps({**payloads.row_with(None), "note": "x" * 100_000})
    for kind in (BaseRunRequest, Open, Seed, KeepingSeed):
        take.__annotations__["body"] = kind
        for body in (row, elsewhere):
            asyncio.run(call_of(take).answer({"type": "http", "headers": []}, body, never))
            read, came = seen.pop()
            whole = kind.model_validate_json(body)
            assert read == whole
            assert all_fields(read) == all_fields(whole)
            assert came == body if kind is KeepingSeed else came.whole() == body
    assert can_be_filled_in(Seed)
    assert not can_be_filled_in(KeepingSeed)
    assert not can_be_filled_in(NamingSeed)


def test_a_handler_that_may_not_read_a_row_is_asked_otherwise_with_all_of_it() -> None:
    asked: list[bytes] = []

    async def take(body: BaseRunRequest) -> dict[str, Any]:
        return {}

    async def otherwise(request: Request) -> Response:
        asked.append(await request.body())
        return Response(b"other")

    call, body = call_of(take), orjson.dumps({"wrong": "x" * 100_000})
    call.otherwise = otherwise
    answer: Any = asyncio.run(call.answer({"type": "http", "headers": []}, body, never))
    assert answer.body == b"other"
    assert asked == [body]


def test_what_is_wrong_with_a_row_is_said_in_the_same_words() -> None:
    async def verify(body: Ours) -> dict[str, Any]:
        return {}

    row = b'{"responses_create_params":{"input":"hi"}}'
    for response in (response_with(numbers(LONG)), response_with(None)):
        call, body = call_of(reads_only(verify)), with_response(row, response, to_hand_over=True)
        assert isinstance(body, ListsBeside | RowWithResponse)
        errors = []
        for content in (None, body):
            with pytest.raises(Exception, match="note") as caught:
                asyncio.run(call.answer({"type": "http", "headers": []}, body.whole(), never, content))
            errors.append(caught.value)
        assert type(errors[0]) is type(errors[1])
        assert str(errors[0]) == str(errors[1])


def test_rollouts_with_and_without_the_short_way_are_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(lane: Any, row: bytes) -> bytes:
        return b"".join(await one_rollout(lane, row))

    answer = payloads.with_tokens(2 * LONG)
    short = played(tmp_path, answer, work)
    monkeypatch.setattr("nemo_gym.schemas.token_lists.LONG", 10**9)
    monkeypatch.setattr("nemo_gym.http.model_answers._TOKEN_IDS", b"no such field")
    assert played(tmp_path, answer, work) == short
    assert len(orjson.loads(short)["response"]["output"][-1]["generation_token_ids"]) == 2 * LONG


LISTS = numbers(8 * LONG)
KEYS_IN_TEXT = 'says "generation_token_ids":[1,2] and \\"generation_log_probs\\":[' + "7," * 9000 + f"[{MARK}] é\n"


def written(text: str = "said", **fields: Any) -> bytes:
    response = response_with(LISTS, None, numbers(3), LISTS, text=text)
    asked = {"input": [response.output[0].model_dump(), {"role": "user", "content": text}]}
    verdict = BaseVerifyResponse.model_validate(
        {"responses_create_params": asked, "response": response.model_dump(), "reward": 0.5}
    )
    return orjson.dumps({**orjson.loads(to_json(verdict)), **fields})


@pytest.mark.parametrize("text", ["said", KEYS_IN_TEXT], ids=["plain", "keys in a text"])
def test_lists_that_are_only_stored_are_not_read_and_the_line_is_the_same(text: str) -> None:
    body = written(text)
    record = with_lists_unread(body)
    lists = [record["response"]["output"][place][name] for place in (0, 3) for name in list(LISTS)[1:]]
    assert all(isinstance(each, Unread) for each in lists)
    assert isinstance(record["responses_create_params"]["input"][0]["generation_log_probs"], Unread)
    assert to_line(record) == to_line(orjson.loads(body))
    half_an_emoji = {"agent_ref": {"name": "\ud83d"}}
    assert to_line(record | half_an_emoji) == to_line(orjson.loads(body) | half_an_emoji)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"deep": deep}
    assert to_line(record | deep) == to_line(orjson.loads(body) | deep)


@pytest.mark.parametrize(
    "body",
    [
        written().replace(b",", b", "),
        written().replace(b'"generation_log_probs":[', b'"generation_log_probs":[NaN,'),
        written().replace(b'"generation_log_probs":[', b'"generation_log_probs":[['),
        written().replace(b'"generation_token_ids":[', b'"generation_token_ids":["7",'),
        written(ng_trajectory={"steps": []}),
        written(more={"generation_token_ids": LISTS["generation_token_ids"]}),
        written()[:-1],
        written()[:50_000],
        b"[" + written() + b"]",
        orjson.dumps(orjson.loads(endpoint.message(100_000))),
    ],
    ids=["spaced", "nan", "nested", "text", "observed", "elsewhere", "torn", "torn list", "no object", "no lists"],
)
def test_what_is_not_as_we_write_it_or_is_looked_at_is_read_whole(body: bytes) -> None:
    assert with_lists_unread(body) is None


LONG_SAID = (ODD_TEXT + "".join(map(chr, range(0xD7FF))) + "x") * 2


def with_image(image: str) -> bytes:
    return orjson.dumps(payloads.row_with(image))


@pytest.mark.parametrize("text", ["said", LONG_SAID], ids=["short", "long"])
@pytest.mark.parametrize("image", ["data:image/png;base64,AAAA", payloads.image_of(50_000)], ids=["small", "large"])
def test_json_of_long_texts_and_images_is_the_same_to_the_byte(text: str, image: str) -> None:
    row = with_image(image)
    response = response_with(None, numbers(LONG), text=text)
    fields = {**orjson.loads(row), "response": response, "reward": 0.5}
    verdict = BaseVerifyResponse.model_validate(fields)
    body, spans = routes.written(verdict)
    assert body == long_way(verdict, by_alias=True, warnings=False)
    assert len(spans) == 3 + 2 * (text is LONG_SAID) + (len(image) > LONG_TEXT)
    sent = with_response(row, response)
    assert isinstance(sent, ListsBeside)
    assert sent.whole() == row[:-1] + b',"response":' + long_way(response, exclude_unset=True) + b"}"


def test_a_verifier_is_given_the_texts_and_images_themselves() -> None:
    seen: list[BaseVerifyRequest] = []

    async def verify(body: BaseVerifyRequest) -> dict[str, Any]:
        seen.append(body)
        return {}

    row = with_image(payloads.image_of(50_000))
    for given in (
        row,
        row.replace(b'"responses_create_params"', b'"note":"%b","responses_create_params"' % (b"n" * 40_000)),
    ):
        response = response_with(None, text=LONG_SAID)
        body = with_response(given, response)
        assert isinstance(body, ListsBeside)
        asyncio.run(call_of(verify).answer({"type": "http", "headers": []}, b"", never, body))
        assert seen[-1].response == response
        params = orjson.loads(given)["responses_create_params"]
        assert seen[-1].responses_create_params.model_dump(exclude_unset=True) == params
        assert str(MARK) not in seen[-1].model_dump_json()


@pytest.mark.parametrize("quotes", ['"', "\\", '\\"'])
def test_texts_with_quotes_in_them_are_never_cut_in_the_wrong_place(quotes: str) -> None:
    row = orjson.dumps({"a": "x" * LONG_TEXT + quotes, "b": "y" * LONG_TEXT * 2})
    spans = long_texts_in(row)
    assert spans is None or [orjson.loads(row[start:end]) for start, end in spans] == list(orjson.loads(row).values())


def test_what_is_stored_of_long_texts_is_what_was_written() -> None:
    fields = {**orjson.loads(with_image(payloads.image_of(50_000))), "response": response_with(None, text=LONG_SAID)}
    verdict = BaseVerifyResponse.model_validate({**fields, "reward": 0.5})
    body, spans = routes.written(verdict)
    ((_, header),) = long_parts_header(spans)
    record = with_parts_unread(body, header)
    assert sum(isinstance(part.get("text"), Unread) for part in record["response"]["output"][0]["content"]) == 1
    assert to_line(record) == body + b"\n"
    assert with_lists_read(record) == orjson.loads(body)
    start, end = spans[0]
    for wrong in (b"1-2", b"%d-%d" % (start, end - 1), b"%d-%d" % (start + 1, end), b"x", b"0-%d" % len(body)):
        assert with_parts_unread(body, wrong) is None
    assert with_parts_unread(body, b"") == orjson.loads(body)
