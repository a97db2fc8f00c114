"""What a model server does with a recording: keep its calls, answer from them, or both.

A call is found by its canonical request, the settings of the server that shape answers, and the sample it belongs to:
which rollout asks (`rollout_correlation`), and how many equal requests of that rollout were answered before. Ids and
times that somebody generated on the way are replaced by numbers first, so that a rollout that is played again asks for
the same. Later attempts at a rollout belong to the same sample, and what is recorded last counts.

Addresses, keys and headers are no part of it: a recording holds requests and answers, and works without its endpoint.
"""

import logging
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from nemo_gym.config.secrets import is_secret_key, mask_tree
from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import parse
from nemo_gym.paths import make_folder
from nemo_gym.recording.files import (
    CallKey,
    DamagedRecordingError,
    Frame,
    Index,
    MissingCallError,
    Writer,
    call_files,
    read_call,
)
from nemo_gym.recording.requests import Asked, Settings, asked, first_difference, joined, request_json, sample_of
from nemo_gym.rollout_correlation import current_execution, current_rollout_id
from nemo_gym.runtime import Together
from nemo_gym.schemas.server_config import BaseRunServerInstanceConfig, RecordingConfig, RecordingMode
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_MOST_COUNTED = 65_536
"""Rollouts whose calls are counted at the same time: those that began last."""
_MOST_REMEMBERED = 1024
"""Rollouts whose last request is kept in memory: what goes on from it is cheaper."""
_MOST_STEPS = 10_000
_MOST_SHOWN = 80
_HALVES = struct.Struct("<QQ")


class Call(NamedTuple):
    """A call that came in."""

    asked: Asked
    before: tuple[CallKey, Asked] | None
    """The earlier call that has said the beginning of this."""
    sample: int
    rollout_id: str
    execution: str
    """One time of working on the rollout; equal calls are counted within it."""
    body: BaseModel
    dialect: str
    started_ns: int


