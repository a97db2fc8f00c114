"""The agent's own account of a rollout: a turn for every model call, its question and answer, and the times of tools.

It is kept only while a run observes its rollouts. Items are written as JSON once, however many turns repeat them.
"""

import time
from contextvars import ContextVar
from typing import Any

import orjson
from pydantic import BaseModel

from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseFunctionToolCall
from responses_api_agents.simple_agent.verdicts import Verdict

ROOT = "root"
"""The one invocation of this agent."""
_TRAJECTORY_KEY = b'"ng_trajectory":'
_RESOLVED = b'"resolved"'
_FAILED = 400


class Account:
    """What one conversation was like, from the agent's point of view."""

    def __init__(self, asked: list[Any], model_server: str, rollout_id: str, task_id: str) -> None:
        self._items = [_fragment(item) for item in asked]
        self._model_ref = {"type": "responses_api_models", "name": model_server}
        self._names = {"invocation_id": ROOT, "task_id": task_id, "rollout_id": rollout_id}
        self._turns: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._gaps: list[dict[str, Any]] = []
        self._refs: list[dict[str, Any]] = []
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
        number, question = len(self._turns) + 1, list(self._items)
        answered = [(item, _fragment(item)) for item in answer.output]
        self._items += [fragment for _, fragment in answered]
        thoughts = [fragment for item, fragment in answered if item.type == "reasoning"]
        refs = []
        if answer.id:
            refs = [{"model_call_id": None, "model_ref": self._model_ref, "response_id": answer.id}]
        else:
            self._gaps.append(_gap("model_call_reference_unavailable", f"turn:{number}"))
        self._refs += refs
        self._turns.append(
            {
                **self._names,
                "turn_no": number,
                "timestamp": self._asked_at,
                "question": question,
                "answer": [fragment for item, fragment in answered if item.type != "reasoning"],
                "reasoning_content": thoughts or None,
                "resolved": None,
                "step_count": len(self._tools),
                "model_calls": refs,
            }
        )

    def tool_is_called(self) -> None:
        """A tool is about to be called."""
        self._tool_began = time.time(), time.perf_counter()

    def tool_has_answered(
        self, call: NeMoGymResponseFunctionToolCall, item: BaseModel, text: str, status: int | None
    ) -> None:
        """Note what a tool said; without a status it was not asked, or did not answer in time."""
        started_at, began = self._tool_began
        took_s = time.perf_counter() - began
        has_failed = status is None or status >= _FAILED
        self._items.append(_fragment(item))
        self._tools.append(
            {
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
        )
        self._turns[-1]["step_count"] = len(self._tools)

    def as_json(self, resolved: bool | None) -> bytes:
        """The account in the shape of `TrajectoryRecord`; `resolved` is what the verdict says, if it does."""
        if self._turns:
            self._turns[-1]["resolved"] = resolved
        if resolved is None:
            self._gaps.append(_gap("resolution_unavailable"))
        root = {
            "kind": "agent_invocation",
            "invocation_id": ROOT,
            "parent_invocation_id": None,
            "spawned_by_tool_call_id": None,
            "status": "completed" if self.is_complete else "incomplete",
            "duration_ms": (time.perf_counter() - self._began) * 1000,
            "error_type": None,
            "model_calls": self._refs,
            "conversation": self._items,
        }
        return orjson.dumps(
            {
                "schema_version": "1.0",
                "task_id": self._names["task_id"],
                "rollout_id": self._names["rollout_id"],
                "invocations": [root],
                "turns": self._turns,
                "model_calls": [],
                "tool_calls": self._tools,
                "gaps": self._gaps,
            }
        )

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
        return Verdict(whole, verdict.parsed, account_bytes=len(account))


class AccountOfRollout:
    """Where the account of a rollout that is being made is put by whoever holds its conversation."""

    account: Account | None = None

    def __init__(self, rollout_id: str, task_id: str) -> None:
        self.rollout_id = rollout_id
        self.task_id = task_id


KEPT: ContextVar[AccountOfRollout | None] = ContextVar("simple_agent_account", default=None)
"""Set while a rollout is made that is observed."""


def _fragment(item: Any) -> orjson.Fragment:
    if isinstance(item, BaseModel):
        return orjson.Fragment(item.__pydantic_serializer__.to_json(item, by_alias=True, warnings=False))
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
