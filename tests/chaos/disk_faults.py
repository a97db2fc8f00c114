"""Faults of the disk: full, taken away, read-only."""

import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.lab import EXIT_INCOMPLETE, EXIT_OK, Job, Lab
from tests.chaos.ledger import Tally
from tests.chaos.scenario import SkippedError, scenario


def _struck(job: Job, code: int, printed: str, words: str) -> None:
    """Count a fault that ended a collector, which must have said why and shown no traceback."""
    if code == EXIT_OK:
        return
    job.tally.injected += 1
    job.expect(code == EXIT_INCOMPLETE, f"exit code {code}: {printed[-1000:]}")
    job.expect(words in printed, f"{words!r} was not said: {printed[-1000:]}")
    job.expect("Traceback" not in printed, printed[-2000:])


@scenario("disk full (no file may grow any more)", short=True)
def largest_file(lab: Lab) -> Tally:
    """The limit moves on with every round, and strikes anywhere in a line."""
    job = Job(lab, lab.shared.steady)
    rows_bytes = 2 * (job.folder / "in.jsonl").stat().st_size
    for _ in range(2):
        written = max(job.output.stat().st_size if job.output.exists() else 0, int(1.3 * rows_bytes))
        limit = written + lab.chance.randrange(1, 60_000)

        def before(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        with job.collecting(before=before) as collector:
            _struck(job, collector.wait(), collector.printed, "cannot write to")
    return job.finish()


@scenario("disk full (a small file system)")
def full_file_system(lab: Lab) -> Tally:
    """Rows, rollouts, failures and manifest share what is left."""
    place = lab.folder / "small"
    place.mkdir()
    _run_or_skip("mount", "-t", "tmpfs", "-o", "size=900k", "chaos", str(place))
    lab.on_exit(lambda: subprocess.run(["umount", "-l", str(place)], check=False))
    job = Job(lab, lab.shared.steady, output=place / "out.jsonl")
    rows_kb = 2 * (job.folder / "in.jsonl").stat().st_size // 1024
    size_kb = int(1.3 * rows_kb) + 80
    for _ in range(2):
        size_kb += lab.chance.randrange(20, 120)
        _run_or_skip("mount", "-o", f"remount,size={size_kb}k", str(place))
        with job.collecting() as collector:
            code = collector.wait()
            job.expect("Traceback" not in collector.printed, collector.printed[-2000:])
            job.tally.injected += code == EXIT_INCOMPLETE
    _run_or_skip("mount", "-o", "remount,size=64m", str(place))
    return job.finish()


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def _append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 500)))


@scenario("output file cut, emptied or written to by another program", short=True)
def file_changed(lab: Lab) -> Tally:
    """The run says so and fails; what is lost is made again."""
    job = Job(lab, lab.shared.steady, rows=60)

    def has_more_than(finished: int) -> bool:
        return job.finished > finished

    for change in (_cut, _append, _empty):
        before = job.finished
        with job.collecting() as collector:

            def strike(change: Callable[[Path, random.Random], None] = change) -> None:
                change(job.output, lab.chance)

            collector.wait_until(partial(has_more_than, before))  # it has opened the file
            if job.at_a_random_moment(collector, strike, upto=0.5):
                job.tally.injected -= 1
                code = collector.wait()
                job.expect(code != EXIT_OK, f"{change.__name__}: all is well, it said")
                _struck(job, code, collector.printed, "another program has")
    return job.finish()


@scenario("output folder removed", short=True)
def folder_removed(lab: Lab) -> Tally:
    """What was written is gone; that is said at once, and the run can be made again."""
    place = lab.folder / "results"
    job = Job(lab, lab.shared.steady, output=place / "out.jsonl")
    for _ in range(2):
        with job.collecting() as collector:
            if job.at_a_random_moment(collector, lambda: shutil.rmtree(place, ignore_errors=True)):
                job.tally.injected -= 1
                _struck(job, collector.wait(), collector.printed, "no longer the file that this run writes to")
    return job.finish()


@scenario("output folder read-only")
def folder_read_only(lab: Lab) -> Tally:
    """As good as it can be had: immutable for root, without the right to write for others."""
    place = lab.folder / "results"
    job = Job(lab, lab.shared.steady, output=place / "out.jsonl")
    forbid, allow = _ways_to_forbid(place)
    lab.on_exit(allow)
    for _ in range(2):
        with job.collecting() as collector:
            if job.at_a_random_moment(collector, forbid, upto=0.6):
                job.tally.injected -= 1
                _struck(job, collector.wait(), collector.printed, "")
        allow()
    return job.finish()


def _ways_to_forbid(place: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    place.mkdir(exist_ok=True)
    if os.geteuid():
        return lambda: place.chmod(0o555), lambda: place.chmod(0o755)
    _run_or_skip("chattr", "+i", str(place))
    _run_or_skip("chattr", "-i", str(place))

    def each(flag: str) -> None:
        for path in (*place.glob("out*.json*"), place):
            subprocess.run(["chattr", flag, str(path)], check=False, capture_output=True)

    return lambda: each("+i"), lambda: each("-i")


def _run_or_skip(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SkippedError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise SkippedError(f"`{' '.join(command[:-1])}` does not work here: {done.stderr.strip()}")
