"""One rollout's conversation as it grows, and what makes it end."""

from dataclasses import dataclass, field
from typing import Any

from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseInput,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)
from responses_api_agents.simple_agent.account import Account
from responses_api_agents.simple_agent.cookies import Cookies

NO_ACTIONABLE_OUTPUT = "no_actionable_output"
"""The model neither spoke nor called a tool."""
MAX_STEPS = "max_steps"
"""It would have gone on for ever."""
CALL_REFUSED = "call_refused"
"""A call that it made up is one that its endpoint refuses to read."""
CONTENT_REFUSED = "content_refused"
"""What was said so far is refused by the filter of its endpoint."""
_MESSAGES = (NeMoGymResponseOutputMessage, NeMoGymEasyInputMessage)
STOP_REASONS = frozenset({NO_ACTIONABLE_OUTPUT, MAX_STEPS, CALL_REFUSED, CONTENT_REFUSED})
"""`incomplete_details.reason` of trajectories that an agent ended."""


@dataclass
class Trajectory:
    """What was asked, everything that followed, and the sessions it happened in."""

    params: NeMoGymResponseCreateParamsNonStreaming
    resources_cookies: Cookies
    model_cookies: Cookies | None = None
    output: list[NeMoGymResponseOutputItem] = field(default_factory=list)
    usage: NeMoGymResponseUsage | None = None
    steps: int = 0
    idle_turns: int = 0
    """Turns in a row that neither spoke nor called a tool."""
    has_malformed_call: bool = False
    """Whether the model made a call that is none, by its name or by its arguments."""
    stopped: NeMoGymIncompleteDetails | None = None
    """Why the conversation was ended before the model had answered."""
    tool_status: int | None = None
    """Of what the last tool answered; None when it did not."""
    account: Account | None = None
    """What is told of it, if anybody wants to know."""
    _last: NeMoGymResponse | None = None

    def __post_init__(self) -> None:
        asked = self.params.input
        self.asked: NeMoGymResponseInput = (
            [NeMoGymEasyInputMessage(role="user", content=asked)] if isinstance(asked, str) else asked
        )

    def next_request(self) -> NeMoGymResponseCreateParamsNonStreaming:
        """The parameters as given, asking to continue from everything so far."""
        return self.params.model_copy(update={"input": [*self.asked, *self.output]})

    def add_turn(self, answer: NeMoGymResponse) -> list[NeMoGymResponseFunctionToolCall]:
        """Append a model's answer and return the tool calls in it."""
        self._last = answer
        if self.account is not None:
            self.account.model_has_answered(answer)
            self.account.is_complete = answer.incomplete_details is None
        self.steps += 1
        self.output += answer.output
        self.usage = accumulate_response_usage(self.usage, answer.usage)
        calls = [item for item in answer.output if isinstance(item, NeMoGymResponseFunctionToolCall)]
        self.idle_turns = 0 if calls or _speaks(answer) else self.idle_turns + 1
        return calls

    def add_tool_output(self, call: NeMoGymResponseFunctionToolCall, text: str) -> None:
        """Append what a tool answered."""
        self.output.append(NeMoGymFunctionCallOutput(call_id=call.call_id, output=text))
        if self.account is not None:
            self.account.tool_has_answered(call, self.output[-1], text, self.tool_status)

    def ends_with_turn(self, calls: list[NeMoGymResponseFunctionToolCall], max_idle_turns: int) -> bool:
        """Whether the turn just added is the last one, its tool calls left alone."""
        assert self._last is not None
        if self._last.incomplete_details is not None:
            return True
        if calls:
            return False
        if self.idle_turns >= max_idle_turns:
            self.stop(
                NO_ACTIONABLE_OUTPUT,
                f"{self.idle_turns} model turns in a row had neither a message nor a tool call, the last one was "
                f"number {self.steps}. If the model only thinks, raise max_output_tokens or the agent's max_idle_turns",
            )
        return self.stopped is not None or self.idle_turns == 0

    def stop(self, reason: str, message: str) -> None:
        """End the conversation here; it is scored as it stands."""
        if self.account is not None:
            self.account.is_complete = False
        self.stopped = NeMoGymIncompleteDetails.model_validate({"reason": reason, "message": message})

    def response(self) -> NeMoGymResponse:
        """The whole trajectory, in the shape of the model's last answer."""
        assert self._last is not None
        changes: dict[str, Any] = {"output": self.output, "usage": self.usage}
        if self.stopped is not None:
            changes |= {"status": "incomplete", "incomplete_details": self.stopped}
        return self._last.model_copy(update=changes)


def _speaks(answer: NeMoGymResponse) -> bool:
    for item in answer.output:  # noqa: SIM110 - for every turn, and a generator takes three times as long
        if isinstance(item, _MESSAGES) and item.role == "assistant":
            return True
    return False
