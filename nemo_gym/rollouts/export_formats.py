"""Rollouts as examples of data sets that trainers read: chat messages, in the columns they expect.

Every example says which rollouts it was made of: `provenance` has file, line and rollout key. Reasoning becomes
`<think>` blocks in the text of the assistant.
"""

from typing import Any, TypeAlias

from nemo_gym.keys import (
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.responses_chat.errors import UnusableRequestError
from nemo_gym.responses_chat.to_chat import to_chat_request
from nemo_gym.responses_chat.to_messages import to_chat_messages
from nemo_gym.rollouts.export_index import Entry
from nemo_gym.rollouts.record import agent_name_of

Example: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[dict[str, Any]]

_PROMPT_FIELDS = ("input", "instructions", "tools")


class NotExportableError(ValueError):
    """A rollout that cannot be put as chat messages; the text says why."""


class Conversation:
    """One rollout, split into what was asked and what followed."""

    def __init__(self, record: dict[str, Any], entry: Entry, file: str) -> None:
        params = record.get(RESPONSES_CREATE_PARAMS_KEY_NAME) or {}
        asked = {name: params[name] for name in _PROMPT_FIELDS if params.get(name) is not None}
        try:
            request = to_chat_request(asked, with_token_ids=False)
            completion = to_chat_messages(record[RESPONSE_KEY_NAME]["output"], with_token_ids=False)
        except (KeyError, TypeError, UnusableRequestError) as error:
            raise NotExportableError("has no form as chat messages") from error
        self.prompt: Messages = [_plain(message) for message in request["messages"]]
        self.tools: list[dict[str, Any]] | None = request.get("tools")
        self.completion: Messages = [_plain(message) for message in completion]
        self.reward = entry.reward
        self.provenance = {
            "file": file,
            "line": entry.line,
            TASK_INDEX_KEY_NAME: entry.key.task_index,
            ROLLOUT_INDEX_KEY_NAME: entry.key.rollout_index,
            "agent": agent_name_of(record),
        }
        if not self.completion:
            raise NotExportableError("says nothing")


def as_messages(conversation: Conversation) -> Example:
    """The whole conversation in one list."""
    return {"messages": conversation.prompt + conversation.completion, **_rest(conversation)}


def as_sft(conversation: Conversation) -> Example:
    """Prompt and completion apart, so that only the completion is trained on."""
    return {"prompt": conversation.prompt, "completion": conversation.completion, **_rest(conversation)}


def as_dpo(chosen: Conversation, rejected: Conversation) -> Example:
    """One prompt with a better and a worse completion.

    Raises:
        NotExportableError: the two were asked different things.
    """
    if (chosen.prompt, chosen.tools) != (rejected.prompt, rejected.tools):
        raise NotExportableError("has another prompt than its sibling")
    return {
        "prompt": chosen.prompt,
        "chosen": chosen.completion,
        "rejected": rejected.completion,
        **_tools(chosen),
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
        "provenance": {"chosen": chosen.provenance, "rejected": rejected.provenance},
    }


def _rest(conversation: Conversation) -> Example:
    return {**_tools(conversation), "reward": conversation.reward, "provenance": conversation.provenance}


def _tools(conversation: Conversation) -> Example:
    return {"tools": conversation.tools} if conversation.tools else {}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text as text: parts only where there is something else among them."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message
