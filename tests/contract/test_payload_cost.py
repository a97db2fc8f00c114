"""How often a rollout's payload is gone over on its way, whatever its size: in passes and copies, not in seconds.

A rollout of `example_single_tool_call` is played through the real servers in one event loop, and its answer read and
written as the collector does. A pass is a call that reads or writes JSON of at least half the payload. Whoever saves
one lowers the figures here; nothing may add one unnoticed.
"""

import asyncio
import sys
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, TypeAdapter

from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.http.request import get_json_to_store
from nemo_gym.http.transports.memory import Answer
from nemo_gym.http.transports.response import LocalResponse
from nemo_gym.jsonl import to_pieces
from nemo_gym.server_utils import json_bytes
from nemo_gym.servers import routes
from nemo_gym.servers.direct import DirectLane
from tests.contract.test_rollout_cost import AGENT, MOST_CALLS, lanes
from tests.perf.side_by_side import endpoint, payloads, processes

MOST_PASSES = {"dumps": 2, "to_json": 1}
"""Of a text: the endpoint's answer is copied, which orjson is asked about, and the verdict written, which it does for
`to_json`. The verifier is given the text as it is, and the collector writes what came."""
MOST_PASSES_WITH_TOKENS = {"loads": 1, "lists": 1, "to_json": 1}
"""Of lists of numbers: validated objects are made of what was read, and go to the verifier as they are. The one writing
of the lists is what `to_json` does; the collector writes what came."""
MOST_PASSES_WITH_IMAGE = {"dumps": 4, "to_json": 1}
"""Of a row with an image: copied where it comes in, as a text is, written for each of the two model calls, and with the
verdict. It is validated around the image, by the agent as by the environment."""
MOST_HELD = 3.4
"""What a rollout may keep in memory while it is scored, in payloads."""
SMALL, MIDDLE, LARGE = 1_000, 100_000, 1_000_000
TOKENS = 32 * 1024


