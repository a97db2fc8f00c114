"""Captured model calls on disk: a file for every rollout, a line for every call, written by the model servers.

`<id>.capture.jsonl` grows while a rollout is made; `<id>.capture.incomplete` beside it says that a call is missing. A
line is handed to the system before the answer to its call ends, so whoever has the answer finds the line, also after
the server was killed. Several servers may write for one rollout. Which rollout a call is for: `rollout_correlation`.

Before `"request"` and `"response"` of a line there is a tab if the request is our own writing, in which there is no
other, since texts have it escaped. By these a line can be taken apart whose request nobody has read.

`Observing` goes along with the rollouts of a run, and folds into the record of each what was observed of it.
"""

import contextlib
import fcntl
import logging
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError, model_validator

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import parse
from nemo_gym.keys import (
    CAPTURE_KEY,
    MODEL_CALL_CAPTURE_DIR_KEY_NAME,
    OBSERVABILITY_ENABLED_KEY_NAME,
    OBSERVATIONS_KEY,
    OBSERVED_KEYS,
    ROLLOUT_ID_KEY_NAME,
    TRAJECTORY_KEY,
)
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Post = Callable[[Row], Awaitable[Any]]
TOLD_BY_AGENTS = frozenset({TRAJECTORY_KEY, OBSERVATIONS_KEY})
"""What agents say of their rollouts themselves, whether or not calls are captured."""
PAYLOADS = ("request", "response", "request_raw", "response_raw")
"""What was asked of a model and said by it, in a captured call."""
_FIT_ID = re.compile(r"[A-Za-z0-9._-]+")
_PORTION_BYTES = 1 << 16
_SHARED = "model_call_capture_rollout_id_shared"
_SHARED_WORDS = (
    "rollouts are made at the same time under the same %s, such as %r, so the calls of one cannot be told from those "
    "of another; give every row its own and repeat none, or leave it out"
)
_SUFFIX, _INCOMPLETE_SUFFIX = ".capture.jsonl", ".capture.incomplete"


class ModelCallCaptureConfig(BaseModel):
    """Whether model calls are captured, and where to."""

    observability_enabled: bool = False
    model_call_capture_dir: Path | None = None

    @model_validator(mode="after")
    def validate_capture_dir(self) -> "ModelCallCaptureConfig":
        """All servers and the collector must mean the same folder."""
        if not self.observability_enabled:
            return self
        folder = self.model_call_capture_dir
        if folder is None:
            raise ValueError(
                "model_call_capture_dir is required when observability_enabled=true: name a folder, such as "
                "+model_call_capture_dir=/data/captures"
            )
        if not folder.is_absolute():
            raise ValueError(
                f"model_call_capture_dir must be an absolute path, because servers have other working folders; "
                f"{str(folder)!r} is none"
            )
        return self

    @classmethod
    def of(cls, config: Any) -> "ModelCallCaptureConfig":
        """What the config of a run says; a config that is none says nothing.

        Raises:
            ConfigError: it contradicts itself (also a `ValueError`).
        """
        if not isinstance(config, Mapping) or not config.get(OBSERVABILITY_ENABLED_KEY_NAME):
            return cls()
        try:
            keys = (OBSERVABILITY_ENABLED_KEY_NAME, MODEL_CALL_CAPTURE_DIR_KEY_NAME)
            return cls.model_validate({key: config.get(key) for key in keys})
        except ValidationError as error:
            raise CaptureConfigError("; ".join(map(_words, error.errors()))) from None


def _words(problem: Any) -> str:
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    wanted = "true or false" if problem["loc"][0] == OBSERVABILITY_ENABLED_KEY_NAME else "an absolute path"
    return f"{problem['loc'][0]} is {problem['input']!r}; it must be {wanted}"


class CaptureConfigError(ConfigError, ValueError):
    """Calls are to be captured, and nobody says where to, or in words that mean several places."""


