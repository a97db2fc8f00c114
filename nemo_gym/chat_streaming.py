"""PUBLIC: the Chat Completions API as clients stream it."""

from collections.abc import Iterator
from typing import Any

from nemo_gym.dialects.chat import chunks_of, sanitize_streaming_chat_body

__all__ = ["sanitize_streaming_chat_body", "synthesize_chat_completion_sse"]


def synthesize_chat_completion_sse(completion: dict[str, Any], include_usage: bool = False) -> Iterator[str]:
    """A completion as the chunks of a stream."""
    return chunks_of(completion, include_usage=include_usage)
