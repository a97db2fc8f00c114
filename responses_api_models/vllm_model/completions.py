"""Chats over `/completions`: the prompt is made here, and what comes back is plain text.

For base models the messages are joined as they are. For others a Hugging Face tokenizer renders them
with its chat template, which is read when the server starts.
"""

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from nemo_gym.config_types import ConfigError
from nemo_gym.responses_converter import UnusableRequestError, is_deeper, only_text, plain_text

Render: TypeAlias = Callable[[dict[str, Any]], str]
"""Makes the prompt of a chat request."""

_CHAT_ONLY = (
    "audio",
    "chat_template_kwargs",
    "logprobs",
    "max_completion_tokens",
    "messages",
    "metadata",
    "modalities",
    "parallel_tool_calls",
    "prediction",
    "reasoning_effort",
    "service_tier",
    "store",
    "tool_choice",
    "tools",
    "top_logprobs",
    "web_search_options",
)
_MOST_LEVELS = 200
"""Of the arguments of a call, so that a template can write them wherever it is called."""
_ACCEPTED_ROLES = (("user",), ("system", "user"), ("developer", "user"))


class PlainCompletions(NamedTuple):
    """How chats become prompts."""

    render: Render
    adds_special_tokens: bool
    """Whether the endpoint is to add them; a chat template writes them itself."""

    def request(self, chat_request: dict[str, Any]) -> dict[str, Any]:
        """The `/completions` request for a chat request."""
        request = {name: value for name, value in chat_request.items() if name not in _CHAT_ONLY}
        limit = chat_request.get("max_completion_tokens", chat_request.get("max_tokens"))
        if limit is not None:
            request["max_tokens"] = limit
        if chat_request.get("logprobs"):
            request["logprobs"] = chat_request.get("top_logprobs") or 0
        if not self.adds_special_tokens:
            request.setdefault("add_special_tokens", False)
        return {**request, "prompt": self.render(chat_request)}


def plain_completions(tokenizer_name: str | None) -> PlainCompletions:
    """Render with the chat template of that tokenizer, or, without one, by joining the messages."""
    if tokenizer_name is None:
        return PlainCompletions(joined_messages, adds_special_tokens=True)
    return PlainCompletions(template_renderer(_load_tokenizer(tokenizer_name)), adds_special_tokens=False)


def joined_messages(chat_request: dict[str, Any]) -> str:
    """The text of one user message, or of a system and a user message with a blank line between."""
    messages = chat_request["messages"]
    if chat_request.get("tools"):
        raise UnusableRequestError("use_completions_api without render_chat_template cannot offer tools")
    roles = tuple(message["role"] for message in messages)
    if roles not in _ACCEPTED_ROLES:
        raise UnusableRequestError(
            f"use_completions_api without render_chat_template takes one user message, with or without a system "
            f"message before it, not {', '.join(roles) or 'nothing'}"
        )
    if not all(only_text(message["content"]) for message in messages):
        raise UnusableRequestError("use_completions_api without render_chat_template takes text only")
    return "\n\n".join(plain_text(message["content"], message["role"]) for message in messages)


def template_renderer(tokenizer: Any) -> Render:
    """Render with the chat template of a Hugging Face tokenizer."""

    def render(chat_request: dict[str, Any]) -> str:
        try:
            prompt: str = tokenizer.apply_chat_template(
                [_for_template(message) for message in chat_request["messages"]],
                tools=chat_request.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **(chat_request.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # a template may raise anything
            raise UnusableRequestError(f"the chat template cannot write this conversation: {error}") from error
        return prompt

    return render


def as_chat_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """A completion in the shape of a chat completion."""
    choices = [_as_chat_choice(choice) for choice in answer.get("choices") or ()]
    chat: dict[str, Any] = {**answer, "object": "chat.completion", "choices": choices}
    if choices and choices[0].get("prompt_token_ids") is not None:
        chat["prompt_token_ids"] = choices[0]["prompt_token_ids"]
    return chat


def _as_chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in choice.items() if name not in ("text", "logprobs")}
    log_probs = choice.get("logprobs")
    if log_probs is not None:
        pairs = zip(log_probs["tokens"], log_probs["token_logprobs"], strict=True)
        rest["logprobs"] = {"content": [{"token": token, "logprob": value} for token, value in pairs]}
    return {**rest, "message": {"role": "assistant", "content": choice["text"]}}


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read the arguments of tool calls as objects, not as JSON text, if they can write them again."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_read_arguments(call) for call in calls]}


def _with_read_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if function is None:
        return call
    try:
        arguments = json.loads(function["arguments"])
        json.dumps(arguments, ensure_ascii=False).encode()  # fails for halves of surrogate pairs
    except (ValueError, RecursionError):  # what the model wrote is no JSON; the template shows it as it is
        return call
    if is_deeper(function["arguments"], _MOST_LEVELS):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _load_tokenizer(name: str) -> Any:
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "render_chat_template needs the library transformers: install it in the environment of this server"
        ) from error
    return transformers.AutoTokenizer.from_pretrained(name)