def shaping_settings(config: BaseModel, unrelated: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The settings of a model server that its answers depend on: not where it is, how it gets in, or how fast.

    `unrelated` are further names of settings that do not count.
    """
    names = {*BaseRunServerInstanceConfig.model_fields, "recording", *unrelated}
    set_to = config.model_dump(mode="json", exclude_defaults=True, exclude=names, warnings=False)
    kept: dict[str, Any] = mask_tree(
        {
            name: value
            for name, value in set_to.items()
            if not is_secret_key(name) and "header" not in name and not _is_address(value)
        }
    )
    return kept


def _is_address(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_address, value))
    return isinstance(value, str) and "://" in value


class Recorder:
    """The recording of one model server."""

    def __init__(self, settings: RecordingConfig, server: str, shaping: Mapping[str, Any]) -> None:
        assert settings.folder is not None
        self.mode = settings.mode
        self.folder = Path(settings.folder)
        self._server = server
        self._shaping = dict(shaping)
        self._start = orjson.dumps([server, self._shaping], default=repr, option=orjson.OPT_SORT_KEYS)
        about = {"model_ref": {"type": "responses_api_models", "name": server}, "settings": self._shaping}
        self._about_start = orjson.dumps(about, default=repr)[:-1]
        self._counts: dict[str, dict[bytes, int]] = {}
        self._last: dict[tuple[str, str], tuple[CallKey, Asked]] = {}
        self._known: Settings | None = None
        self._has_warned = False
        self._writer: Writer | None = None
        self._added: list[Frame] = []
        self.together = Together(self._add, self._write)
        """Entered by calls that are answered, so that those which end at the same time are recorded at once."""
        self._index: Index | None = None
        if self.mode is not RecordingMode.REPLAY:
            make_folder(self.folder)
            self._writer = Writer(self.folder, server, settings.max_bytes)
        if self.mode is not RecordingMode.RECORD:
            self._index = self._open()

    def _open(self) -> Index:
        if self.mode is RecordingMode.REPLAY and not call_files(self.folder, self._server):
            others = ", only calls of other servers (ng_recordings lists them)" if call_files(self.folder) else ""
            raise ConfigError(
                f"{self._server}: {self.folder} has no recorded calls of this server to replay{others}; record them "
                "with recording mode record or auto"
            )
        index = Index(self.folder, self._server)
        for damage in index.damage:
            logger.warning("%s: the recording is damaged: %s", self._server, damage)
        logger.info("%s: %d recorded calls in %s", self._server, len(index), self.folder)
        return index

    def call(self, dialect: str, body: BaseModel) -> Call:
        """Return a request as it is looked for and kept."""
        started_ns = time.time_ns()
        rollout_id = current_rollout_id()
        execution = current_execution() or rollout_id or ""
        if rollout_id is None:
            self._warn_once()
        sample = sample_of(rollout_id)
        before = self._last.get((execution, dialect))
        start = b"%b%d %b" % (self._start, sample, dialect.encode())
        made = asked(body, dialect, start, before and before[1], self._known)
        self._known = made.settings
        if not made.items_before:
            before = None
        return Call(made, before, sample, rollout_id or "", execution, body, dialect, started_ns)

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: a model call does not say which rollout it belongs to, so it counts as sample 0, as do all that "
                "follow like it: equal ones are told apart by their order only",
                self._server,
            )

    def find(self, call: Call) -> bytes | None:
        """The recorded answer to a call; None if the endpoint is to be asked.

        Raises:
            MissingCallError: there is none, and the endpoint must not be asked.
            DamagedRecordingError: the same, because it is damaged.
        """
        if self._index is None:
            return None
        counts = self._counts_of(call.execution)
        key = _key(call, counts.get(call.asked.digest, 0))
        found = self._index.find(key)
        if found is None and self._index.refresh(None if self._writer is None else self._writer.path):
            found = self._index.find(key)
        if found is None:
            if self.mode is RecordingMode.REPLAY:
                raise MissingCallError(self._words_about(call, key))
            return None
        try:
            response = read_call(*found).response
        except DamagedRecordingError as error:
            if self.mode is RecordingMode.REPLAY:
                raise
            logger.warning("%s, so the endpoint is asked again", error)
            return None
        counts[call.asked.digest] = key.ordinal + 1
        self._remember(call, key)
        return response

    def keep(self, call: Call, response: bytes, content: Any = None) -> None:
        """Record the answer to a call; an answer that says that the model failed is not kept."""
        if self._writer is not None and getattr(content, "error", None) is None:
            self._add((call, response, time.time_ns()))
            self._write()

    async def kept(self, call: Call, response: bytes, content: Any = None) -> None:
        """The same, together with calls that end at the same time."""
        if self._writer is not None and getattr(content, "error", None) is None:
            await self.together.done((call, response, time.time_ns()))

    def _add(self, answered: tuple[Call, bytes, int]) -> None:
        assert self._writer is not None
        call, response, ended_ns = answered
        counts = self._counts_of(call.execution)
        key = _key(call, counts.get(call.asked.digest, 0))
        counts[call.asked.digest] = key.ordinal + 1
        frame = self._writer.add(key, call.sample, response, self._about(call, key, ended_ns), ended_ns)
        if frame is None:
            return
        self._remember(call, key)
        if self._index is not None:
            self._added.append(frame)

    def _write(self) -> None:
        assert self._writer is not None
        if self._writer.write() and self._index is not None:
            for frame in self._added:
                self._index.add(self._writer.path, frame)
        self._added.clear()

    def close(self) -> None:
        """Let the files go."""
        if self._writer is not None:
            self.together.do_now()
            self._writer.close()

    def _counts_of(self, execution: str) -> dict[bytes, int]:
        counts = self._counts.get(execution)
        if counts is None:
            counts = self._counts[execution] = {}
            if len(self._counts) > _MOST_COUNTED:
                del self._counts[next(iter(self._counts))]
        return counts

    def _remember(self, call: Call, key: CallKey) -> None:
        name = call.execution, call.dialect
        self._last.pop(name, None)
        self._last[name] = key, call.asked
        if len(self._last) > _MOST_REMEMBERED:
            del self._last[next(iter(self._last))]

    def _about(self, call: Call, key: CallKey, ended_ns: int) -> bytes:
        before, after = None, b""
        if call.before is not None:
            last, before = call.before
            after = b',"after":"%016x%016x-%d","items_before":%d' % (*last, call.asked.items_before)
        return b'%b,"rollout_id":%b,"ordinal":%d,"dialect":"%b","started_ns":%d,"ended_ns":%d%b,"request":%b}' % (
            self._about_start,
            orjson.dumps(call.rollout_id or None),
            key.ordinal,
            call.dialect.encode(),
            call.started_ns,
            ended_ns,
            after,
            request_json(call.asked, call.dialect, before),
        )

    def _words_about(self, call: Call, key: CallKey) -> str:
        """Which call is missing, and how it differs from the one that was recorded in its place."""
        answered = sum(self._counts_of(call.execution).values())
        whose = f"of rollout {call.rollout_id}" if call.rollout_id else "without a rollout's identity"
        start = f"call {answered + 1} {whose} ({call.dialect}) is not in the recording {self.folder}"
        fewer = f"it has only {key.ordinal} calls equal to it"
        why = fewer if key.ordinal else self._closest(call, answered)
        return f"{start}: {why}. Record it with recording mode auto"

    def _closest(self, call: Call, number: int) -> str:
        assert self._index is not None
        recorded = self._index.calls_of(call.sample)
        if not recorded:
            return "no call of this rollout is"
        try:
            about = read_call(*recorded[min(number, len(recorded) - 1)]).about
            request = whole_request(self._index, about)
        except (DamagedRecordingError, ConfigError) as error:
            return str(error)
        own = asked(call.body, call.dialect)
        was = {"dialect": about.get("dialect"), **_named(about.get("settings")), "request": request}
        now = {"dialect": call.dialect, **_named(self._shaping), "request": parse(request_json(own, call.dialect))}
        difference = first_difference(was, now)
        if difference is None:
            return "an equal one is there with other generated ids"
        path, then, today = difference
        return f"{path} was {_excerpt(then, today)} when it was recorded and is {_excerpt(today, then)} now"


def whole_request(index: Index, about: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a recorded call, with what the calls before it have said; as far as these are still there."""
    steps = [about]
    while (after := steps[-1].get("after")) and len(steps) < _MOST_STEPS:
        digest, _, ordinal = str(after).partition("-")
        found = index.find(CallKey(int(digest[:16], 16), int(digest[16:], 16), int(ordinal)))
        if found is None:
            break
        steps.append(read_call(*found).about)
    whole: dict[str, Any] = {}
    for step in reversed(steps):
        whole = joined(whole, step.get("request") or {}, int(step.get("items_before") or 0))
    return whole


def _named(settings: Any) -> dict[str, Any]:
    return {f"setting {name}": value for name, value in settings.items()} if isinstance(settings, dict) else {}


def _key(call: Call, ordinal: int) -> CallKey:
    high, low = _HALVES.unpack(call.asked.digest)
    return CallKey(high, low, ordinal)


def _excerpt(value: Any, other: Any) -> str:
    """A value as it is shown: of a long text the part that is not the same in the other."""
    if value is None:
        return "nothing"
    if isinstance(value, str) and isinstance(other, str):
        ends = (at for at, pair in enumerate(zip(value, other, strict=False)) if pair[0] != pair[1])
        same = next(ends, min(len(value), len(other)))
        if same > _MOST_SHOWN // 2:
            value = f"…{value[same - _MOST_SHOWN // 4 :]}"
    return shown(repr(value) if isinstance(value, str) else orjson.dumps(value).decode(), _MOST_SHOWN)
