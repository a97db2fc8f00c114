"""Items of tools that a provider runs, and what clients answer to them: passed on as they are, nothing looks inside.

Each kind has a class, so that programs can ask what an item is; fields are attributes, whatever a provider calls them.
"""

from typing import Any, ClassVar, Literal, TypeAlias, get_args

from nemo_gym.schemas.wire import TaggedModel

HostedToolItemType: TypeAlias = Literal[
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "file_search_call",
    "web_search_call",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "code_interpreter_call",
    "local_shell_call",
    "local_shell_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "tool_search_call",
    "tool_search_output",
    "compaction",
    "item_reference",
]
HOSTED_TYPES: tuple[str, ...] = get_args(HostedToolItemType)
CALLED_BY_MODEL = (
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "file_search_call",
    "web_search_call",
    "computer_call",
    "image_generation_call",
    "code_interpreter_call",
    "local_shell_call",
    "custom_tool_call",
    "shell_call",
    "apply_patch_call",
    "tool_search_call",
)
"""Those that a model or its provider made, not the client."""


def _optional(name: str, default: Any = None) -> Any:
    """A field that may be missing: reading it never fails, and what was not there is not written either."""
    return property(lambda item: (item.model_extra or {}).get(name) or default)


class NeMoGymHostedToolItem(TaggedModel):
    """An item of a tool that the provider runs."""

    type: HostedToolItemType


class NeMoGymResponseMcpCall(NeMoGymHostedToolItem):
    """A tool of an MCP server was called."""

    type: Literal["mcp_call"] = "mcp_call"
    id: ClassVar[Any] = _optional("id")
    server_label: ClassVar[Any] = _optional("server_label")
    status: ClassVar[Any] = _optional("status")


class NeMoGymResponseMcpListTools(NeMoGymHostedToolItem):
    """What an MCP server offers."""

    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    id: ClassVar[Any] = _optional("id")
    server_label: ClassVar[Any] = _optional("server_label")
    tools: ClassVar[Any] = _optional("tools", [])


class NeMoGymResponseMcpApprovalRequest(NeMoGymHostedToolItem):
    """Somebody is to allow a call."""

    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    id: ClassVar[Any] = _optional("id")
    server_label: ClassVar[Any] = _optional("server_label")


class NeMoGymMcpApprovalResponse(NeMoGymHostedToolItem):
    """Whether it was allowed."""

    type: Literal["mcp_approval_response"] = "mcp_approval_response"


class NeMoGymResponseFileSearchToolCall(NeMoGymHostedToolItem):
    """Files were searched."""

    type: Literal["file_search_call"] = "file_search_call"


class NeMoGymResponseFunctionWebSearch(NeMoGymHostedToolItem):
    """The web was searched."""

    type: Literal["web_search_call"] = "web_search_call"


class NeMoGymResponseComputerToolCall(NeMoGymHostedToolItem):
    """Something was done on a screen."""

    type: Literal["computer_call"] = "computer_call"


class NeMoGymComputerCallOutput(NeMoGymHostedToolItem):
    """What the screen shows then."""

    type: Literal["computer_call_output"] = "computer_call_output"


class NeMoGymImageGenerationCall(NeMoGymHostedToolItem):
    """An image was made."""

    type: Literal["image_generation_call"] = "image_generation_call"


class NeMoGymResponseCodeInterpreterToolCall(NeMoGymHostedToolItem):
    """Code was run."""

    type: Literal["code_interpreter_call"] = "code_interpreter_call"


class NeMoGymLocalShellCall(NeMoGymHostedToolItem):
    """A command is to be run where the client is."""

    type: Literal["local_shell_call"] = "local_shell_call"


class NeMoGymLocalShellCallOutput(NeMoGymHostedToolItem):
    """What it printed."""

    type: Literal["local_shell_call_output"] = "local_shell_call_output"


class NeMoGymResponseCustomToolCall(NeMoGymHostedToolItem):
    """A tool that takes text was called."""

    type: Literal["custom_tool_call"] = "custom_tool_call"


class NeMoGymResponseCustomToolCallOutput(NeMoGymHostedToolItem):
    """What it said."""

    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"


HOSTED_ITEMS: dict[str, type[NeMoGymHostedToolItem]] = {
    **dict.fromkeys(HOSTED_TYPES, NeMoGymHostedToolItem),
    **{item.model_fields["type"].default: item for item in NeMoGymHostedToolItem.__subclasses__()},
}
"""The class of every type; those without one of their own share the general one."""
