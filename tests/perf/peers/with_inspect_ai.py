"""One run of inspect_ai, in its own environment: its loop of model and tools, its log, our two tasks."""

import json
import sys
from pathlib import Path

from inspect_ai import Task as Evaluation
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, tool

from tests.perf.peers.tasks import TASKS, Task, reward, take_values, value_of, weather_in


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Say what the weather is like in a city right now.

        Args:
            city: The city's name, without country
        """
        return weather_in(city)

    return execute


@tool
def get_synonym_value() -> Tool:
    async def execute(synonym: str) -> str:
        """Look up the value of one word.

        Args:
            synonym: The word, spelled as given
        """
        return value_of(synonym)

    return execute


@tool
def extract_synonym_values() -> Tool:
    async def execute(synonym_values: list[int]) -> str:
        """Hand in the values of all words, in the order in which the words were given. Call it once, at the end.

        Args:
            synonym_values: One value per word
        """
        return take_values(synonym_values)

    return execute


@scorer(metrics=[mean()])
def verdict(task: Task) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        messages = [message for message in state.messages if isinstance(message, ChatMessageAssistant)]
        calls = [(call.function, call.arguments) for message in messages for call in message.tool_calls or []]
        return Score(value=reward(task, calls))

    return score


def main(name: str, rollouts: int, in_flight: int, base_url: str, folder: Path) -> None:
    """Play, and say how many rollouts were scored and how well."""
    task = TASKS[name]
    instructions, question = task.messages
    prompt = [ChatMessageSystem(content=instructions), ChatMessageUser(content=question)]
    tools = [get_weather()] if name == "single_tool_call" else [get_synonym_value(), extract_synonym_values()]
    evaluation = Evaluation(
        dataset=MemoryDataset([Sample(input=prompt, id=number) for number in range(1, rollouts + 1)]),
        solver=[use_tools(*tools), generate()],
        scorer=verdict(task),
        name=name,
    )
    model = get_model("openai/canned", base_url=base_url, api_key="none", responses_api=True)
    [log] = evaluate(
        evaluation,
        model=model,
        log_dir=str(folder),
        display="none",
        max_connections=in_flight,
        max_samples=in_flight,
    )
    scores = log.results.scores[0].metrics["mean"].value if log.results else 0.0
    print(json.dumps({"rollouts": log.results.completed_samples if log.results else 0, "reward": scores}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
