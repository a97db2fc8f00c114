"""What people see, on a real pseudo-terminal and in a file."""

import asyncio
import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from nemo_gym.collect.progress import Progress
from nemo_gym.log import LOGGER_NAME
from nemo_gym.runs.record import Outcome, Row


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal:
    """A pseudo-terminal of our own; `stream` is its inside, `text` what it was sent."""

    def __init__(self, columns: int = 200, rows: int = 0) -> None:
        self._outside, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.stream: TextIO = os.fdopen(inside, "w", encoding="utf-8")

    def text(self) -> str:
        self.stream.flush()
        os.set_blocking(self._outside, False)
        received = b""
        while True:
            try:
                chunk = os.read(self._outside, 65536)
            except BlockingIOError:
                break
            received += chunk
        return received.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._outside)


@contextmanager
def terminal(**size: int) -> Iterator[Terminal]:
    opened = Terminal(**size)
    try:
        yield opened
    finally:
        opened.close()


def row_of(task: int, agent: str = "a") -> Row:
    return {"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": {"name": agent}}


def succeed(progress: Progress, task: int, agent: str = "a", **result: Any) -> None:
    progress.add(row_of(task, agent), {"reward": 1.0, **result}, Outcome.SUCCESS)


def last_line(text: str) -> str:
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


def shown_in_file(total: int | None, **options: Any) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(total, stream=stream, **options), stream


def test_in_a_file_the_last_line_says_that_all_is_done() -> None:
    progress, stream = shown_in_file(10)
    with progress:
        for task in range(10):
            succeed(progress, task)

    assert "Collecting rollouts: 100%" in last_line(stream.getvalue())
    assert "10/10" in last_line(stream.getvalue())


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_on_a_terminal_the_last_line_says_that_all_is_done(columns: int) -> None:
    with terminal(columns=columns) as screen:
        with Progress(10, stream=screen.stream) as progress:
            for task in range(10):
                succeed(progress, task, "an_agent_with_a_long_name")
        text = screen.text()

    assert "Collecting rollouts: 100%" in last_line(text)
    assert "10/10" in last_line(text)
    assert "█" in text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns


def test_failed_rollouts_are_done_and_never_enter_the_mean() -> None:
    progress, stream = shown_in_file(4)
    with progress:
        succeed(progress, 0)
        succeed(progress, 1)
        succeed(progress, 2)
        progress.add(row_of(3), {"reward": 0.0, "_ng_failure_class": "judge_failed"}, Outcome.FAILURE)

    line = last_line(stream.getvalue())
    assert "100% 4/4" in line
    assert "1 failed" in line
    assert "a 1 [" in line
    assert "(0.75 if failures were 0)" in line


def test_an_attempt_that_will_be_repeated_is_not_done() -> None:
    progress, stream = shown_in_file(2)
    with progress:
        progress.add(row_of(0), {}, Outcome.FAILURE, is_final=False)
        succeed(progress, 0)

    line = last_line(stream.getvalue())
    assert "50% 1/2" in line
    assert "0 failed, 1 retried" in line


def test_a_discarded_result_is_not_done() -> None:
    progress, stream = shown_in_file(2)
    with progress:
        progress.add(row_of(0), {}, Outcome.DISCARDED)

    assert "0% 0/2" in last_line(stream.getvalue())
    assert "1 discarded" in last_line(stream.getvalue())


def test_on_resume_earlier_rollouts_count_as_done_and_in_the_total_but_not_in_rate_and_mean() -> None:
    clock = Clock()
    progress, stream = shown_in_file(100, finished_before=50, given_up_before=10, clock=clock)
    with progress:
        clock.now_s += 10
        for task in range(20):
            succeed(progress, task)

    first, line = stream.getvalue().splitlines()[0], last_line(stream.getvalue())
    assert "60% 60/100" in first
    assert "50 from before" in first
    assert "10 given up before" in first
    assert "80% 80/100" in line
    assert "[00:10<00:10, 2.0/s" in line
    assert "reward since resuming: a 1 " in line


def test_the_percentage_is_rounded_down() -> None:
    progress, stream = shown_in_file(1_000)
    with progress:
        for task in range(999):
            succeed(progress, task)

    assert " 99% 999/1000" in last_line(stream.getvalue())


def test_the_mean_has_an_interval_from_two_tasks_on() -> None:
    progress, stream = shown_in_file(3)
    with progress:
        succeed(progress, 0, reward=0.0)
        assert progress.means.text() == "a 0"
        succeed(progress, 1, reward=1.0)

    assert re.search(r"reward: a 0\.5 \[[\d.e-]+, [\d.]+\]", last_line(stream.getvalue()))


def test_the_agents_with_most_rollouts_are_shown() -> None:
    progress, stream = shown_in_file(15)
    with progress:
        for number, agent in enumerate(["rare", "b", "b", "c", "c", "d", "d"]):
            succeed(progress, number, agent)

    line = last_line(stream.getvalue())
    assert all(f"{agent} 1" in line for agent in "bcd")
    assert "rare" not in line
    assert "1 more" in line


