"""Where a scenario happens: a folder, a source of chance, rows to collect, and everything stopped at the end."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nemo_gym.paths import PARENT_DIR
from tests.chaos.fleet import AGENT, ENVIRONMENT, Fleet, counter_config
from tests.chaos.ledger import Key, Tally, count
from tests.chaos.processes import Command, program

MAX_RESUMES = 8
BOUND_S = 120.0
"""For a collector that has everything it needs."""
_BEGINS = b"rollouts in parallel"
EXIT_OK, EXIT_INCOMPLETE, EXIT_USER_MISTAKE, EXIT_INTERRUPTED = 0, 1, 2, 130


def counter_rows(number: int, chance: random.Random, agent: str = AGENT) -> list[dict[str, Any]]:
    """Rows that the scripted model solves: add two numbers to a counter, and read it."""
    first = (PARENT_DIR / ENVIRONMENT / "data" / "example.jsonl").read_text().splitlines()[0]
    rows = []
    for n in range(number):
        row = json.loads(first)
        start, one, two = chance.randrange(100), chance.randrange(1, 50), chance.randrange(1, 50)
        ask = f"Add {one} to the counter, then {two}. What does it say now? ({n})"
        row["responses_create_params"]["input"][-1]["content"] = ask
        rows.append({**row, "agent_ref": {"name": agent}, "initial_count": start, "expected_count": start + one + two})
    return rows


class Collector(Command):
    """`ng_collect_rollouts` at work; notes how long nothing finished."""

    def __init__(self, job: "Job", options: tuple[str, ...], **how: Any) -> None:
        self._output = job.output
        self._size, self._changed_s = self._size_now(), time.monotonic()
        self.has_begun = False
        self.longest_wait_s = 0.0
        job.starts += 1
        arguments = [program("ng_collect_rollouts"), *job.options, *options]
        super().__init__(arguments, job.folder, how.pop("name", f"collect{job.starts}"), **how)

    def look(self) -> None:
        """Has anything been written since?"""
        size, now_s = self._size_now(), time.monotonic()
        if not self.has_begun:
            self.has_begun, self._changed_s = _BEGINS in self.stderr_path.read_bytes(), now_s
        self.longest_wait_s = max(self.longest_wait_s, now_s - self._changed_s)
        if size != self._size:
            self._size, self._changed_s = size, now_s

    def _size_now(self) -> int:
        with contextlib.suppress(OSError):
            return self._output.stat().st_size
        return -1


class Job:
    """One run: rows, an output, and the collectors that work on it one after the other."""

    def __init__(
        self,
        lab: "Lab",
        fleet: Fleet,
        *,
        rows: int = 40,
        repeats: int = 2,
        agent: str = AGENT,
        options: tuple[str, ...] = (),
        folder: Path | None = None,
        output: Path | None = None,
    ) -> None:
        self.lab = lab
        self.folder = folder or lab.folder / f"job-{agent}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.output = output or self.folder / "out.jsonl"
        self.expected: set[Key] = {(task, rollout) for task in range(rows) for rollout in range(repeats)}
        self.starts = 0
        self.is_complete = False
        """Whether the last collector said so."""
        self.tally = Tally()
        self.options = [
            f"+head_server.port={fleet.head_port}",
            "+input_jsonl_fpath=in.jsonl",
            f"+output_jsonl_fpath={self.output}",
            f"+num_repeats={repeats}",
            "+num_samples_in_parallel=16",
            "+rollout_timeout_s=20",
            *options,
        ]
        with (self.folder / "in.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in counter_rows(rows, lab.chance, agent))

    @property
    def finished(self) -> int:
        """Lines in the output."""
        try:
            return self.output.read_bytes().count(b"\n")
        except OSError:
            return 0

    @contextmanager
    def collecting(self, *options: str, **how: Any) -> Iterator[Collector]:
        """A collector, resuming what is there; it does not outlive the block."""
        collector = Collector(self, ("+resume_from_cache=true", *options), **how)
        try:
            yield collector
        finally:
            collector.stop()
            self.is_complete = collector.exit_code == EXIT_OK
            self.tally.longest_wait_s = max(self.tally.longest_wait_s, collector.longest_wait_s)

    def at_a_random_moment(self, collector: Collector, act: Callable[[], object], upto: float = 0.85) -> bool:
        """Do something while the collector is at work; False when it was done before the moment came."""
        owed = len(self.expected) - self.finished
        target = self.finished + self.lab.chance.randrange(max(1, int(owed * upto)))
        collector.wait_until(lambda: self.finished >= target)
        time.sleep(self.lab.chance.uniform(0.0, 0.15))
        if not collector.is_running:
            return False
        act()
        self.tally.injected += 1
        return True

    def finish(self, *options: str, **how: Any) -> Tally:
        """Resume until all is there, and count."""
        for _ in range(MAX_RESUMES):
            if self.is_complete:
                break
            with self.collecting(*options, **how) as collector:
                collector.wait(BOUND_S)
        self.expect(self.is_complete, f"still incomplete after {self.starts} collectors")
        count(self.output, self.expected, self.tally)
        return self.tally

    def expect(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.tally.problems.append(problem)


class Lab:
    """What one scenario has to itself."""

    def __init__(self, folder: Path, chance: random.Random, shared: "Shared") -> None:
        self.folder = folder
        self.chance = chance
        self.shared = shared
        self._stack = ExitStack()
        folder.mkdir(parents=True, exist_ok=True)

    def fleet(self, config: Mapping[str, Any], *options: str, **how: Any) -> Fleet:
        """Servers of its own."""
        number = len(list(self.folder.glob("fleet*")))
        fleet = Fleet(self.folder / f"fleet{number}", dict(config), *options, **how)
        self._stack.callback(fleet.stop)
        return fleet

    def on_exit(self, undo: Callable[[], object]) -> None:
        """Do this when the scenario is over."""
        self._stack.callback(undo)

    def close(self) -> None:
        """Leave nothing running."""
        self._stack.close()


class Shared:
    """Servers that scenarios share which do nothing to them; started when the first one asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Fleet] = {}
        self._one_at_a_time = threading.Lock()

    @property
    def steady(self) -> Fleet:
        """A fleet in one host process that works as it should."""
        return self.fleet("steady", counter_config)

    def fleet(self, name: str, config: Callable[[], dict[str, Any]]) -> Fleet:
        """The fleet of that name."""
        with self._one_at_a_time:
            if name not in self._started:
                self._started[name] = Fleet(self._folder / name, config())
            return self._started[name]

    def close(self) -> None:
        """Stop them."""
        for fleet in self._started.values():
            fleet.stop()