class Passes:
    """Counts calls that go over a lot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.from_bytes = sys.maxsize
        self.left_as_written = 0
        monkeypatch.setattr(orjson, "Fragment", self._fragment(orjson.Fragment))
        monkeypatch.setattr(orjson, "loads", self._reads("loads", orjson.loads))
        monkeypatch.setattr(orjson, "dumps", self._writes("dumps", orjson.dumps))
        monkeypatch.setattr(routes, "written", self._writes("to_json", routes.written))
        monkeypatch.setattr(TypeAdapter, "validate_json", self._method("validate_json", TypeAdapter.validate_json))
        in_route = self._method("validate_json", routes.DirectCall._validated)
        monkeypatch.setattr(routes.DirectCall, "_validated", in_route)
        validate = BaseModel.model_validate_json.__func__  # type: ignore[attr-defined]
        monkeypatch.setattr(BaseModel, "model_validate_json", classmethod(self._method("validate_json", validate)))
        in_agent = "responses_api_agents.simple_agent.verdicts.json_bytes"
        monkeypatch.setattr(in_agent, self._writes("json_bytes", json_bytes))

    def _note(self, name: str, size: int) -> None:
        if size >= self.from_bytes:
            self.counts[name] += 1

    def _reads(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(content: Any, *args: Any, **options: Any) -> Any:
            self._note(name, len(content))
            return function(content, *args, **options)

        return counted

    def _method(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(owner: Any, content: Any, *args: Any, **options: Any) -> Any:
            self._note(name, len(content))
            return function(owner, content, *args, **options)

        return counted

    def _fragment(self, kind: Any) -> Callable[[bytes], Any]:
        def counted(written: bytes) -> Any:
            self.left_as_written += len(written)
            self._note("copies", len(written))
            return kind(written)

        return counted

    def _writes(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(content: Any, *args: Any, **options: Any) -> Any:
            self.left_as_written = 0
            result = function(content, *args, **options)
            written = result[0] if isinstance(result, tuple) else result
            is_list = name == "dumps" and isinstance(content, list)
            # the lists of one item are three parts of one pass, the longest of which is nearly all of it
            self._note("lists" if is_list else name, len(written) - self.left_as_written)
            return result

        return counted


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


async def one_rollout(lane: DirectLane, row: bytes) -> list[bytes | memoryview]:
    """The line that the collector writes, in the pieces that it writes."""
    call = lane.find("POST", "/run")
    assert call is not None
    scope = {"type": "http", "method": "POST", "path": "/run", "headers": [], "query_string": b""}
    answer = await lane.answer(call, scope, row, asyncio.Event().wait)  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    response: Any = LocalResponse("POST", "http://127.0.0.1:1/run", answer.status, answer.headers, answer.body)
    record = await get_json_to_store(response)
    assert record["reward"] == 1.0
    return to_pieces({**record, "_ng_task_index": 0})


def played(
    tmp_path: Path, answer: bytes, work: Callable[[DirectLane, bytes], Awaitable[Any]], image: str | None = None
) -> Any:
    """What `work` returns, done with servers whose endpoint says `answer` last; the row shows the model an image."""
    path = tmp_path / "answer.json"
    path.write_bytes(answer)
    row = orjson.dumps(payloads.row_with(image))

    async def main(port: int) -> Any:
        lane = lanes(port)[AGENT]
        for _ in range(2):  # what is kept between rollouts is there then
            await one_rollout(lane, row)
        return await work(lane, row)

    with processes.helper("endpoint.py", "--answer", str(path)) as (_, port):
        return asyncio.run(main(port))


def counted(tmp_path: Path, answer: bytes, passes: Passes, image: str | None = None) -> Counter[str]:
    async def work(lane: DirectLane, row: bytes) -> Counter[str]:
        passes.from_bytes = max(len(answer), len(row)) // 2
        passes.counts.clear()
        await one_rollout(lane, row)
        return Counter(passes.counts)

    return played(tmp_path, answer, work, image)  # type: ignore[no-any-return]


def assert_no_more(found: Counter[str], most: dict[str, int]) -> None:
    assert not {name: times for name, times in found.items() if times > most.get(name, 0)}, f"{dict(found)} > {most}"


@pytest.mark.parametrize("size", [MIDDLE, LARGE])
def test_a_long_text_is_gone_over_no_more_often_than_it_was(tmp_path: Path, passes: Passes, size: int) -> None:
    assert_no_more(counted(tmp_path, endpoint.message(size), passes), MOST_PASSES)


@pytest.mark.parametrize("size", [MIDDLE, LARGE])
def test_an_image_is_gone_over_no_more_often_than_it_was(tmp_path: Path, passes: Passes, size: int) -> None:
    found = counted(tmp_path, endpoint.message(), passes, payloads.image_of(size))
    assert_no_more(found, MOST_PASSES_WITH_IMAGE)


def test_lists_of_numbers_are_read_once_and_written_once(tmp_path: Path, passes: Passes) -> None:
    assert_no_more(counted(tmp_path, payloads.with_tokens(TOKENS), passes), MOST_PASSES_WITH_TOKENS)


def test_how_much_a_rollout_carries_does_not_change_how_many_calls_it_makes(tmp_path: Path) -> None:
    async def work(lane: DirectLane, row: bytes) -> int:
        calls = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            await one_rollout(lane, row)
        finally:
            sys.setprofile(None)
        return calls

    small, middle, large = (played(tmp_path, endpoint.message(size), work) for size in (SMALL, MIDDLE, LARGE))
    with_tokens = played(tmp_path, payloads.with_tokens(TOKENS), work)
    assert small <= MOST_CALLS + 20  # the collector's part
    pieces = 100  # in which a megabyte may come over a socket, each with a few calls
    parsed = 60  # an answer that comes in pieces is read by a parser
    beside = 160  # a long text is found and left beside its JSON on each of its ways
    assert middle <= small + parsed + beside + 2 * pieces
    assert large <= small + parsed + beside + 5 * pieces
    assert with_tokens <= small + parsed + 6 * pieces


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_rollout_keeps_little_more_in_memory_than_its_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    answer = endpoint.message(LARGE) if kind == "text" else payloads.with_tokens(TOKENS)
    held: list[int] = []
    write = routes.written

    def noted(result: Any, *args: Any) -> Any:
        if tracemalloc.is_tracing() and isinstance(result, BaseVerifyResponse):
            held.append(tracemalloc.get_traced_memory()[0])
        return write(result, *args)

    monkeypatch.setattr(routes, "written", noted)

    async def work(lane: DirectLane, row: bytes) -> int:
        tracemalloc.start()
        try:
            await one_rollout(lane, row)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    left = played(tmp_path, answer, work)
    assert len(held) == 1
    assert held[0] / len(answer) <= MOST_HELD
    assert left / len(answer) < 0.2
