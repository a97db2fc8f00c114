"""A Responses request as a Chat Completions request.

Fields with the same name and meaning are passed on, the others translated. What only the Responses
API knows and an answer can do without (`truncation`, `include`, ...) is left out; what the answer
depends on is an error, since leaving it out would silently ask something else.
"""

from typing import Any

from nemo_gym.responses_chat.errors import NoChatFormError, UnusableRequestError
from nemo_gym.responses_chat.parts import only_text
from nemo_gym.responses_chat.to_messages import Message, to_chat_messages

_SAME_NAME = (
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


def to_chat_request(given: dict[str, Any], *, with_token_ids: bool) -> dict[str, Any]:
    """The Chat Completions request for `given`, the fields that a Responses request set."""
    for name in _STORED_AT_THE_PROVIDER:
        if given.get(name) is not None:
            raise NoChatFormError(
                f"{name} refers to something stored at the provider; the Chat Completions API has no such thing. "
                "Send the whole conversation as input"
            )
    messages = to_chat_messages(given["input"], with_token_ids=with_token_ids)
    request: dict[str, Any] = {"messages": _with_instructions(messages, given.get("instructions"))}
    request |= {name: given[name] for name in _SAME_NAME if given.get(name) is not None}
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
        texts.append(_text_of(message["content"]))
    rest = messages[len(texts) - 1 :]
    return [{"role": "system", "content": _BLANK_LINE.join(texts)}, *rest]


def _text_of(content: Any) -> str:
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
