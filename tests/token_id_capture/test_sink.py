"""Keeping the tokens of calls inside a model server: contexts, sinks, and what happens when keeping fails."""

import asyncio
import logging
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymResponse
from nemo_gym.rl import completion_of_capture
from nemo_gym.server_utils import ServerClient
from nemo_gym.token_id_capture.builder import project_main_chain_response, run_builder
from nemo_gym.token_id_capture.config import (
    TokenCaptureConfigError,
    token_id_capture_config,
    token_id_capture_enabled_for_agent,
)
from nemo_gym.token_id_capture.protocols import TokenSink, TokenSource, install_token_sink, installed_token_sink
from nemo_gym.token_id_capture.records import TokenEntry
from nemo_gym.token_id_capture.sink import (
    CaptureContext,
    ServerTokenCapture,
    capture_tokens,
    commit_entry,
    current_capture_context,
    register_call_intent,
    reset_token_sink,
    set_token_sink,
)
from nemo_gym.token_id_capture.store import TokenCaptureStore
from tests.token_id_capture.calls import call, message

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.1]}


class ListSink:
    """Keeps entries in a list; can be told to fail."""

    def __init__(self, failure: str = "") -> None:
        self.entries: list[TokenEntry] = []
        self.incomplete: list[tuple[str, str]] = []
        self.failure = failure
        self.is_closed = False

    async def put(self, entry: TokenEntry) -> None:
        if self.failure:
            raise OSError(self.failure)
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.incomplete.append((rollout_id, model_call_id))

    async def close(self) -> None:
        self.is_closed = True


