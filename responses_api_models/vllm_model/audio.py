"""Sound for the model, given beside the conversation.

Rows of speech benchmarks carry one of `audio_data` (a data URL), `audio_path` and `audio_paths` in their
`metadata`. The sound is put in front of the last user message, as `audio_url` parts that vLLM understands.
"""

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.responses_converter import UnusableRequestError

_KEYS = ("audio_data", "audio_path", "audio_paths")
_SUBTYPES = {
    ".wav": "wav",
    ".flac": "flac",
    ".mp3": "mpeg",
    ".m4a": "mp4",
    ".ogg": "ogg",
    ".opus": "opus",
}


def with_audio(body: dict[str, Any], audio_root: str | None) -> dict[str, Any]:
    """`body` with the sound its metadata names in its messages instead."""
    metadata = body.get("metadata") or {}
    given = [key for key in _KEYS if metadata.get(key)]
    if not given:
        return body
    if len(given) > 1:
        raise UnusableRequestError(f"metadata gives sound in {' and '.join(given)}: exactly one of them is allowed")
    parts = [
        {"type": "audio_url", "audio_url": {"url": url}} for url in _urls(given[0], metadata[given[0]], audio_root)
    ]
    rest = {key: value for key, value in metadata.items() if key not in _KEYS}
    changed = {**body, "messages": _with_parts(body["messages"], parts), "metadata": rest}
    if not rest:
        del changed["metadata"]
    return changed


def _urls(key: str, value: Any, audio_root: str | None) -> list[str]:
    if key == "audio_data":
        if not str(value).startswith("data:"):
            raise UnusableRequestError("metadata.audio_data must be a data URL, such as data:audio/wav;base64,...")
        return [value]
    return [_data_url(path, audio_root) for path in ([value] if key == "audio_path" else _paths(value))]


def _paths(value: Any) -> list[str]:
    """A list, or JSON text of one: values of metadata are text."""
    if isinstance(value, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
        raise UnusableRequestError(f"metadata.audio_paths must be a list of paths, not {value!r}")
    return value


def _data_url(given: str, audio_root: str | None) -> str:
    path = _located(given, audio_root)
    subtype = _SUBTYPES.get(path.suffix.lower())
    if subtype is None:
        raise UnusableRequestError(f"Audio file {given!r} is none of {', '.join(_SUBTYPES)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnusableRequestError(f"Audio file {str(path)!r} cannot be read: {error.strerror or error}") from error
    return f"data:audio/{subtype};base64,{base64.b64encode(content).decode()}"


def _located(given: str, audio_root: str | None) -> Path:
    path = Path(given)
    if audio_root is None and path.is_absolute():
        return path
    if audio_root is None:
        raise UnusableRequestError(f"Audio file {given!r} is a relative path: set audio_root to the folder it is in")
    root = Path(audio_root).resolve()
    located = (root / path).resolve()
    if not located.is_relative_to(root):
        raise UnusableRequestError(f"Audio file {given!r} leads out of audio_root")
    return located


def _with_parts(messages: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        if message["role"] == "user":
            content = message["content"]
            rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
            changed = {**message, "content": [*parts, *rest]}
            return [*messages[:position], changed, *messages[position + 1 :]]
    return [*messages, {"role": "user", "content": parts}]
