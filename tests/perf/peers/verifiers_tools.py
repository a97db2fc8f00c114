"""The tools of our two tasks as verifiers wants them: a server of its own, started once for all rollouts of a run."""

from typing import Any

import verifiers.v1 as vf

from tests.perf.peers.tasks import take_values, value_of, weather_in


class CannedToolsConfig(vf.SharedToolsetConfig):
    task_name: str = "single_tool_call"


class CannedTools(vf.Toolset[CannedToolsConfig]):
    TOOL_PREFIX = None

    def register(self, mcp: Any) -> None:
        """Offer the tools of one task, as everybody else does."""
        is_single = self.config.task_name == "single_tool_call"
        for tool in [get_weather] if is_single else [get_synonym_value, extract_synonym_values]:
            mcp.add_tool(tool, name=tool.__name__, description=tool.__doc__)


def get_weather(city: str) -> str:
    """Say what the weather is like in a city right now."""
    return weather_in(city)


def get_synonym_value(synonym: str) -> str:
    """Look up the value of one word."""
    return value_of(synonym)


def extract_synonym_values(synonym_values: list[int]) -> str:
    """Hand in the values of all words, in the order in which the words were given. Call it once, at the end."""
    return take_values(synonym_values)


if __name__ == "__main__":
    CannedTools.run()
