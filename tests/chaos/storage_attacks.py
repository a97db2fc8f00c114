"""Attacks on the files of a run: planted links, races for the lock, rewards that are no numbers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from nemo_gym.paths import write_aside
from nemo_gym.runs.files import RolloutPaths
from tests.chaos.attacks import Tried, attack
from tests.chaos.processes import Command, program
from tests.collection.fakes import FakeRun, Row, lines_in, right_away, rows_of, serve, write_rows
from tests.rollouts.racing import racers

_RACERS, _ROUNDS = 6, 30
_NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e309", "-1e400", "null", '"NaN"', '"1"', "[1]", "{}", "9" * 400]


@attack("race for the lock, where files cannot be locked", short=True)
def race(folder: Path) -> Tried:
    """Exactly one wins, also when a killed collector has left its lock behind."""
    tried = Tried()
    with racers(folder, _RACERS, has_locks=False) as winners:
        for number in range(_ROUNDS):
            path = folder / f"out{number}.lock"
            if number % 2:
                path.write_text('{"pid": 4194305}')
            won = winners(path)
            tried.count(path.name, None if won == 1 else f"{won} of {_RACERS} won")
    return tried


@attack("symbolic links planted where a run writes")
def planted_links(folder: Path) -> Tried:
    """What they lead to stays as it was."""
    tried = Tried()
    names = RolloutPaths(Path("out.jsonl"))
    planted = [names.lock, names.failures, *(path.with_name(f"{path.name}.tmp") for path in names.of_one_run)]
    with _agents() as run:
        for number, name in enumerate(planted):
            place = folder / str(number)
            write_rows(place / "in.jsonl", rows_of(3))
            precious = place / "precious"
            precious.write_text("mine")
            (place / name).symlink_to(precious)
            collector = _collect(run, place)
            collector.wait()
            is_left = precious.read_text() == "mine" and "Traceback" not in collector.printed
            tried.count(str(name), None if is_left else f"{precious.read_text()[:80]!r}: {collector.printed[-300:]}")
    for number in range(20):
        aside = folder / f"aside{number}.json"
        with write_aside(aside):
            is_known = any(folder.glob(f"aside{number}.json.tmp"))
        tried.count(aside.name, "its name could be guessed" if is_known else None)
    return tried


@attack("rewards that are no finite numbers", short=True)
def rewards(folder: Path) -> Tried:
    """Each is a failed rollout, and none is a score."""
    tried = Tried()

    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == len(_NO_NUMBERS):
            return await right_away(row, attempt)
        return web.Response(text=f'{{"reward": {_NO_NUMBERS[row["n"]]}}}')

    with _agents() as run:
        run.answer = answer
        write_rows(folder / "in.jsonl", rows_of(len(_NO_NUMBERS) + 1))
        _collect(run, folder, "+max_attempts=1").wait()
    stored = {line["_ng_task_index"] for line in lines_in(folder / "out.jsonl")}
    classes = {line["_ng_task_index"]: line["_ng_failure_class"] for line in lines_in(folder / "out_failures.jsonl")}
    for task, reward in enumerate(_NO_NUMBERS):
        is_failure = task not in stored and classes.get(task) == "invalid_reward"
        tried.count(reward[:20], None if is_failure else f"stored: {task in stored}, failed as {classes.get(task)}")
    (metrics,) = json.loads((folder / "out_aggregate_metrics.json").read_bytes())
    scored = metrics["coverage"]["scored"]["rollouts"], metrics["agent_metrics"]["mean/reward"]
    tried.count("score", None if scored == (1, 1.0) else f"{scored}")
    return tried


@contextmanager
def _agents() -> Iterator[FakeRun]:
    with serve(FakeRun("alpha")) as run:
        yield run


def _collect(run: FakeRun, folder: Path, *options: str) -> Command:
    arguments = [
        f"+head_server.port={run.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
        *options,
    ]
    return Command([program("ng_collect_rollouts"), *arguments], folder, "collect")