@pytest.mark.parametrize("reward", [None, "high", [1], float("nan")])
def test_a_reward_that_is_no_number_does_not_enter_the_mean(reward: object) -> None:
    progress, stream = shown_in_file(3)
    with progress:
        succeed(progress, 0, reward=reward)
        succeed(progress, 1, reward=0.25)

    assert "a 0.25" in last_line(stream.getvalue())


def test_names_reach_the_terminal_without_control_characters() -> None:
    evil = "a\x1b]0;owned\x07\x1b[2J"
    with terminal() as screen:
        with Progress(4, stream=screen.stream, owed_by_agent={evil: 3, "b": 1}) as progress:
            for task in range(4):
                succeed(progress, task, evil)
        text = screen.text()

    assert "owned" in text
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


def test_what_is_in_flight_is_shown() -> None:
    progress, stream = shown_in_file(10, in_flight=lambda: 7)
    with progress:
        pass

    assert "7 in flight" in last_line(stream.getvalue())


def test_a_file_gets_a_line_only_now_and_then() -> None:
    clock = Clock()
    progress, stream = shown_in_file(1_000, clock=clock)
    with progress:
        for task in range(1_000):
            clock.now_s += 0.1
            succeed(progress, task)

    assert 8 <= len(stream.getvalue().splitlines()) <= 13


def test_time_passes_on_the_screen_while_nothing_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.collect.progress._TICK_S", 0.01)
    clock = Clock()
    progress, stream = shown_in_file(10, clock=clock)

    async def scenario() -> None:
        with progress:
            clock.now_s += 3_725
            await asyncio.sleep(0.1)

    asyncio.run(scenario())

    assert len(stream.getvalue().splitlines()) == 3
    assert "1:02:05" in stream.getvalue().splitlines()[1]


def test_several_agents_are_told_apart_by_what_they_have_left() -> None:
    progress, stream = shown_in_file(10, owed_by_agent={"quick": 5, "slow": 5})
    with progress:
        for task in range(5):
            succeed(progress, task, "quick")

    text = stream.getvalue()
    assert "Examples left\n1. slow: 5\n2. quick: 3\n" in text
    assert text.count("Examples left") == 2


def test_thresholds_that_an_earlier_run_passed_are_not_announced_again() -> None:
    progress, stream = shown_in_file(10, finished_before=5, owed_by_agent={"a": 3, "b": 2})
    with progress:
        succeed(progress, 0)

    assert stream.getvalue().count("Examples left") == 1


def test_one_agent_needs_no_list() -> None:
    progress, stream = shown_in_file(4, owed_by_agent={"a": 4})
    with progress:
        for task in range(4):
            succeed(progress, task)

    assert "Examples left" not in stream.getvalue()


def test_log_lines_stand_on_lines_of_their_own_above_the_bar() -> None:
    with terminal() as screen:
        handler = logging.StreamHandler(screen.stream)
        logger = logging.getLogger(LOGGER_NAME)
        logger.addHandler(handler)
        try:
            with Progress(4, stream=screen.stream) as progress:
                succeed(progress, 0)
                logger.warning("mind the gap")
        finally:
            logger.removeHandler(handler)
        text = screen.text()

    assert re.search(r"\r *\rmind the gap\r?\n", text)


def test_a_screen_that_vanished_does_not_stop_the_run() -> None:
    screen = Terminal()
    with Progress(4, stream=screen.stream) as progress:
        succeed(progress, 0)
        screen.stream.close()
        succeed(progress, 1)
    os.close(screen._outside)

    assert progress.done == 2


def test_nothing_to_do_is_all_done() -> None:
    progress, stream = shown_in_file(0)
    with progress:
        pass

    assert "Collecting rollouts: 100% 0/0" in last_line(stream.getvalue())


def test_a_total_that_was_too_small_grows() -> None:
    progress, stream = shown_in_file(1)
    with progress:
        for task in range(3):
            succeed(progress, task)

    assert "100% 3/3" in last_line(stream.getvalue())


@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_unknown_total_leaves_the_count(on_terminal: bool) -> None:
    with terminal() as screen:
        stream: TextIO = screen.stream if on_terminal else io.StringIO()
        progress = Progress(None, stream=stream)
        progress.finished(row_of(0), {"reward": 1.0})
        progress.finished(row_of(1), None)
        progress.close()
        text = screen.text() if on_terminal else stream.getvalue()  # type: ignore[attr-defined]

    assert "Collecting rollouts: 2 [" in last_line(text)
    assert "1 failed" in last_line(text)


def test_a_terminal_without_a_size_gets_lines() -> None:
    with terminal(columns=0) as screen:
        with Progress(2, stream=screen.stream) as progress:
            succeed(progress, 0)
            succeed(progress, 1)
        text = screen.text()

    assert "Collecting rollouts: 100% 2/2" in last_line(text)


def test_lines_go_to_stderr_and_nothing_to_stdout(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("from nemo_gym.collect.progress import Progress\nwith Progress(3): pass\n")

    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)

    assert run.stdout == ""
    assert "Collecting rollouts:   0% 0/3" in run.stderr


def test_importing_loads_no_tqdm() -> None:
    probe = "import nemo_gym.collect.progress, sys; print('tqdm' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "False"
