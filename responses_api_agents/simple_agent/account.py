"""The agent's own account of a rollout: a turn for every model call, its question and answer, and the times of tools.

It is kept only while a run observes its rollouts. Items are written as JSON once and in the end, however many turns
repeat them.
"""

import time
from contextvars import ContextVar
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseFunctionToolCall
from responses_api_agents.simple_agent.verdicts import Verdict

ROOT = "root"
"""The one invocation of this agent."""
_TRAJECTORY_KEY = b'"ng_trajectory":'
_RESOLVED = b'"resolved"'
_FAILED = 400


class _Turn:
    __slots__ = ("answer_id", "asked_at", "end", "start", "step_count")

    def __init__(self, answer_id: str | None, asked_at: float, start: int, end: int, step_count: int) -> None:
        self.answer_id = answer_id
        self.asked_at = asked_at
        self.start = start
        """How many items were asked; from there to `end` they are the answer."""
        self.end = end
        self.step_count = step_count


class _Tool(NamedTuple):
    call: NeMoGymResponseFunctionToolCall
    text: str
    status: int | None
    started_at: float
    took_s: float


class Account:
    """What one conversation was like, from the agent's point of view: noted while it goes on, and told in the end."""

    def __init__(self, asked: list[Any], model_server: str, rollout_id: str, task_id: str) -> None:
        self._items = list(asked)
        self._model_ref = {"type": "responses_api_models", "name": model_server}
        self._names = {"invocation_id": ROOT, "task_id": task_id, "rollout_id": rollout_id}
        self._turns: list[_Turn] = []
        self._tools: list[_Tool] = []
        self._asked_at = 0.0
        self._began = time.perf_counter()
        self._tool_began = (0.0, 0.0)
        self.is_complete = True
        """Whether the model said all it wanted to."""

    def model_is_asked(self) -> None:
        """The model is about to be asked, with everything so far."""
        self._asked_at = time.time()

    def model_has_answered(self, answer: NeMoGymResponse) -> None:
        """Note a turn."""
        start = len(self._items)
        self._items += answer.output
        self._turns.append(_Turn(answer.id, self._asked_at, start, len(self._items), len(self._tools)))

    def tool_is_called(self) -> None:
        """A tool is about to be called."""
        self._tool_began = time.time(), time.perf_counter()

    def tool_has_answered(
        self, call: NeMoGymResponseFunctionToolCall, item: BaseModel, text: str, status: int | None
    ) -> None:
        """Note what a tool said; without a status it was not asked, or did not answer in time."""
        started_at, began = self._tool_began
        self._items.append(item)
        self._tools.append(_Tool(call, text, status, started_at, time.perf_counter() - began))
        self._turns[-1].step_count = len(self._tools)

    def as_json(self, resolved: bool | None) -> bytes:
        """The account in the shape of `TrajectoryRecord`; `resolved` is what the verdict says, if it does."""
        fragments = [_fragment(item) for item in self._items]
        turns = [self._told(turn, number, fragments) for number, turn in enumerate(self._turns, 1)]
        gaps = [
            _gap("model_call_reference_unavailable", f"turn:{turn['turn_no']}")
            for turn in turns
            if not turn["model_calls"]
        ]
        if turns:
            turns[-1]["resolved"] = resolved
        if resolved is None:
            gaps.append(_gap("resolution_unavailable"))
        root = {
            "kind": "agent_invocation",
            "invocation_id": ROOT,
            "parent_invocation_id": None,
            "spawned_by_tool_call_id": None,
            "status": "completed" if self.is_complete else "incomplete",
            "duration_ms": (time.perf_counter() - self._began) * 1000,
            "error_type": None,
            "model_calls": [ref for turn in turns for ref in turn["model_calls"]],
            "conversation": fragments,
        }
        return orjson.dumps(
            {
                "schema_version": "1.0",
                "task_id": self._names["task_id"],
                "rollout_id": self._names["rollout_id"],
                "invocations": [root],
                "turns": turns,
                "model_calls": [],
                "tool_calls": [_told_of_tool(tool) for tool in self._tools],
                "gaps": gaps,
            }
        )

    def _told(self, turn: _Turn, number: int, fragments: list[orjson.Fragment]) -> dict[str, Any]:
        answered = range(turn.start, turn.end)
        thoughts = [fragments[at] for at in answered if self._items[at].type == "reasoning"]
        ref = {"model_call_id": None, "model_ref": self._model_ref, "response_id": turn.answer_id}
        return {
            **self._names,
            "turn_no": number,
            "timestamp": turn.asked_at,
            "question": fragments[: turn.start],
            "answer": [fragments[at] for at in answered if self._items[at].type != "reasoning"],
            "reasoning_content": thoughts or None,
            "resolved": None,
            "step_count": turn.step_count,
            "model_calls": [ref] if turn.answer_id else [],
        }

    def added_to(self, verdict: Verdict) -> Verdict:
        """A verdict with the account in it."""
        body = verdict.json.rstrip()
        resolved = None
        if _RESOLVED in body:
            told = orjson.loads(body).get("resolved")
            resolved = told if isinstance(told, bool) else None
        if not body.endswith(b"}") or body == b"{}":
            return verdict
        account = self.as_json(resolved)
        whole = b"%b,%b%b}" % (body[:-1], _TRAJECTORY_KEY, account)
        return Verdict(whole)


class AccountOfRollout:
    """Where the account of a rollout that is being made is put by whoever holds its conversation."""

    account: Account | None = None

    def __init__(self, rollout_id: str, task_id: str) -> None:
        self.rollout_id = rollout_id
        self.task_id = task_id


KEPT: ContextVar[AccountOfRollout | None] = ContextVar("simple_agent_account", default=None)
"""Set while a rollout is made that is observed."""


def _told_of_tool(tool: _Tool) -> dict[str, Any]:
    call, text, status, started_at, took_s = tool
    has_failed = status is None or status >= _FAILED
    return {
        "kind": "tool_call",
        "invocation_id": ROOT,
        "tool_call_id": call.call_id,
        "sandbox_id": None,
        "tool_name": call.name,
        "started_at": started_at,
        "completed_at": started_at + took_s,
        "duration_ms": took_s * 1000,
        "timing_source": "executor",
        "status": "failed" if has_failed else "completed",
        "error_type": (_error_type(text) if status is None else f"http_{status}") if has_failed else None,
        "output": text,
    }


def _fragment(item: Any) -> orjson.Fragment:
    if isinstance(item, BaseModel):
        return orjson.Fragment(item.model_dump_json(by_alias=True, warnings=False))
    return orjson.Fragment(orjson.dumps(item))


def _error_type(text: str) -> str:
    """The name of the error that a tool's output tells of, as far as it does."""
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        return "error"
    error = told.get("error") if isinstance(told, dict) else None
    kind = error.get("type") if isinstance(error, dict) else None
    return kind if isinstance(kind, str) else "error"


def _gap(code: str, detail: str | None = None) -> dict[str, Any]:
    return {"code": code, "invocation_id": ROOT, "detail": detail}