class CaptureStore:
    """A folder of captured calls."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self._start = f"{self._root}{os.sep}"

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def path_for(self, rollout_id: str) -> Path:
        """Where the calls of a rollout are.

        Raises:
            ValueError: no file can have such a name.
        """
        return self._root / f"{_fit(rollout_id)}{_SUFFIX}"

    def incomplete_path_for(self, rollout_id: str) -> Path:
        """What is there if a call of a rollout is missing."""
        return self._root / f"{_fit(rollout_id)}{_INCOMPLETE_SUFFIX}"

    def mark_incomplete(self, rollout_id: str) -> None:
        """Say that a call is missing."""
        self.incomplete_path_for(rollout_id).touch()

    def is_incomplete(self, rollout_id: str) -> bool:
        """Whether a call is missing."""
        return os.path.exists(f"{self._start}{_fit(rollout_id)}{_INCOMPLETE_SUFFIX}")  # noqa: PTH110 - cheaper

    def record(self, rollout_id: str, exchange: Mapping[str, Any]) -> None:
        """Add a call."""
        self.append(rollout_id, orjson.dumps(exchange, default=repr))

    def append(self, rollout_id: str, line: bytes) -> None:
        """Add a call that is JSON already, on one line."""
        path = f"{self._start}{_fit(rollout_id)}{_SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            left = line + b"\n"
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)

    def read(self, rollout_id: str) -> list[dict[str, Any]]:
        """The calls of a rollout.

        Raises:
            ValueError: a line is damaged.
        """
        calls, invalid = self.read_available(rollout_id)
        if invalid:
            raise ValueError(f"{self.path_for(rollout_id)}: {invalid} damaged lines")
        return [call for _, call in calls]

    def content(self, rollout_id: str) -> bytes:
        """The calls of a rollout as they are written."""
        try:
            file = os.open(f"{self._start}{_fit(rollout_id)}{_SUFFIX}", os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            content = os.read(file, _PORTION_BYTES)
            if len(content) == _PORTION_BYTES:
                content += b"".join(iter(lambda: os.read(file, _PORTION_BYTES), b""))
        finally:
            os.close(file)
        return content

    def read_available(self, rollout_id: str) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """The calls that can be read, each with the number of its line, and how many cannot."""
        calls: list[tuple[int, dict[str, Any]]] = []
        lines = [line for line in self.content(rollout_id).split(b"\n") if line]
        for number, line in enumerate(lines):
            with contextlib.suppress(ValueError):
                call = parse(line)
                if isinstance(call, dict):
                    calls.append((number, call))
        return calls, len(lines) - len(calls)

    def clear(self, rollout_id: str) -> None:
        """Forget a rollout."""
        start = f"{self._start}{_fit(rollout_id)}"
        for path in (start + _SUFFIX, start + _INCOMPLETE_SUFFIX):
            if os.access(path, os.F_OK):  # hardly ever, and in half the time of trying
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - cheaper


def _fit(rollout_id: str) -> str:
    if not _FIT_ID.fullmatch(rollout_id):
        raise ValueError(f"Invalid rollout id {rollout_id!r}: letters, digits, `.`, `_` and `-` are allowed")
    return rollout_id


def make_capture_store(config: ModelCallCaptureConfig) -> CaptureStore | None:
    """The store that a config asks for; None if it asks for none, or the folder cannot be made."""
    if not config.observability_enabled or config.model_call_capture_dir is None:
        return None
    folder = config.model_call_capture_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("model calls are not captured: %s cannot be made (%s)", folder, error)
        return None
    return CaptureStore(folder)


def model_call_capture_dirs_from_config(global_config_dict: Any) -> list[Path]:
    """The folders in which the model servers of a run capture their calls."""
    folder = ModelCallCaptureConfig.of(global_config_dict).model_call_capture_dir
    return [] if folder is None else [folder]


def clear_model_call_captures_for_rollouts(records: Iterable[Any], capture_dirs: Iterable[Path]) -> None:
    """Forget what earlier runs have captured of rollouts that are to be made; what cannot be is said in the log."""
    clear_in([CaptureStore(folder) for folder in capture_dirs], records)


def clear_in(stores: Sequence[CaptureStore], records: Iterable[Any]) -> None:
    """The same for whoever has the stores."""
    for record in records:
        try:
            rollout_id = maybe_rollout_id_from_run_body(record)
            for store in stores if rollout_id is not None else ():
                store.clear(str(rollout_id))
        except (OSError, ValueError) as error:
            logger.warning("what was captured of a rollout before cannot be cleared: %s", error)


class Observing:
    """Goes along with rollouts whose model calls are captured, or whose agents tell how they went."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._stores = [CaptureStore(folder) for folder in folders]
        self._under_way: Counter[str] = Counter()
        self._shared: set[str] = set()
        """Ids of rollouts under way whose calls cannot be told from those of others."""

    @classmethod
    def of(cls, config: Mapping[Any, Any]) -> "Observing":
        """As the config of a run's servers says.

        Raises:
            ConfigError: calls are to be captured, and it does not say where to.
        """
        return cls(model_call_capture_dirs_from_config(config))

    def begin(self, post: Post) -> Post:
        """`post`, before which what earlier runs have captured of the same rollout is forgotten."""
        if not self._folders:
            return post

        async def posted(row: Row) -> Any:
            self._note_start(row)
            clear_in(self._stores, [row])
            return await post(row)

        return posted

    def _note_start(self, row: Row) -> None:
        if row.get(ROLLOUT_ID_KEY_NAME) is None:  # the numbers of a rollout are its own
            return
        with contextlib.suppress(ValueError):  # the agent refuses such a row, and says why
            rollout_id = str(maybe_rollout_id_from_run_body(row))
            if self._under_way[rollout_id]:
                if not self._shared:
                    logger.warning(_SHARED_WORDS, ROLLOUT_ID_KEY_NAME, rollout_id)
                self._shared.add(rollout_id)
            self._under_way[rollout_id] += 1

    def _note_end(self, rollout_id: str) -> bool:
        """Whether others were made under the same id meanwhile."""
        is_shared = rollout_id in self._shared
        if rollout_id in self._under_way:
            self._under_way[rollout_id] -= 1
            if not self._under_way[rollout_id]:
                del self._under_way[rollout_id]
                self._shared.discard(rollout_id)
        return is_shared

    def fold(self, row: Row, record: Row) -> None:
        """Put into the record of a rollout that has ended what was observed of it, if anything was."""
        if not self._folders and TOLD_BY_AGENTS.isdisjoint(record):
            return
        for key in OBSERVED_KEYS & row.keys():  # the row is a rollout of an earlier run, of which this tells
            if record.get(key) == row[key]:
                del record[key]
        from nemo_gym.observability import trajectories  # runs that observe nothing need none of it
        from nemo_gym.rollout_observability import task_id_of

        rollout_id = trajectories.rollout_id_of(row)
        if rollout_id is None:
            return
        task_id = task_id_of(row, record)
        is_shared = self._note_end(rollout_id)
        with_payloads = trajectories.keeps_history(record)
        trajectories.merge_model_call_capture_into_record(
            record, self._folders, include_payloads=with_payloads, rollout_id=rollout_id
        )
        if is_shared:
            capture = record[CAPTURE_KEY]
            capture["gaps"] = [*capture.get("gaps", ()), trajectories.gap(_SHARED)]
        trajectories.attach_trajectory(record, task_id, rollout_id)


CAPTURES_NOTHING = Observing([])
"""For runs whose model servers capture nothing: only what agents tell is put into records."""


def without_history(record: Row) -> Row:
    """A record for an experiment tracker: without its trajectory, and what was asked of models and said by them."""
    kept = {name: value for name, value in record.items() if name != TRAJECTORY_KEY}
    capture = kept.get(CAPTURE_KEY)
    calls = capture.get("calls") if isinstance(capture, dict) else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        kept.pop(CAPTURE_KEY, None)
        return kept
    for call in calls:
        for name in PAYLOADS:
            call.pop(name, None)
    return kept
