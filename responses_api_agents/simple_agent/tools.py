"""Which tools a model may call, and how a call is read; what is wrong with one is told to the model as its output.

A tool is a route of the resources server, but not every route is a tool: only what a request offers in `tools` is
called, and never a route by which the environment is run. Whatever a model makes up as name or arguments, it gets an
answer that it can learn from, and the rollout goes on.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn
from urllib.parse import quote

from nemo_gym.base_resources_server import RESERVED_TOOL_NAMES
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming

MAX_ARGUMENT_DEPTH = 100
"""Objects and lists inside one another in the arguments of a call."""
_USUAL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
_SHOWN_NAME = 100
_SHOWN_NAMES = 50
_NO_TOOLS = RESERVED_TOOL_NAMES | {"", ".", ".."}
"""What must not be a part of the path to a tool."""


class BadCallError(ValueError):
    """A call that is not carried out; its text is what the model is told."""

    def __init__(self, told: str, *, is_malformed: bool) -> None:
        super().__init__(told)
        self.is_malformed = is_malformed
        """Whether it is no proper call at all, which some endpoints refuse to read back."""


def offered_names(params: NeMoGymResponseCreateParamsNonStreaming) -> frozenset[str]:
    """The functions that a request offers to the model."""
    return frozenset([tool["name"] for tool in params.tools if tool["type"] == "function"])


def tool_path(name: str, offered: frozenset[str]) -> str:
    """The route of a tool.

    Raises:
        BadCallError: it was not offered, or is a route that is no tool.
    """
    is_usual = _USUAL_NAME(name) is not None
    if name not in offered:
        raise BadCallError(f"There is no tool {_shown(name)}. {_listing(offered)}", is_malformed=not is_usual)
    if is_usual and name not in RESERVED_TOOL_NAMES:
        return f"/{name}"
    if not _NO_TOOLS.isdisjoint(name.split("/")):
        raise BadCallError(f"{_shown(name)} belongs to the environment itself and is no tool", is_malformed=False)
    return f"/{quote(name, safe='/', errors='replace')}"


def parsed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call.

    Raises:
        BadCallError: they are no JSON object, or one that cannot be passed on as JSON.
    """
    try:
        arguments = _READER.decode(text)
        if not isinstance(arguments, dict):
            raise ValueError(f"they must be a JSON object, such as {{}}, and are {_kind(arguments)}")
        if len(text) > 2 * MAX_ARGUMENT_DEPTH:
            _check_depth(arguments)
        if "\\u" in text or not text.isascii():
            json.dumps(arguments, ensure_ascii=False).encode()  # fails for halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"Invalid tool call arguments: {_told(error)}", is_malformed=True) from error
    return arguments


def output_of(told: str) -> str:
    """What a model is shown instead of a tool's answer."""
    return json.dumps({"error": told})


def declared_tools(seeded: bytes, environment: str) -> list[dict[str, Any]]:
    """The tools that an environment offers in this session, beyond those of the row: `tools` in its `/seed_session`.

    Raises:
        RuntimeError: what it answered under that name are no tools.
    """
    if not isinstance(seeded, bytes) or b'"tools"' not in seeded:
        return []
    try:
        answer = json.loads(seeded)
        given = answer.get("tools") if isinstance(answer, dict) else None
        return NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "", "tools": given or []}).tools
    except ValueError as error:
        raise RuntimeError(
            f"resources server {environment!r} answered /seed_session with wrong tools: {error}"
        ) from error


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN_NAME]} is too large for a number")
    return number


_READER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def _check_depth(arguments: dict[str, Any]) -> None:
    level: list[Any] = [arguments]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [inner for value in level for inner in _parts(value) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(f"they are nested more than {MAX_ARGUMENT_DEPTH} deep")


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _told(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return f"they are nested more than {MAX_ARGUMENT_DEPTH} deep"
    if isinstance(error, UnicodeError):
        return "they hold half of a surrogate pair, which is no character"
    return repr(error) if isinstance(error, json.JSONDecodeError) else str(error)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}...")


def _listing(offered: frozenset[str]) -> str:
    if not offered:
        return "No tools are offered"
    names = sorted(offered)
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"The tools are: {', '.join(names[:_SHOWN_NAMES])}{more}"
