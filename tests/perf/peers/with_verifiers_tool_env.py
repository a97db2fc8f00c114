"""One run of a verifiers that has `ToolEnv`, in its own environment: its loop within one process, our two tasks."""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers as vf
from datasets import Dataset

from tests.perf.peers.tasks import TASKS, reward, take_values, value_of, weather_in


def get_weather(city: str) -> str:
    """Say what the weather is like in a city right now.

    Args:
        city: The city's name, without country
    """
    return weather_in(city)


def get_synonym_value(synonym: str) -> str:
    """Look up the value of one word.

    Args:
        synonym: The word, spelled as given
    """
    return value_of(synonym)


def extract_synonym_values(synonym_values: list[int]) -> str:
    """Hand in the values of all words, in the order in which the words were given. Call it once, at the end.

    Args:
        synonym_values: One value per word
    """
    return take_values(synonym_values)


def environment(name: str, rollouts: int) -> vf.ToolEnv:
    """One row per rollout, the tools, and the verdict as its rubric."""
    task = TASKS[name]
    instructions, question = task.messages

    def verdict(completion: vf.Messages) -> float:
        calls = [call for message in completion for call in getattr(message, "tool_calls", None) or []]
        return reward(task, [(call.name, call.arguments) for call in calls])

    return vf.ToolEnv(
        eval_dataset=Dataset.from_list([{"question": question, "answer": ""}] * rollouts),
        system_prompt=instructions,
        tools=[get_weather] if name == "single_tool_call" else [get_synonym_value, extract_synonym_values],
        rubric=vf.Rubric(funcs=[verdict]),
    )


def main(name: str, rollouts: int, in_flight: int, base_url: str, folder: Path) -> None:
    """Play, and say how many rollouts were scored and how well."""
    os.environ["CANNED_KEY"] = "none"
    client = vf.ClientConfig(
        api_base_url=base_url,
        api_key_var="CANNED_KEY",
        max_connections=max(in_flight, 1),
    )
    played = environment(name, rollouts).evaluate(
        client,
        "canned",
        max_concurrent=in_flight,
        results_path=folder,
        save_results=True,
        independent_scoring=True,
        on_progress=lambda *_: None,
    )
    outputs = asyncio.run(played)["outputs"]
    rewards = [output["reward"] for output in outputs]
    print(json.dumps({"rollouts": len(rewards), "reward": sum(rewards) / len(rewards)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
