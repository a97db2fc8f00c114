"""One run of verifiers, in its own environment: its `null` harness, a program per rollout, and our two tasks.

As its documentation asks of a task set, the module exports one, and `vf-eval` finds it by its name. The tools are
served once for all rollouts.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.cli.eval.main import main as vf_eval

from tests.perf.peers.tasks import TASKS, reward
from tests.perf.peers.verifiers_tools import CannedTools, CannedToolsConfig

__all__ = ["CannedTaskset"]


class CannedData(vf.TaskData):
    task: str


class CannedTask(vf.Task[CannedData]):
    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        calls = [call for message in trace.assistant_messages for call in message.tool_calls or []]
        return reward(TASKS[self.data.task], [(call.name, call.arguments) for call in calls])


class CannedConfig(vf.TasksetConfig):
    tools: CannedToolsConfig = CannedToolsConfig()


class CannedTaskset(vf.Taskset[CannedTask, CannedConfig]):
    def load(self) -> Iterable[CannedTask]:
        instructions, question = TASKS[self.config.tools.task_name].messages
        data = CannedData(system_prompt=instructions, prompt=question, task=self.config.tools.task_name)
        return [CannedTask(data, self.config.task)]

    @classmethod
    def toolsets(cls, config: CannedConfig) -> list[vf.Toolset]:
        return [CannedTools(config.tools)]


def main(name: str, rollouts: int, in_flight: int, base_url: str, folder: Path) -> None:
    """Play, and say how many rollouts were scored and how well."""
    arguments = {
        "--env.taskset.id": "with_verifiers",
        "--env.taskset.tools.task-name": name,
        "--env.agent.harness.id": "null",
        "--env.agent.runtime.type": "subprocess",
        "--client.base-url": base_url,
        "--client.api-key-var": "CANNED_KEY",
        "--model": "canned",
        "-r": str(rollouts),
        "-c": str(in_flight),
        "-o": str(folder.parent),
        "--run.dir": folder.name,
    }
    stdout, sys.stdout = sys.stdout, sys.stderr  # without the dashboard it prints every trace
    try:
        vf_eval([*(word for pair in arguments.items() for word in pair), "--no-rich", "--no-push"])
    finally:
        sys.stdout = stdout
    episodes = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    rewards = [
        sum(found["score"] * found.get("weight", 1.0) for found in trace["rewards"].values())
        for episode in episodes
        for trace in episode["traces"]
    ]
    print(json.dumps({"rollouts": len(rewards), "reward": sum(rewards) / len(rewards)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
