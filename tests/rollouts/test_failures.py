"""Real servers, one behind the other, that fail in every way there is a class for."""

import asyncio
import logging
import math
import pickle
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from multidict import CIMultiDict, CIMultiDictProxy
from omegaconf import OmegaConf
from yarl import URL

from nemo_gym.collect.failures import (
    RetryPauses,
    failure_of,
    fault_in,
    request_debug_summary,
    rollout_name,
    rollout_timed_out,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ServerRefNotFoundError
from nemo_gym.http.client import ServerClient
from nemo_gym.http.errors import ServerResponseError
from nemo_gym.http.request import get_response_json, raise_for_status
from nemo_gym.http.session import use_client_settings
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.log import LOGGER_NAME, setup_logging
from nemo_gym.runs.record import Failure, FailureClass
from nemo_gym.servers.failures import Failures
from nemo_gym.servers.gateway import Duties, Gateway
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig

ROW = {"_ng_task_index": 7, "_ng_rollout_index": 1, "agent_ref": {"name": "agent"}, "secret": "of the row"}


def client_of(**ports: int) -> ServerClient:
    blocks = {
        name: {"resources_servers": {"impl": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}
        for name, port in ports.items()
    }
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(blocks)
    )


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """An app on a loopback port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


def app_that(path: str, behave: Callable[[], Awaitable[Any]], name: str | None = None) -> FastAPI:
    """An app that does one thing; with a name it tells of its errors as our servers do."""
    app = FastAPI()
    if name is not None:
        app.add_middleware(Gateway, duties=Duties(name, failures=Failures(name, name)))
    app.post(path, response_model=None)(behave)
    return app


def agent_that(behave: Callable[[], Awaitable[Any]]) -> FastAPI:
    return app_that("/run", behave, "agent")


def agent_asking(model_port: int) -> FastAPI:
    async def run() -> Any:
        client = client_of(policy=model_port)
        answer = await client.post(server_name="policy", url_path="/v1/responses", json={"input": "hello"})
        await raise_for_status(answer)
        return await get_response_json(answer)

    return agent_that(run)


def openai_model(endpoint_port: int) -> FastAPI:
    """The real model server, in front of an endpoint."""
    settings: dict[str, Any] = {
        "name": "policy",
        "host": "127.0.0.1",
        "port": 1,
        "entrypoint": "app.py",
        "openai_base_url": f"http://127.0.0.1:{endpoint_port}/v1",
        "openai_api_key": "key",
        "openai_model": "some-model",
    }
    return OpenAIModel(config=OpenAIModelConfig(**settings), server_client=client_of()).complete_app()


async def run_row(client: ServerClient, **options: Any) -> Any:
    answer = await client.post(server_name="agent", url_path="/run", json=ROW, **options)
    await raise_for_status(answer)
    return await get_response_json(answer)


async def failure_behind_agent(model: FastAPI) -> Failure:
    """What the collector makes of a rollout whose agent asks that model server."""
    async with listening(model) as model_port, listening(agent_asking(model_port)) as agent_port:
        return await failure_at(client_of(agent=agent_port))


async def failure_behind_model(status: int, body: str) -> Failure:
    """The same when it is the endpoint behind the real model server that answers so."""

    async def respond() -> Response:
        return Response(body, status)

    async with listening(app_that("/v1/responses", respond)) as endpoint_port:
        return await failure_behind_agent(openai_model(endpoint_port))


async def failure_at(client: ServerClient, **options: Any) -> Failure:
    try:
        answer = await run_row(client, **options)
    except Exception as error:  # noqa: BLE001 - which one it is, is what the test is about
        return failure_of(error, "agent")
    pytest.fail(f"it did not fail: {answer}")


@pytest.fixture(autouse=True)
def _impatient() -> Any:
    settings = GlobalAIOHTTPAsyncClientConfig(
        http_retry_max_tries=2, http_retry_first_delay_s=0.01, model_retry_max_tries=2, model_retry_first_delay_s=0.01
    )
    use_client_settings(settings)
    yield
    use_client_settings(None)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, "wrong key", FailureClass.AUTH),
        (403, "not yours", FailureClass.AUTH),
        (404, '{"error": {"code": "model_not_found"}}', FailureClass.MODEL_NOT_FOUND),
        (404, "The model `x` does not exist.", FailureClass.MODEL_NOT_FOUND),
        (404, "Not Found", FailureClass.MODEL_NOT_FOUND),
        (400, "invalid model name: x", FailureClass.MODEL_NOT_FOUND),
        (408, "", FailureClass.TIMEOUT),
        (422, "temperature must be a number", FailureClass.HTTP_4XX),
        (429, "slow down", FailureClass.RATE_LIMITED),
        (500, "boom", FailureClass.AGENT_ERROR),
        (502, "", FailureClass.CONNECT),
        (503, "", FailureClass.CONNECT),
        (504, "", FailureClass.TIMEOUT),
    ],
)
def test_the_status_of_a_model_endpoint_decides_two_servers_away(
    status: int, body: str, expected: FailureClass
) -> None:
    failure = asyncio.run(failure_behind_model(status, body))

    assert failure.failure_class is expected
    assert (failure.status, failure.server) == (status, "policy")


def test_a_refused_key_names_the_setting_in_the_message() -> None:
    failure = asyncio.run(failure_behind_model(401, "wrong key"))

    assert "policy_api_key" in failure.message


def test_a_model_endpoint_that_cannot_be_reached_is_a_connect_failure_of_the_model_server() -> None:
    failure = asyncio.run(failure_behind_agent(openai_model(unused_port())))

    assert failure.failure_class is FailureClass.CONNECT
    assert failure.server == "policy"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (type("JudgeUnavailableError", (Exception,), {}), FailureClass.JUDGE_FAILED),
        (type("RateLimitError", (Exception,), {}), FailureClass.RATE_LIMITED),
        (type("APITimeoutError", (Exception,), {}), FailureClass.TIMEOUT),
        (TimeoutError, FailureClass.TIMEOUT),
        (KeyError, FailureClass.AGENT_ERROR),
    ],
)
def test_the_class_of_an_exception_in_another_process_decides(raised: type[Exception], expected: FailureClass) -> None:
    async def respond() -> Any:
        raise raised("in the model server")

    failure = asyncio.run(failure_behind_agent(app_that("/v1/responses", respond, "policy")))

    assert failure.failure_class is expected
    assert failure.server == "policy"


def test_an_error_of_the_agent_itself_names_the_agent() -> None:
    async def run() -> Any:
        raise HTTPException(422, "this row lacks a field")

    async def scenario() -> Failure:
        async with listening(agent_that(run)) as port:
            return await failure_at(client_of(agent=port))

    failure = asyncio.run(scenario())

    assert (failure.failure_class, failure.status, failure.server) == (FailureClass.HTTP_4XX, 422, "agent")
    assert "this row lacks a field" in failure.message


def test_an_agent_without_a_run_route_is_no_missing_model() -> None:
    async def scenario() -> Failure:
        async with listening(FastAPI()) as port:
            return await failure_at(client_of(agent=port))

    failure = asyncio.run(scenario())

    assert (failure.failure_class, failure.status) == (FailureClass.HTTP_4XX, 404)


def test_an_agent_that_does_not_listen_is_a_connect_failure() -> None:
    failure = asyncio.run(failure_at(client_of(agent=unused_port())))

    assert (failure.failure_class, failure.status, failure.server) == (FailureClass.CONNECT, None, "agent")


def test_an_agent_that_hangs_up_is_gone() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def scenario() -> Failure:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            return await failure_at(client_of(agent=server.sockets[0].getsockname()[1]))

    assert asyncio.run(scenario()).failure_class is FailureClass.SERVER_GONE


def test_an_agent_that_does_not_answer_in_time_is_a_timeout() -> None:
    async def run() -> None:
        await asyncio.sleep(0.4)

    async def scenario() -> Failure:
        async with listening(agent_that(run)) as port:
            return await failure_at(client_of(agent=port), timeout=aiohttp.ClientTimeout(total=0.1))

    assert asyncio.run(scenario()).failure_class is FailureClass.TIMEOUT


def test_an_answer_that_is_not_json_is_an_invalid_response() -> None:
    async def run() -> Any:
        return Response(b"<html>hello", media_type="text/html")

    async def scenario() -> Failure:
        async with listening(agent_that(run)) as port:
            return await failure_at(client_of(agent=port))

    failure = asyncio.run(scenario())

    assert failure.failure_class is FailureClass.INVALID_RESPONSE
    assert "<html>hello" in failure.message


def test_a_row_for_an_agent_nobody_configured_is_a_connect_failure() -> None:
    failure = asyncio.run(failure_at(client_of(other=1)))

    assert failure.failure_class is FailureClass.CONNECT
    assert "agent" in failure.message


@pytest.mark.parametrize("answer", [None, [1, 2], "text", 3])
def test_an_answer_that_is_no_object_is_an_invalid_response(answer: object) -> None:
    failure = fault_in(answer, "agent")

    assert failure is not None
    assert failure.failure_class is FailureClass.INVALID_RESPONSE
    assert failure.server == "agent"


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, None, "NaN", "1.0", [1.0], {"value": 1.0}, 10**400, [math.nan]]
)
def test_a_reward_that_is_no_finite_number_is_an_invalid_reward(reward: object) -> None:
    failure = fault_in({"reward": reward}, "agent")

    assert failure is not None
    assert failure.failure_class is FailureClass.INVALID_REWARD
    assert not failure.failure_class.is_infrastructure
    assert "no finite number" in failure.message
    assert len(failure.message) < 600


@pytest.mark.parametrize(
    "answer",
    [
        {"reward": 0},
        {"reward": -1.5},
        {"reward": True},
        {"reward": 1e308},
        {"without": "any"},
        {"reward": None, "_ng_failure_class": "of_its_own"},
        {"reward": None, "_ng_no_persist": True},
    ],
)
def test_an_answer_that_scores_or_reports_a_failure_itself_is_sound(answer: dict[str, Any]) -> None:
    assert fault_in(answer, "agent") is None


def test_a_plain_aiohttp_error_is_classified_by_its_status() -> None:
    request = aiohttp.RequestInfo(URL("http://x/"), "POST", CIMultiDictProxy(CIMultiDict()), URL("http://x/"))
    error = aiohttp.ClientResponseError(request, (), status=429, message="busy")

    failure = failure_of(error, "agent")

    assert (failure.failure_class, failure.status, failure.server) == (FailureClass.RATE_LIMITED, 429, "agent")


def test_messages_are_cut_to_two_thousand_characters() -> None:
    assert len(failure_of(ValueError("x" * 10_000), "agent").message) == 2_000
    invalid = fault_in("x" * 10_000, "agent")
    assert invalid is not None
    assert len(invalid.message) == 2_000


def test_a_long_answer_is_quoted_beyond_the_usual_excerpt() -> None:
    body = b"a" * 800 + b" the cause"

    assert "the cause" in failure_of(ServerResponseError("http://x/run", 500, body), "agent").message


def test_an_exception_without_words_is_named() -> None:
    assert failure_of(KeyError(), "agent").message == "KeyError"


def test_a_timeout_of_the_rollout_names_the_option() -> None:
    failure = rollout_timed_out(5, "agent")

    assert failure.failure_class is FailureClass.TIMEOUT
    assert "rollout_timeout_s=5" in failure.message


def test_pauses_grow_up_to_a_bound_and_vary() -> None:
    pauses = RetryPauses(first_s=2, longest_s=60)

    for attempts, whole in [(1, 2), (2, 4), (3, 8), (6, 60), (1_000, 60)]:
        drawn = [pauses.after(attempts) for _ in range(50)]
        assert whole / 2 <= min(drawn) < max(drawn) <= whole


def test_the_debug_summary_holds_the_identity_and_nothing_else() -> None:
    assert request_debug_summary(ROW) == {"_ng_task_index": 7, "_ng_rollout_index": 1, "agent_name": "agent"}


@pytest.mark.parametrize("row", [{}, {"agent_ref": None}, {"agent_ref": "agent"}, {"agent_ref": {"name": None}}])
def test_the_debug_summary_leaves_out_what_is_missing(row: dict[str, Any]) -> None:
    assert request_debug_summary(row) == {}


def test_a_rollout_is_named_without_control_characters() -> None:
    row = {**ROW, "agent_ref": {"name": "a\x1b[31m"}}

    assert rollout_name(row) == "a\\x1b[31m, task 7, rollout 1"


def test_failures_survive_pickling() -> None:
    failure = failure_of(ServerRefNotFoundError("no server is called x"), "x")

    assert pickle.loads(pickle.dumps(failure)) == failure


def test_a_refusal_behind_two_servers_is_one_line_in_the_endpoints_own_words() -> None:
    body = '{"error": {"message": "Incorrect \\"key\\": 键", "type": "invalid_request_error"}}'

    failure = asyncio.run(failure_behind_model(401, body))

    assert re.fullmatch(
        r"The model endpoint http://127\.0\.0\.1:\d+/v1/responses refused the API key \(status 401\): "
        r'Incorrect "key": 键; correct policy_api_key \(openai_api_key of policy\)',
        failure.message,
    )
    assert (failure.server, failure.status) == ("policy", 401)


def test_an_exception_is_one_line_for_the_collector_and_one_traceback_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> Any:
        raise ValueError("out of order")

    async def twice() -> list[Failure]:
        async with listening(agent_that(run)) as port:
            return [await failure_at(client_of(agent=port)) for _ in range(2)]

    package = logging.getLogger(LOGGER_NAME)
    handlers, level = list(package.handlers), package.level
    setup_logging()
    try:
        failures = asyncio.run(twice())
    finally:
        package.handlers[:], package.level = handlers, level

    assert failures[0] == failures[1]
    assert re.fullmatch(
        r"/run raised ValueError: out of order, rollouts/test_failures\.py line \d+; its log has the traceback",
        failures[0].message,
    )
    assert capsys.readouterr().err.count("Traceback") == 1
