"""An agent on another machine, here a server on another port, and what becomes of its answers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.testing import listen, play
from responses_api_agents.remote_agent.app import RemoteAgentConfig

ROOT = Path(__file__).parents[3]
CONFIGS = [
    ROOT / "resources_servers" / "string_match" / "configs" / "string_match.yaml",
    ROOT / "responses_api_agents" / "remote_agent" / "configs" / "remote_agent.yaml",
]
ROW = {"responses_create_params": {"input": "6 * 7?", "temperature": 0.5}, "expected_answer": "42", "own_field": [7]}


def said(text: str, **fields: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"id": "r", "created_at": 1, "model": "far away", "object": "response", "output": [message], **fields}


class Far:
    """An agent that answers what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = said("42")
        self.status = 200
        self.delay_s = 0.0
        self.requests: list[tuple[Any, dict[str, str], dict[str, str]]] = []
        self.url = ""

    async def respond(self, request: Request, response: Response) -> Any:
        self.requests.append((await request.json(), dict(request.headers), dict(request.cookies)))
        response.status_code = self.status
        response.set_cookie("far", "away")
        if self.delay_s:
            threading.Event().wait(self.delay_s)
        return self.answer


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    socket = listen("127.0.0.1", 0, "far", "another port")
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        socket.close()


@pytest.fixture
def far() -> Iterator[Far]:
    agent = Far()
    app = FastAPI()
    app.post("/v1/responses")(agent.respond)
    with serving(app) as agent.url:
        yield agent


def rollout(url: str, **agent_settings: Any) -> dict[str, Any]:
    block = {"resources_server": {"name": "string_match"}, **agent_settings}
    settings = {
        "remote_agent_url": url,
        "remote_agent": {"responses_api_agents": {"remote_agent": block}},
    }
    (result,) = play(CONFIGS, [ROW], settings=settings, agent="remote_agent")
    return result


def test_the_request_travels_as_it_is_and_the_answer_is_scored(far: Far) -> None:
    result = rollout(far.url)

    ((asked, headers, cookies),) = far.requests
    assert asked == {"input": "6 * 7?", "temperature": 0.5}
    assert "authorization" not in headers
    assert any(name.endswith("___string_match") for name in cookies)
    assert (result["reward"], result["response"]["model"], result["own_field"]) == (1.0, "far away", [7])


def test_a_wrong_answer_scores_zero_and_so_does_none(far: Far) -> None:
    far.answer = said("41")
    assert rollout(far.url)["reward"] == 0.0
    far.answer = {**said(""), "output": []}
    assert rollout(far.url)["reward"] == 0.0


def test_a_key_and_headers_are_sent(far: Far) -> None:
    rollout(far.url, api_key="secret", headers={"X-Team": "blue"})

    _, headers, _ = far.requests[0]
    assert (headers["authorization"], headers["x-team"]) == ("Bearer secret", "blue")


def test_verification_can_be_skipped(far: Far) -> None:
    result = rollout(far.url, skip_verification=True, skip_verification_reward=0.25)

    assert (result["reward"], result["verification_skipped"], result["own_field"]) == (0.25, True, [7])
    assert result["response"]["model"] == "far away"
    assert "verification_skipped" not in rollout(far.url)


@pytest.mark.parametrize(
    ("answer", "status", "failure_class", "words"),
    [
        ({"detail": "busy"}, 429, "rate_limited", "busy"),
        ({"detail": "no"}, 401, "auth", "no"),
        ({"detail": "broken"}, 500, "agent_error", "broken"),
        ({"object": "chat.completion"}, 200, "agent_error", "Received an invalid response from the agent behind"),
        (said("", error={"code": "oops", "message": "out of ideas"}), 200, "agent_error", "oops: out of ideas"),
    ],
)
def test_an_agent_that_fails_fails_the_rollout(
    far: Far, answer: Any, status: int, failure_class: str, words: str
) -> None:
    far.answer, far.status = answer, status

    result = rollout(far.url)

    assert result["_ng_failure_class"] == failure_class
    assert words in result["_ng_failure_message"]
    assert "reward" not in result


def test_an_agent_that_does_not_answer_in_time_fails_the_rollout(far: Far) -> None:
    far.delay_s = 1.0

    assert rollout(far.url, timeout_s=0.2)["_ng_failure_class"] == "timeout"


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/responses", "/base/v1"])
def test_the_url_may_be_given_with_its_path(ending: str) -> None:
    reference = ResourcesServerRef(type="resources_servers", name="env")
    config = RemoteAgentConfig(
        name="a", host="h", port=1, entrypoint="app.py", resources_server=reference, url=f"http://far{ending}"
    )

    assert config.url == ("http://far/base" if "base" in ending else "http://far")


def test_a_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValidationError, match="must begin with http"):
        RemoteAgentConfig.model_validate({"url": "far:80"})
