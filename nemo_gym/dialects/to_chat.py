"""A Responses request as a Chat Completions request: the conversation as messages, the settings as that API has them.

Fields with the same name and meaning are passed on, the others translated. What only the Responses
API knows and an answer can do without (`truncation`, `include`, ...) is left out; what the answer
depends on is an error, since leaving it out would silently ask something else.

Items are many, messages few: what the model produced in one go (reasoning, text, tool calls) becomes
one assistant message. The buffers hold that message until something else follows, or until an item
with token ids ends it: those sit on the last item of what was generated in one go. Reasoning travels
inside a message as text, in `<think>...</think>` blocks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from nemo_gym.dialects.base import NoChatFormError, UnusableRequestError
from nemo_gym.schemas.wire import TOKEN_FIELDS, carries_token_ids

Item: TypeAlias = Mapping[str, Any]
Message: TypeAlias = dict[str, Any]
Part: TypeAlias = Mapping[str, Any]
Wrap: TypeAlias = Callable[[Iterable[str]], str]
"""Makes reasoning part of a message's text."""

SAME_NAME = (
    "metadata",
    "model",
    "parallel_tool_calls",
    "service_tier",
    "store",
    "stream",
    "temperature",
    "top_logprobs",
    "top_p",
    "user",
)
_STORED_AT_THE_PROVIDER = ("previous_response_id", "prompt")
_BLANK_LINE = "\n\n"
_BEGIN, _END = "<think>", "</think>"
PROMPT_DIGEST = "prompt_digest"
"""Beside token ids: what their prompt was made of, for whoever is to go on from them."""
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def to_chat_request(given: dict[str, Any], *, with_token_ids: bool, wrap: Wrap | None = None) -> dict[str, Any]:
    """The Chat Completions request for `given`, the fields that a Responses request set."""
    for name in _STORED_AT_THE_PROVIDER:
        if given.get(name) is not None:
            raise NoChatFormError(
                f"{name} refers to something stored at the provider; the Chat Completions API has no such thing. "
                "Send the whole conversation as input"
            )
    messages = to_chat_messages(given["input"], with_token_ids=with_token_ids, wrap=wrap)
    request: dict[str, Any] = {"messages": _with_instructions(messages, given.get("instructions"))}
    request |= {name: given[name] for name in SAME_NAME if given.get(name) is not None}
    if given.get("max_output_tokens") is not None:
        request["max_tokens"] = given["max_output_tokens"]
    effort = (given.get("reasoning") or {}).get("effort")
    if effort is not None:
        request["reasoning_effort"] = effort
    response_format = _response_format((given.get("text") or {}).get("format"))
    if response_format is not None:
        request["response_format"] = response_format
    return request | _tools(given, request)


