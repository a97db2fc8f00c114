"""Model calls of a running server, captured: every dialect, streamed or not, answered or failed."""

import asyncio
import contextlib
import json
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fastapi.responses import StreamingResponse

from nemo_gym.base_responses_api_model import (
    CaptureStore,
    ModelCallCaptureConfig,
    build_model_call_record,
    extract_token_stats,
    make_capture_store,
    model_call_capture_dirs_from_config,
    read_model_call_records,
)
from nemo_gym.errors import ConfigError
from nemo_gym.keys import MODEL_PATHS
from nemo_gym.observability.calls import rebuilt
from nemo_gym.observability.store import Observing
from nemo_gym.rollout_correlation import rollout_context
from nemo_gym.servers.capture import ModelCallCaptureMiddleware
from tests.dialects.test_sdk_clients import CHAT_TOOL, MESSAGES_TOOL, SERVER, TOOL, speaking

HI: Any = [{"role": "user", "content": "hi"}]
FAIL: Any = [{"role": "user", "content": "fail"}]
Asked = Callable[[openai.OpenAI, anthropic.Anthropic, bool], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures") / "made"


@pytest.fixture(scope="module", params=["responses", "both"])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Of a server on the short way, and of one with a handler that only the framework can call."""
    with speaking(request.param, "observability_enabled=true", f"model_call_capture_dir={folder}") as address:
        yield address


@contextlib.contextmanager
def clients(url: str, rollout_id: str) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    root = f"{url}/ng-rollout/{rollout_id}"
    with (
        openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as sdk,
        anthropic.Anthropic(base_url=root, api_key="none", max_retries=0) as other,
    ):
        yield sdk, other


def ask_responses(sdk: openai.OpenAI, other: anthropic.Anthropic, stream: bool) -> None:
    said: Any = sdk.responses.create(model="m", input="hi", tools=[TOOL], stream=stream)
    _ = list(said) if stream else None


def ask_chat(sdk: openai.OpenAI, other: anthropic.Anthropic, stream: bool) -> None:
    said: Any = sdk.chat.completions.create(model="m", messages=HI, tools=[CHAT_TOOL], stream=stream)
    _ = list(said) if stream else None


def ask_messages(other: openai.OpenAI, sdk: anthropic.Anthropic, stream: bool) -> None:
    said: Any = sdk.messages.create(model="m", max_tokens=9, messages=HI, tools=[MESSAGES_TOOL], stream=stream)
    _ = list(said) if stream else None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "ask"), [("responses", ask_responses), ("chat", ask_chat), ("messages", ask_messages)]
)
def test_a_call_is_on_disk_when_its_answer_has_ended(
    url: str, folder: Path, dialect: str, ask: Asked, stream: bool, request: pytest.FixtureRequest
) -> None:
    rollout_id = f"{dialect}-{stream}-{url.rpartition(':')[2]}"
    with clients(url, rollout_id) as sdks:
        for _ in range(2):
            ask(*sdks, stream)

    first, second = read_model_call_records(CaptureStore(folder), rollout_id)

    assert first.model_call_id != second.model_call_id
    assert [first.call_index, second.call_index] == [0, 1]
    assert (first.dialect, first.status_code, first.error_category) == (dialect, 200, None)
    assert first.model_ref is not None
    assert first.model_ref.name == "policy"
    assert [call["name"] for call in first.tool_calls] == ["weather"]
    assert first.tool_calls[0]["arguments"] == {"city": "Oslo"}
    assert first.reasoning_content == "Let me see."
    if not (dialect == "chat" and stream):  # whose usage is streamed only to those who ask for it
        assert (first.tokens_in, first.tokens_out, first.tokens_total) == (11, 7, 18)
    assert first.request is not None
    assert first.request["model"] == "m"
    assert first.started_at is not None
    assert first.completed_at is not None
    assert first.completed_at >= first.started_at
    assert (first.latency_ttft_ms is not None) is stream
    assert (first.response_raw is not None) is stream


def test_a_call_that_names_no_rollout_is_not_captured(url: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
        assert sdk.responses.create(model="m", input="hi").output_text == "You said: hi"
    assert sorted(folder.iterdir()) == before


def test_failures_are_captured_with_what_kind_they_are(url: str, folder: Path) -> None:
    rollout_id = f"failing-{url.rpartition(':')[2]}"
    unheard_of: Any = [{"role": "user", "content": [{"type": "x"}]}]
    with clients(url, rollout_id) as (sdk, other):
        with pytest.raises(openai.RateLimitError):
            sdk.responses.create(model="m", input="fail")
        list(sdk.responses.create(model="m", input="fail", stream=True))
        with pytest.raises(anthropic.BadRequestError):
            other.messages.create(model="m", max_tokens=9, messages=unheard_of)
    address, is_json = f"{url}/ng-rollout/{rollout_id}/v1/responses", {"content-type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, b'{"input"', is_json), timeout=60)
    refused.value.close()

    calls = read_model_call_records(CaptureStore(folder), rollout_id)

    assert [call.error_category for call in calls] == ["rate_limit", "upstream_error", "client_error", "client_error"]
    assert calls[0].status_code == 429
    assert calls[1].status_code == 200
    assert calls[3].request_raw == '{"input"'


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_request_with_a_number_that_json_does_not_know_is_kept_as_text(url: str, folder: Path, word: str) -> None:
    rollout_id = f"odd{word.strip('-')}{len(word)}-{url.rpartition(':')[2]}"
    body = b'{"model":"m","input":"hi","metadata":{},"temperature":%b}' % word.encode()
    asked = urllib.request.Request(
        f"{url}/ng-rollout/{rollout_id}/v1/responses", body, {"content-type": "application/json"}
    )
    try:
        urllib.request.urlopen(asked, timeout=30).close()
    except urllib.error.HTTPError as refused:
        refused.close()
    (call,), invalid = CaptureStore(folder).read_available(rollout_id)
    assert (invalid, call[1]["request"], call[1]["request_raw"]) == (0, None, body.decode())


@pytest.mark.parametrize("rollout_id", ["a%20b", "%C3%A4"])
def test_an_id_that_no_file_can_have_is_answered_all_the_same(url: str, rollout_id: str) -> None:
    with clients(url, rollout_id) as (sdk, _):
        assert sdk.responses.create(model="m", input="hi").output_text == "You said: hi"


def test_a_store_that_cannot_be_written_to_costs_the_capture_and_not_the_answer(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    with speaking("responses", "observability_enabled=true", f"model_call_capture_dir={folder}") as url:
        (folder / "3-1.capture.jsonl").mkdir(parents=True)  # nobody, root neither, can append to that
        with clients(url, "3-1") as (sdk, _):
            assert sdk.responses.create(model="m", input="hi").output_text == "You said: hi"

    assert CaptureStore(folder).is_incomplete("3-1")


def test_calls_that_were_answered_are_in_the_record_although_the_server_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(SERVER), "responses", "observability_enabled=true"]
    command.append(f"model_call_capture_dir={tmp_path}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with clients(f"http://127.0.0.1:{int(server.stdout.readline())}", "3-1") as (sdk, _):
            answers = [sdk.responses.create(model="m", input=text).id for text in ("one", "two")]
            server.kill()
            server.wait()
            with pytest.raises(openai.APIConnectionError):
                sdk.responses.create(model="m", input="three")

    row = {"_ng_task_index": 3, "_ng_rollout_index": 1}
    record: dict[str, Any] = {**row, "_ng_failure_class": "connection_failed"}
    Observing([tmp_path]).fold(row, record)
    calls = record["ng_trajectory"]["model_calls"]
    assert [call["response_metadata"]["response_id"] for call in calls] == answers
    assert [call["request"]["input"] for call in calls] == ["one", "two"]
    assert record["ng_model_call_capture"]["metrics"]["num_calls"] == 2
    assert "gaps" not in record["ng_model_call_capture"]


def test_nothing_is_captured_unless_it_is_asked_for(tmp_path: Path) -> None:
    with (
        speaking("responses", "observability_enabled=false", f"model_call_capture_dir={tmp_path}") as url,
        clients(url, "3-1") as (sdk, _),
    ):
        sdk.responses.create(model="m", input="hi")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"observability_enabled": True}, "model_call_capture_dir is required when observability_enabled=true"),
        ({"observability_enabled": True, "model_call_capture_dir": "here"}, "must be an absolute path"),
    ],
)
def test_a_config_that_does_not_say_where_to_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelCallCaptureConfig(**config)
    with pytest.raises(ConfigError, match=words):
        model_call_capture_dirs_from_config(config)


def test_what_is_neither_true_nor_false_is_not_taken_for_true(tmp_path: Path) -> None:
    folder = {"model_call_capture_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^observability_enabled is 'maybe'; it must be true or false$"):
        model_call_capture_dirs_from_config({"observability_enabled": "maybe", **folder})
    with pytest.raises(ConfigError, match=r"^model_call_capture_dir is 7; it must be an absolute path$"):
        model_call_capture_dirs_from_config({"observability_enabled": True, "model_call_capture_dir": 7})
    assert model_call_capture_dirs_from_config({"observability_enabled": "true", **folder}) == [tmp_path]
    assert not ModelCallCaptureConfig.of({"observability_enabled": "false", **folder}).observability_enabled


def test_a_folder_that_cannot_be_made_is_told_and_done_without(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    config = ModelCallCaptureConfig(observability_enabled=True, model_call_capture_dir=tmp_path / "file" / "below")

    assert make_capture_store(config) is None
    assert "model calls are not captured" in caplog.text
    assert model_call_capture_dirs_from_config(None) == model_call_capture_dirs_from_config({}) == []


def test_a_store_keeps_calls_and_says_what_is_damaged(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    store.record("3-1", {"a": 1})
    store.record("3-1", {"a": 2})
    assert store.read("3-1") == [{"a": 1}, {"a": 2}]
    path = store.path_for("3-1")
    assert stat.S_ISREG(path.stat().st_mode)
    path.write_bytes(path.read_bytes().replace(b'{"a":1}', b'{"a":') + b"[]\n")

    assert store.read_available("3-1") == ([(1, {"a": 2})], 2)
    with pytest.raises(ValueError, match="2 damaged lines"):
        store.read("3-1")
    assert store.read("never") == []
    for bad in ("../x", "", "a b", "a\n"):
        with pytest.raises(ValueError, match="Invalid rollout id"):
            store.path_for(bad)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 3, "output_tokens": 4}, (3, 4, 7, None, None)),
        ({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 9}, (3, 4, 9, None, None)),
        ({"input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 1}, (8, 1, 9, None, 5)),
        ({"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}, (None, None, None, None, 0)),
        ({"output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}, (None, 2, None, 1, None)),
        ({"input_tokens": True, "output_tokens": -1}, (None, None, None, None, None)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, (3, None, None, None, 2)),
        (None, (None, None, None, None, None)),
    ],
)
def test_what_a_usage_does_not_tell_stays_unknown(usage: Any, expected: tuple[Any, ...]) -> None:
    stats = extract_token_stats(usage)
    names = ("tokens_in", "tokens_out", "tokens_total", "tokens_reasoning", "cached_tokens")
    assert tuple(stats[name] for name in names) == expected


@pytest.mark.parametrize("arguments", ["{oops", '{"a":' + "[" * 1000 + "]" * 1000 + "}"], ids=["no JSON", "too deep"])
def test_arguments_that_no_parser_can_read_are_kept_as_they_are(arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "n", "arguments": arguments}
    record = build_model_call_record({"response": {"output": [call]}}, call_index=4)
    assert record.tool_calls == [{"call_id": "c", "name": "n", "arguments": {"_raw": arguments}}]
    assert record.call_index == 4


def test_a_stream_that_breaks_off_is_rebuilt_as_far_as_it_came() -> None:
    chunk = {"id": "c", "model": "m", "choices": [{"delta": {"content": "Hel"}}]}
    assert rebuilt("chat", f"data: {json.dumps(chunk)}\n\n".encode()).ending is None
    start = {"type": "message_start", "message": {"id": "msg", "usage": {"input_tokens": 1}}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": "n", "input": {}}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{oo"}}
    lines = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in (start, block, delta))
    streamed = rebuilt("messages", lines.encode())
    assert streamed.ending is None
    assert streamed.response is not None
    assert streamed.response["content"][0]["input"] == {"_raw": "{oo"}
    assert rebuilt("responses", b"event: error\ndata: {}\n\n").ending == "error"
    assert rebuilt("chat", b'data: {"error": {"message": "no"}}\n\n').ending == "error"
    assert rebuilt("chat", b"\r\n: keep-alive\r\n\r\ndata: [DONE]\r\n\r\n").ending == "complete"


@pytest.mark.parametrize(
    ("media_type", "category", "text"),
    [("text/event-stream", "stream_truncated", "Hel"), ("application/json", "connection", None)],
)
def test_a_call_whose_caller_hangs_up_before_the_answer_ends_is_captured(
    tmp_path: Path, media_type: str, category: str, text: str | None
) -> None:
    chunk = {"id": "c", "model": "m", "choices": [{"delta": {"content": "Hel"}}]}

    async def run() -> None:
        is_first_out = asyncio.Event()

        async def said() -> AsyncIterator[str]:
            yield f"data: {json.dumps(chunk)}\n\n"
            is_first_out.set()
            await asyncio.Event().wait()

        async def receive() -> Any:
            await is_first_out.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        app = ModelCallCaptureMiddleware(
            StreamingResponse(said(), media_type=media_type), CaptureStore(tmp_path), "policy"
        )
        with rollout_context("3-1"):
            await app({"type": "http", "path": "/v1/chat/completions"}, receive, send)

    asyncio.run(run())

    (call,) = CaptureStore(tmp_path).read("3-1")
    assert call["error_category"] == category
    assert (call["response"] and call["response"]["choices"][0]["message"]["content"]) == text


@pytest.mark.parametrize("dialect", MODEL_PATHS.values())
def test_streams_of_every_dialect_are_put_together(dialect: str) -> None:
    assert rebuilt(dialect, b"") == (None, None)


def test_streams_of_an_unknown_dialect_are_taken_for_no_other() -> None:
    with pytest.raises(ValueError, match="'klingon'"):
        rebuilt("klingon", b"data: {}\n\n")
