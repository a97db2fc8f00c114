"""PUBLIC: which rollout a call belongs to: its id, and how the id travels.

The id is made of the keys the collector stamps on a row. Between servers it is a prefix of the path,
`/ng-rollout/<id>/...`, and a header; `ServerClient` adds both. Within one it is a context variable. Servers take the
prefix off, whether or not anything is recorded by it. The header also tells one execution of a rollout from another:
the same rollout may be worked on again, by a later attempt or a later run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from secrets import token_hex
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote

from pydantic import BaseModel

from nemo_gym.keys import (
    ATTEMPT_INDEX_KEY_NAME,
    MODELS_TYPE,
    OBSERVABILITY_ENABLED_KEY_NAME,
    RECORDING_BLOCK,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    ROLLOUT_PATH_PREFIX,
    TASK_INDEX_KEY_NAME,
    TOKEN_CAPTURE_PATH_SEGMENT,
    TOKEN_ID_CAPTURE_BLOCK,
)

__all__ = [
    "MODEL_CALL_PREFIX",
    "ROLLOUT_HEADER",
    "ROLLOUT_ID_PATTERN",
    "ROLLOUT_PATH_START",
    "ROLLOUT_PREFIX",
    "Execution",
    "RolloutContextMiddleware",
    "RolloutPrefix",
    "apply_rollout_prefix",
    "are_calls_recorded",
    "are_rollouts_named",
    "begin_rollout",
    "current_execution",
    "current_rollout_id",
    "enter_rollout",
    "execution_in",
    "leave_rollout",
    "maybe_rollout_id_from_run_body",
    "rollout_context",
    "rollout_header",
    "rollout_path_prefix",
    "without_attempt",
    "without_rollout_prefix",
]

ROLLOUT_ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
ROLLOUT_PATH_START = f"/{ROLLOUT_PATH_PREFIX}/"
_START = ROLLOUT_PATH_START
_ANY_PREFIX = re.compile(
    f"{re.escape(_START)}(?P<rollout_id>[^/]+)(?P<tokens>/{re.escape(TOKEN_CAPTURE_PATH_SEGMENT)})?(?P<rest>/.*)",
    re.DOTALL,
)
_CURRENT: ContextVar[str | None] = ContextVar("nemo_gym_rollout_id", default=None)
_EXECUTION: ContextVar[str] = ContextVar("nemo_gym_rollout_execution", default="")
ROLLOUT_HEADER = "x-nemo-gym-rollout"
"""`<id>;<execution>` of a call between servers, the id in ASCII."""
_ROLLOUT_HEADER = ROLLOUT_HEADER.encode()
rollout_of_caller = _CURRENT.get
"""`current_rollout_id` for those who ask with every call."""
_ATTEMPT = re.compile(r"-a[0-9]+\Z")


class Execution(NamedTuple):
    """One time of working on a rollout."""

    rollout_id: str
    execution: str
    """Empty when nobody told executions apart."""


def maybe_rollout_id_from_run_body(body: BaseModel | Mapping[str, Any] | None) -> str | None:
    """The id of the rollout a row asks for: its own, else `<task>-<rollout>`; `-a<n>` marks a later attempt.

    Raises:
        ValueError: the row brings an id that cannot be part of a path.
    """
    if isinstance(body, BaseModel):
        from nemo_gym.schemas.run_requests import all_fields  # what only calls callers has no need of it

        fields: Mapping[str, Any] = all_fields(body)
    elif isinstance(body, Mapping):
        fields = body
    else:
        return None
    rollout_id = fields.get(ROLLOUT_ID_KEY_NAME)
    if rollout_id is None:
        task, rollout = fields.get(TASK_INDEX_KEY_NAME), fields.get(ROLLOUT_INDEX_KEY_NAME)
        if task is None or rollout is None:
            return None
        rollout_id = f"{task}-{rollout}"
    elif not isinstance(rollout_id, str) or not ROLLOUT_ID_PATTERN.fullmatch(rollout_id) or rollout_id[-1] == "\n":
        raise ValueError(
            f"{ROLLOUT_ID_KEY_NAME} is {rollout_id!r}: it must be letters, digits, `.`, `_` and `-`, the first of "
            "them a letter or digit"
        )
    attempt = fields.get(ATTEMPT_INDEX_KEY_NAME)
    return f"{rollout_id}-a{attempt}" if attempt else rollout_id


def current_rollout_id() -> str | None:
    """The rollout that the running code works for, if that is known."""
    return _CURRENT.get()


def current_execution() -> str:
    """What tells this execution of the current rollout from others; empty if nothing does."""
    return _EXECUTION.get()


def enter_rollout(rollout_id: str | None, execution: str | None = None) -> tuple[Any, Any]:
    """Work for a rollout from now on; `leave_rollout` takes what is returned.

    Without an `execution` the current one goes on, if it is one of that rollout.
    """
    if execution is None:
        execution = _EXECUTION.get() if rollout_id == _CURRENT.get() else ""
    return _CURRENT.set(rollout_id), _EXECUTION.set(execution)


def leave_rollout(tokens: tuple[Any, Any]) -> None:
    """Work for whom the work was done before `enter_rollout`."""
    _CURRENT.reset(tokens[0])
    _EXECUTION.reset(tokens[1])


@contextmanager
def rollout_context(rollout_id: str | None, execution: str | None = None) -> Iterator[None]:
    """Run a block of code for a rollout."""
    tokens = enter_rollout(rollout_id, execution)
    try:
        yield
    finally:
        leave_rollout(tokens)


def begin_rollout(rollout_id: str | None) -> tuple[Any, Any]:
    """Make a rollout from now on; inside one, it is part of that. `leave_rollout` takes what is returned."""
    is_part = rollout_id is None or (rollout_id == _CURRENT.get() and _EXECUTION.get())
    return enter_rollout(rollout_id, None if is_part else token_hex(8))


def without_attempt(rollout_id: str) -> str:
    """The id that all attempts at a rollout have in common."""
    return _ATTEMPT.sub("", rollout_id)


def rollout_header() -> str | None:
    """The value of `ROLLOUT_HEADER` for a call that is made now; None while it is not known which rollout it is for."""
    rollout_id = _CURRENT.get()
    return None if rollout_id is None else f"{quote(rollout_id, safe='')};{_EXECUTION.get()}"


def execution_in(headers: Iterable[tuple[bytes, bytes]]) -> Execution | None:
    """The rollout that the headers of a request name, if they do."""
    for name, value in headers:
        if name == _ROLLOUT_HEADER:
            rollout_id, _, execution = value.decode("latin-1").partition(";")
            return Execution(unquote(rollout_id), execution) if rollout_id else None
    return None


def are_rollouts_named(config: Mapping[Any, Any]) -> bool:
    """Whether the servers of a run need to know which rollout a call is for: somebody records calls by it."""
    token_ids = config.get(TOKEN_ID_CAPTURE_BLOCK)
    is_captured = isinstance(token_ids, Mapping) and token_ids.get("enabled")
    return bool(config.get(OBSERVABILITY_ENABLED_KEY_NAME) or is_captured or are_calls_recorded(config))


def are_calls_recorded(config: Mapping[Any, Any]) -> bool:
    """Whether a model server of a run records its calls, or answers from a recording."""
    for name in config:
        try:
            block = config[name]
            models = block.get(MODELS_TYPE) if isinstance(block, Mapping) else None
            if models is None:
                continue
            modes = [(model.get(RECORDING_BLOCK) or {}).get("mode") for model in models.values()]
        except Exception:  # noqa: BLE001 - a block that cannot be read is no server either
            continue
        if any(mode not in (None, False, "off") for mode in modes):
            return True
    return False


def rollout_path_prefix(rollout_id: str | None, *, token_capture: bool = False) -> str:
    """What stands before the path of a call that belongs to a rollout; nothing without an id."""
    if not rollout_id:
        return ""
    return f"{_START}{rollout_id}" + (f"/{TOKEN_CAPTURE_PATH_SEGMENT}" if token_capture else "")


def apply_rollout_prefix(base_url: str, rollout_id: str | None, *, token_capture: bool = False) -> str:
    """`base_url`, which ends before the path, with the prefix; as it is without an id."""
    prefix = rollout_path_prefix(rollout_id, token_capture=token_capture)
    return f"{base_url.rstrip('/')}{prefix}" if prefix else base_url


def without_rollout_prefix(path: str) -> str:
    """The path as the author of a server knows it."""
    found = _ANY_PREFIX.fullmatch(path) if path.startswith(_START) else None
    return found["rest"] if found else path


class RolloutPrefix:
    """How the path of a request may name its rollout: `/ng-rollout/<id>/<rest>`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        """`pattern` finds `rollout_id` and `rest` in a path."""
        self._pattern = pattern

    def match(self, path: str) -> re.Match[str] | None:
        """Return what the pattern finds in a path; None if no rollout is named."""
        return self._pattern.fullmatch(path) if path.startswith(_START) else None

    def taken_off(self, found: re.Match[str], scope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scope of the same request without the prefix that was `found` in its path."""
        rest = found["rest"]
        steps = scope["path"].count("/", 0, -len(rest))
        raw = (scope.get("raw_path") or scope["path"].encode()).split(b"/", steps + 1)[-1]
        return {**scope, "path": rest, "raw_path": b"/" + raw}

    def context(self, found: re.Match[str], scope: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return the context to serve the request in; its headers may say which execution it belongs to."""
        named = execution_in(scope.get("headers", ()))
        is_same = named is not None and named.rollout_id == found["rollout_id"]
        return rollout_context(found["rollout_id"], named.execution if named is not None and is_same else None)


ROLLOUT_PREFIX = RolloutPrefix(
    re.compile(f"{re.escape(_START)}(?P<rollout_id>{ROLLOUT_ID_PATTERN.pattern.strip('^$')})(?P<rest>/.*)", re.DOTALL)
)
"""The prefix that environments take off."""
MODEL_CALL_PREFIX = RolloutPrefix(_ANY_PREFIX)
"""The prefix that model servers take off; its group `tokens` says whether the token ids of the call are kept."""


class RolloutContextMiddleware:
    """Serves `/ng-rollout/<id>/<rest>` as `/<rest>`, for that rollout, in an app of one's own."""

    prefix: ClassVar[RolloutPrefix] = ROLLOUT_PREFIX

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one connection."""
        found = self.prefix.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        with self.prefix.context(found, scope):
            await self.app(self.prefix.taken_off(found, scope), receive, send)
