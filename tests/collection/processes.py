"""Collectors as processes of their own, and waiting for what they bring about."""

import time
from collections.abc import Callable, Sequence

import pytest

from tests.programs import WAIT_S, Program

COMMAND = ("ng_collect_rollouts",)
PYTHON = ("python", "-m", "tests.collection.python_run")
BOTH_WAYS = pytest.mark.parametrize("way", [COMMAND, PYTHON], ids=["command", "python"])
"""For what has to be the same whether rollouts are collected by the command or from Python."""


class Collector(Program):
    """One `ng_collect_rollouts`, or a program that does the same from Python, running."""

    def __init__(
        self, *options: str, largest_file: int = 0, name: str = "collector", way: Sequence[str] = COMMAND
    ) -> None:
        super().__init__(*way, *options, largest_file=largest_file, name=name)


def wait_until(condition: Callable[[], bool], collector: Collector) -> None:
    """Wait for something that a running collector brings about."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert collector.is_running, f"the collector ended early:\n{collector.stderr}"
        assert time.monotonic() < deadline_s, f"waited in vain:\n{collector.stderr}"
        time.sleep(0.005)