def _with_instructions(messages: list[Message], instructions: str | None) -> list[Message]:
    """`messages` after one system message, which takes in the instructions they begin with.

    Chat templates often accept a single system message, and only in front.
    """
    if not instructions:
        return messages
    texts = [instructions]
    for message in messages:
        if message["role"] not in ("system", "developer") or not only_text(message["content"]):
            break
        texts.append(_joined(message["content"]))
    rest = messages[len(texts) - 1 :]
    return [{"role": "system", "content": _BLANK_LINE.join(texts)}, *rest]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _tools(given: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    choice = given.get("tool_choice")
    tools = given.get("tools")
    if tools:
        offered: dict[str, Any] = {"tools": [_tool(tool) for tool in tools]}
        return offered if choice is None else {**offered, "tool_choice": _tool_choice(choice)}
    if choice not in (None, "auto", "none"):
        raise UnusableRequestError(f"tool_choice is {choice!r}, but the request offers no tools: add them to `tools`")
    request.pop("parallel_tool_calls", None)  # endpoints refuse it without tools
    return {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool["type"]
    given = {key: value for key, value in tool.items() if key != "type" and value is not None}
    if kind == "function":
        given.pop("strict", None)
    if kind in ("function", "custom"):
        return {"type": kind, kind: given}
    raise NoChatFormError(
        f"A tool of type {kind!r} has no form in the Chat Completions API, which knows function and custom tools only"
    )


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") in choice:
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": kind, kind: {"name": choice["name"]}}
    if kind == "allowed_tools":
        tools = [_tool_choice(tool) for tool in choice.get("tools") or ()]
        return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": tools}}
    raise NoChatFormError(f"tool_choice of type {kind!r} has no form in the Chat Completions API")


def _response_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if not text_format or text_format.get("type") == "text":
        return None
    if text_format.get("type") != "json_schema" or "json_schema" in text_format:
        return text_format
    schema = {key: value for key, value in text_format.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def to_chat_messages(given: str | Iterable[Item], *, with_token_ids: bool, wrap: Wrap | None = None) -> list[Message]:
    """`given`, the input of a Responses request, as chat messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": [{"type": "text", "text": given}]}]
    conversation = _Conversation(with_token_ids, wrap or wrapped)
    for position, item in enumerate(given):
        conversation.add(item, f"input[{position}]")
    conversation.flush()
    return conversation.messages


@dataclass
class _Conversation:
    """The messages so far, and the assistant message that is being gathered."""

    with_token_ids: bool
    wrap: Wrap
    messages: list[Message] = field(default_factory=list)
    _text: str = ""
    _tool_calls: list[dict[str, Any]] = field(default_factory=list)
    _token_fields: dict[str, Any] = field(default_factory=dict)
    _has_message: bool = False
    """Whether the model said something, be it nothing: its turn counts."""

    def add(self, item: Item, where: str) -> None:
        """Take one item; `where` names it in errors."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            parts = item.get("summary") or item.get("content") or ()
            self._text += self.wrap([part["text"] for part in parts if part["text"]])
        elif kind in ("function_call", "custom_tool_call"):
            self._tool_calls.append(_tool_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._say("tool", item["output"], where, tool_call_id=item["call_id"])
        else:
            raise NoChatFormError(
                f"{where}: an item of type {kind!r} has no Chat Completions representation; messages, reasoning, "
                "function calls and custom tool calls with their outputs have one"
            )
        self._note_token_ids(item)

    def flush(self) -> None:
        """Emit the assistant message gathered so far, if there is one."""
        if self._text or self._tool_calls or self._token_fields or self._has_message:
            message: Message = {"role": "assistant", "content": self._text or None}
            if self._tool_calls:
                message["tool_calls"] = self._tool_calls
            elif not self._text:
                message["content"] = ""
            self.messages.append({**message, **self._token_fields})
        self._text, self._tool_calls, self._token_fields, self._has_message = "", [], {}, False

    def _add_message(self, item: Item, where: str) -> None:
        role = item["role"]
        if role == "assistant":
            thoughts = item.get("reasoning_content") or item.get("reasoning") or ""
            self._text += (self.wrap([thoughts]) if thoughts else "") + plain_text(item.get("content"), where)
            self._tool_calls += item.get("tool_calls") or ()
            self._has_message = True
        elif role == "tool":
            self._say(role, item["content"], where, tool_call_id=item["tool_call_id"])
        else:
            self._say(role, item["content"], where)

    def _say(self, role: str, content: Any, where: str, **more: Any) -> None:
        self.flush()
        self.messages.append({"role": role, "content": to_chat_content(content, where), **more})

    def _note_token_ids(self, item: Item) -> None:
        if self.with_token_ids and carries_token_ids(item):
            names = (*TOKEN_FIELDS, PROMPT_DIGEST)
            self._token_fields = {name: item[name] for name in names if item.get(name) is not None}
            self.flush()


def _tool_call(item: Item) -> dict[str, Any]:
    if item["type"] == "custom_tool_call":
        return {
            "id": item["call_id"],
            "type": "custom",
            "custom": {"name": item["name"], "input": item.get("input") or ""},
        }
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


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


class Thoughts(NamedTuple):
    """A text taken apart: its think blocks, and what is left without them, to the last space."""

    blocks: list[str]
    rest: str


def wrapped(texts: Iterable[str]) -> str:
    """A think block for every text that is not empty, without separators."""
    return "".join(f"{_BEGIN}{text}{_END}" for text in texts if text)


def taken_apart(text: str) -> Thoughts:
    """The think blocks in `text`, empty ones left out, and the rest."""
    blocks, rest, position = [], [], 0
    while (begin := text.find(_BEGIN, position)) >= 0 and (end := text.find(_END, begin)) >= 0:
        blocks.append(text[begin + len(_BEGIN) : end])
        rest.append(text[position:begin])
        position = end + len(_END)
    return Thoughts([block for block in blocks if block], "".join([*rest, text[position:]]))


def fields_as_tags(message: dict[str, Any], *, splits_reasoning: bool, setting: str) -> dict[str, Any]:
    """A message of the model whose reasoning fields, if any, became a think block before its text.

    Raises:
        AssertionError: there is reasoning although the endpoint is said not to split it off.
    """
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name)), None)
    kept = {name: value for name, value in message.items() if name not in _REASONING_FIELDS}
    if reasoning is None:
        return kept
    if not splits_reasoning:
        raise AssertionError(
            f"The model endpoint returned reasoning in a field of its own, so it splits reasoning from the answer, "
            f"but {setting} is false: set {setting} to true"
        )
    return {**kept, "content": wrapped([reasoning]) + (kept.get("content") or "")}


def tags_as_fields(message: dict[str, Any], *, keep_reasoning: bool) -> dict[str, Any]:
    """An earlier message of the model without think blocks; the first one goes into fields of its own if it is kept.

    Both spellings of the field are written: which one an endpoint reads depends on its version.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not content:
        return message
    if isinstance(content, str):
        blocks, rest = taken_apart(content)
        stripped = {**message, "content": rest}
    else:
        blocks, parts = [], []
        for part in content:
            found, rest = taken_apart(part.get("text") or "")
            blocks += found
            parts.append({**part, "text": rest} if "text" in part else part)
        stripped = {**message, "content": parts}
    if blocks and keep_reasoning:
        stripped |= dict.fromkeys(_REASONING_FIELDS, blocks[0])
    return stripped
