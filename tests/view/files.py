import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_gym.runs.files import RolloutPaths

Record = dict[str, Any]


def said(text: str) -> Record:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def rollout(task: Any, repeat: Any, reward: Any = 1.0, *output: Record, **more: Any) -> Record:
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": repeat,
        "agent_ref": {"type": "responses_api_agents", "name": "agent_a"},
        "responses_create_params": {"input": [{"role": "user", "content": f"question {task}"}]},
        "response": {
            "model": "model_a",
            "status": "completed",
            "output": list(output) or [said(f"answer {task}:{repeat}")],
            "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
        },
        "reward": reward,
        **more,
    }


def failure(task: Any, repeat: Any, kind: str = "timeout", **more: Any) -> Record:
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": repeat,
        "agent_ref": {"name": "agent_a"},
        "_ng_failure_class": kind,
        "_ng_failure_message": f"{kind} in task {task}",
        "_ng_failure_status": 504,
        "_ng_failure_server": "model_a",
        "_ng_started_at": "2026-01-01T00:00:00.000Z",
        "_ng_ended_at": "2026-01-01T00:01:00.000Z",
        **more,
    }


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(
        (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n" for record in records
    )


def write_run(
    folder: Path, rollouts: Iterable[Any], failures: Iterable[Any] = (), name: str = "rollouts"
) -> RolloutPaths:
    folder.mkdir(parents=True, exist_ok=True)
    paths = RolloutPaths(folder / f"{name}.jsonl")
    paths.rollouts.write_bytes(lines(rollouts))
    if failures := list(failures):
        paths.failures.write_bytes(lines(failures))
    return paths
