"""PUBLIC: the Responses API as clients stream it."""

from nemo_gym.dialects.responses import (
    NAMESPACE_TOOL_DELIMITER,
    NamespaceMap,
    flatten_namespace_tools,
    sanitize_streaming_responses_body,
    synthesize_responses_failure_sse,
    synthesize_responses_sse,
    validate_streaming_responses_params,
)

__all__ = [
    "NAMESPACE_TOOL_DELIMITER",
    "NamespaceMap",
    "flatten_namespace_tools",
    "sanitize_streaming_responses_body",
    "synthesize_responses_failure_sse",
    "synthesize_responses_sse",
    "validate_streaming_responses_params",
]
