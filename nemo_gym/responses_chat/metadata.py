"""What rows send along in `metadata` for the endpoint: JSON objects as text, since its values must be text."""

from collections.abc import Mapping
from typing import Any

import orjson

from nemo_gym.responses_chat.errors import UnusableRequestError

EXTRA_BODY = "extra_body"
"""Fields to add to the request, such as `seed` or `top_k`."""
CHAT_TEMPLATE_KWARGS = "chat_template_kwargs"
"""Arguments for the chat template, such as `enable_thinking`."""


def object_in_metadata(metadata: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The JSON object under `key`; empty when there is none.

    Raises:
        UnusableRequestError: what is there is something else.
    """
    text = (metadata or {}).get(key)
    if not text:
        return {}
    try:
        value = orjson.loads(text) if isinstance(text, str) else text
    except orjson.JSONDecodeError as error:
        raise UnusableRequestError(f"metadata.{key} must be JSON, {text[:200]!r} is not: {error}") from error
    if not isinstance(value, dict):
        raise UnusableRequestError(f"metadata.{key} must hold a JSON object, not {text[:200]!r}")
    return value
