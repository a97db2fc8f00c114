"""The finished rollouts of a run by agent, in task order, read from their file whenever they are asked for.

A run may hold more than fits into memory. What is kept of a rollout is its place in the file and its
numbers; its content passes through on its way to the agent that computes the metrics.
"""

import json
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.jsonl import Line, iter_lines, parse
from nemo_gym.keys import RESPONSE_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.rollouts.compact import KeySet
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import Result, agent_name_of, key_or_none, task_order

_NOT_SENT = frozenset(
    {
        RESPONSE_KEY_NAME,
        RESPONSES_CREATE_PARAMS_KEY_NAME,
        "ng_agent_observations",
        "ng_model_call_capture",
        "ng_trajectory",
    }
)
_HEAD, _TAIL = b'{"verify_responses":[', b"]}"
_PIECE_BYTES = 1 << 16


def stripped(result: Mapping[str, Any]) -> Result:
    """A result without its bulk: of the response only the token usage is kept."""
    record = {key: value for key, value in result.items() if key not in _NOT_SENT}
    response = result.get(RESPONSE_KEY_NAME)
    usage = response.get("usage") if isinstance(response, dict) else None
    if usage:
        record[RESPONSE_KEY_NAME] = {"usage": usage}
    return record


def sendable(record: Mapping[str, Any]) -> bytes:
    """A record as JSON that every parser takes: half a character, which models do produce, becomes a question mark."""
    try:
        return orjson.dumps(record)
    except orjson.JSONEncodeError:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="replace")


class StoredRollouts(Collection[Result]):
    """The finished rollouts of one agent, stripped, in task order; each iteration reads the file."""

    def __init__(self, path: Path) -> None:
        from nemo_gym.metrics.columns import RolloutTable  # loads numpy

        self._path = path
        self._places: list[tuple[Any, ...]] = []
        self._is_sorted = True
        self._records_bytes = 0
        self.table = RolloutTable()
        """The numbers of all of them."""

    def add(self, line: Line, result: Result) -> None:
        """Take in the result that stands on `line`."""
        record = stripped(result)
        self._places.append((*task_order(result), line.start))
        self._is_sorted = False
        self._records_bytes += len(sendable(record))
        self.table.add(record)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, record: object) -> bool:
        return any(other == record for other in self)

    def __iter__(self) -> Iterator[Result]:
        if not self._is_sorted:
            self._places.sort()
            self._is_sorted = True
        with self._path.open("rb", buffering=_PIECE_BYTES) as file:
            for *_, start in self._places:
                file.seek(start)
                yield stripped(parse(file.readline().strip()))

    @property
    def body_bytes(self) -> int:
        """The length of `body`."""
        return len(_HEAD) + self._records_bytes + max(0, len(self) - 1) + len(_TAIL)

    async def body(self) -> AsyncIterator[bytes]:
        """The request for metrics as JSON, piece by piece."""
        piece = bytearray(_HEAD)
        for number, record in enumerate(self):
            if number:
                piece += b","
            piece += sendable(record)
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece + _TAIL)


def stored_by_agent(paths: RolloutPaths, finished: int) -> dict[str, StoredRollouts]:
    """The finished rollouts of each agent; a key that is there twice counts once.

    `finished` is how many belong to rows of the run: when the file holds more, the others are left out.
    """
    groups = _read(paths.rollouts, None)
    if sum(map(len, groups.values())) > finished:
        groups = _read(paths.rollouts, _keys_in(paths.materialized_inputs))
    return groups


def _read(path: Path, wanted: KeySet | None) -> dict[str, StoredRollouts]:
    groups: dict[str, StoredRollouts] = {}
    seen = KeySet()
    for line in iter_lines(path):
        result = parse(line.content)
        key, agent = key_or_none(result), agent_name_of(result)
        if key is None or agent is None or not seen.add(key) or (wanted is not None and key not in wanted):
            continue
        if agent not in groups:
            groups[agent] = StoredRollouts(path)
        groups[agent].add(line, result)
    return groups


def _keys_in(path: Path) -> KeySet:
    keys = KeySet()
    for line in iter_lines(path):
        key = key_or_none(parse(line.content))
        if key is not None:
            keys.add(key)
    return keys
