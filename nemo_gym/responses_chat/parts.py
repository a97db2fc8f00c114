"""The parts a message consists of, from one API's form into the other's."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from nemo_gym.responses_chat.errors import NoChatFormError

Part: TypeAlias = Mapping[str, Any]


def to_chat_content(content: Any, where: str) -> Any:
    """The content of a message to the model: text stays text, parts become chat parts."""
    if isinstance(content, str):
        return content
    return [_to_chat_part(part, where) for part in content]


def plain_text(content: Any, where: str) -> str:
    """The text of a message that may hold nothing else."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(_text_of(part, where) for part in content)


def only_text(content: Any) -> bool:
    """Whether a chat message's content is text and nothing else."""
    return isinstance(content, str) or all(part.get("type") == "text" for part in content)


def to_responses_content(content: Any) -> Any:
    """The content of a chat message to the model, or of a tool, in the form of the Responses API."""
    if isinstance(content, str) or content is None:
        return content or ""
    return [_to_responses_part(part) for part in content]


def _text_of(part: Part, where: str) -> str:
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise NoChatFormError(f"{where}: a message of the assistant may only hold text, not {part.get('type')!r} parts")
    return text


def _to_chat_part(part: Part, where: str) -> dict[str, Any]:
    if part.get("type") in _CHAT_PART_TYPES:
        return dict(part)
    write = _TO_CHAT.get(part.get("type", ""))
    written = write(part) if write else None
    if written is None:
        known = ", ".join(_TO_CHAT)
        raise NoChatFormError(
            f"{where}: {_described(part)} has no form in the Chat Completions API; these parts have one: {known}"
        )
    return written


def _described(part: Part) -> str:
    given = [name for name in part if name != "type" and part[name] is not None]
    return f"a part of type {part.get('type')!r} with {', '.join(given) or 'nothing in it'}"


def _text(part: Part) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]}


def _image(part: Part) -> dict[str, Any] | None:
    url = part.get("image_url")
    return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}} if url else None


def _video(part: Part) -> dict[str, Any] | None:
    video = part.get("video_url") or part.get("video")
    if isinstance(video, str):
        video = {"url": video}
    return {"type": "video_url", "video_url": video} if isinstance(video, Mapping) else None


def _audio(part: Part) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": part["input_audio"]}


def _file(part: Part) -> dict[str, Any] | None:
    file = {name: part[name] for name in ("file_data", "file_id", "filename") if part.get(name)}
    return {"type": "file", "file": file} if file.keys() & {"file_data", "file_id"} else None


_TO_CHAT: dict[str, Callable[[Part], dict[str, Any] | None]] = {
    "input_text": _text,
    "output_text": _text,
    "input_image": _image,
    "input_video": _video,
    "input_audio": _audio,
    "input_file": _file,
}
_CHAT_PART_TYPES = ("text", "image_url", "video_url", "audio_url", "file")


def _to_responses_part(part: Part) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail") or "auto"}
    if kind == "video_url":
        video = part["video_url"]
        return {"type": "input_video", "video_url": video["url"] if set(video) == {"url"} else video}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise NotImplementedError(
        f"A part of type {kind!r} has no form in the Responses API; text, image_url, video_url, file and "
        "input_audio have one"
    )