def response(*items: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "r",
        "created_at": 1.0,
        "model": "m",
        "object": "response",
        "output": list(items),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def captured(answer: Any, sink: Any) -> None:
    async def serve() -> None:
        token = set_token_sink(CaptureContext("3-1", "call", sink, "policy"))
        try:
            await register_call_intent()
            await capture_tokens(answer)
        finally:
            reset_token_sink(token)

    asyncio.run(serve())


@pytest.mark.parametrize("as_model", [True, False])
def test_an_answer_becomes_one_entry(as_model: bool) -> None:
    sink, given = ListSink(), response({"type": "reasoning", "id": "rs", "summary": []}, message("hi", **TOKENS))
    captured(NeMoGymResponse.model_validate(given) if as_model else given, sink)

    entry = sink.entries[0]
    assert (entry.rollout_id, entry.model_call_id, entry.model) == ("3-1", "call", "policy")
    assert (entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs) == ([1, 2], [3], [-0.1])
    assert [item["type"] for item in entry.output_items] == ["reasoning", "message"]
    assert entry.token_item_index == 1
    assert not any(name in item for item in entry.output_items for name in TOKENS)
    assert entry.created_at > 0
    assert sink.incomplete == []


def test_the_version_of_the_weights_is_kept_and_delivered() -> None:
    sink = ListSink()
    item = message("hi", **TOKENS, weight_versions=[3, 4], prompt_digest="d")
    captured(NeMoGymResponse.model_validate(response(item)), sink)
    entry = sink.entries[0]
    assert entry.model_dump()["weight_versions"] == [3, 4]
    assert entry.output_items == [message("hi")]
    assert project_main_chain_response("3-1", run_builder([entry]))["output"][0]["weight_versions"] == [3, 4]
    assert completion_of_capture([entry], reward=1.0).message_log[1]["weight_versions"] == [3, 4]


def test_a_chat_completion_becomes_the_same() -> None:
    chat = {
        "id": "c",
        "created": 1,
        "model": "m",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi", **TOKENS}}],
    }
    sink = ListSink()
    captured(NeMoGymChatCompletion.model_validate(chat), sink)

    assert sink.entries[0].generation_token_ids == [3]
    assert sink.entries[0].output_items[0]["content"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("answer", "failure", "words"),
    [
        (response(message("hi")), "", "the answer has no token ids"),
        (response(message("a", **TOKENS), message("b", **TOKENS)), "", "2 items of one answer have token ids"),
        (response(message("a", prompt_token_ids=[1])), "", "of use only together"),
        (b"bytes", "", "the answer is a bytes"),
        (response(message("a", **TOKENS)), "disk full", "OSError: disk full"),
    ],
)
def test_what_cannot_be_kept_marks_the_rollout_and_never_fails_the_call(
    answer: Any, failure: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink(failure)
    with caplog.at_level(logging.WARNING):
        captured(answer, sink)
    assert sink.incomplete == [("3-1", "call")]
    assert words in caplog.text


def test_an_engine_may_record_the_call_itself_and_it_counts_once() -> None:
    sink = ListSink()

    async def serve() -> None:
        token = set_token_sink(CaptureContext("3-1", "call", sink))
        context = current_capture_context()
        assert context is not None
        await commit_entry(call(context.model_call_id, [5], [6], rollout_id=context.rollout_id))
        await capture_tokens(response(message("hi", **TOKENS)))
        with pytest.raises(ValueError, match="is of call"):
            await commit_entry(call("other", [5], [6]))
        reset_token_sink(token)
        with pytest.raises(RuntimeError, match="no call is being answered"):
            await commit_entry(call("call", [5], [6]))

    asyncio.run(serve())
    assert [entry.prompt_token_ids for entry in sink.entries] == [[5]]


def test_without_a_context_nothing_happens() -> None:
    async def serve() -> None:
        await register_call_intent()
        await capture_tokens(response(message("hi")))

    asyncio.run(serve())
    assert current_capture_context() is None


def test_calls_answered_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    capture = ServerTokenCapture(None, store)

    async def serve(number: int) -> None:
        with capture.call(f"{number}-0", model="m"):
            await register_call_intent()
            await asyncio.sleep(0.01 * (number % 3))
            fields = {**TOKENS, "generation_token_ids": [number]}
            await capture_tokens(response(message("hi", **fields)))

    async def serve_all() -> None:
        await asyncio.gather(*(serve(number) for number in range(12)))

    asyncio.run(serve_all())
    for number in range(12):
        snapshot = store.freeze_now(f"{number}-0")
        assert [entry.generation_token_ids for entry in snapshot.entries] == [[number]]
        assert not snapshot.incomplete


def test_a_call_that_dies_while_it_is_answered_is_missed(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    capture = ServerTokenCapture(None, store)

    async def serve() -> None:
        with capture.call("3-1"):
            await register_call_intent()
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(serve())
    assert store.freeze_now("3-1").incomplete


def test_a_call_to_a_route_nobody_knows_marks_the_rollout(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    asyncio.run(ServerTokenCapture(None, store).missed("3-1", "/v1/embeddings"))
    assert store.is_incomplete("3-1")


def test_a_call_that_cannot_be_announced_is_not_made(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    store.freeze_now("3-1")

    async def serve() -> None:
        with ServerTokenCapture(None, store).call("3-1"):
            await register_call_intent()

    with pytest.raises(RuntimeError, match="came too late"):
        asyncio.run(serve())


def test_the_configured_sink_comes_before_the_installed_one_and_that_before_the_files(tmp_path: Path) -> None:
    block: dict[str, Any] = {"enabled": True, "dir": str(tmp_path)}
    files: Any = ServerTokenCapture.from_config({"token_id_capture": block})
    assert files.sink.root == tmp_path
    named = f"{__name__}:ListSink"
    configured: Any = ServerTokenCapture.from_config(
        {"token_id_capture": {"enabled": True, "sink": named, "sink_kwargs": {"failure": "x"}}}
    )
    own = configured.sink
    assert own.failure == "x"
    installed = ListSink()
    install_token_sink(installed)
    try:
        assert installed_token_sink() is installed
        assert files.sink is installed
        assert configured.sink is own
        assert token_id_capture_config({"token_id_capture": {"enabled": True}}).enabled
        asyncio.run(files.close())
        asyncio.run(configured.close())
        assert (installed.is_closed, own.is_closed) == (False, True)
    finally:
        install_token_sink(None)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"enabled": True}, "requires a directory or sink"),
        ({"enabled": True, "dir": "here"}, "token_id_capture.dir is 'here'; it must be an absolute path"),
        ({"enabled": True, "dir": "/tmp", "fraction": 1}, "token_id_capture.fraction: Extra inputs"),
        ({"enabled": True, "sink": "no.such.module:X"}, "cannot be loaded"),
        ({"enabled": True, "sink": "json:JSONDecoder"}, "is no sink: it lacks put, mark_incomplete, close"),
        ({"enabled": True, "sink": "os:path"}, "cannot be made with token_id_capture.sink_kwargs"),
        ({"enabled": True, "sink": "json:JSONDecoder", "sink_kwargs": {"x": 1}}, "unexpected keyword argument 'x'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_one_sentence(block: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenCaptureConfigError, match=words) as caught:
        ServerTokenCapture.from_config({"token_id_capture": block})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_what_is_off_is_not_looked_at() -> None:
    for config in (None, {}, MagicMock(spec=ServerClient), {"token_id_capture": {"enabled": False, "dir": "here"}}):
        assert ServerTokenCapture.from_config(config) is None


def test_agents_are_asked_for_their_own_flag(tmp_path: Path) -> None:
    block: dict[str, Any] = {"enabled": True, "dir": str(tmp_path)}
    agents = {name: {"responses_api_agents": {"impl": {"token_id_capture": name == "yes"}}} for name in ("yes", "no")}
    config = OmegaConf.create({"token_id_capture": block, **agents, "broken": "${nowhere}"})
    assert token_id_capture_enabled_for_agent(config, "yes")
    assert not token_id_capture_enabled_for_agent(config, "no")
    assert not token_id_capture_enabled_for_agent(config, "unknown")
    assert not token_id_capture_enabled_for_agent(config, None)
    assert token_id_capture_enabled_for_agent({"token_id_capture": {**block, "all_agents": True}}, "no")
    assert not token_id_capture_enabled_for_agent({"token_id_capture": {"all_agents": True}}, "no")


def test_the_store_is_both_a_sink_and_a_source(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path)
    assert isinstance(store, TokenSink)
    assert isinstance(store, TokenSource)


def test_a_server_that_is_asked_meanwhile_does_not_take_the_call_for_its_own(tmp_path: Path) -> None:
    one, other = (ServerTokenCapture(None, TokenCaptureStore(tmp_path)) for _ in range(2))
    with one.call("3-1"):
        assert (one.is_answering, other.is_answering) == (True, False)
    assert not one.is_answering
