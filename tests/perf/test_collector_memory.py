"""Peak memory of the real `ng_collect_rollouts`: it grows neither with what is finished nor with what waits."""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collection.fakes import FakeRun, Row, right_away, serve
from tests.perf.side_by_side.estimates import Target, hold

BOUND = 1.5
ROLLOUT_BYTES = 100_000


@pytest.fixture
def fake_run() -> Iterator[FakeRun]:
    with serve(FakeRun("alpha")) as run:
        run.keep_rows = False
        yield run


MEASURED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""A process is charged with the memory of the one it was forked from, so a small one in between measures."""


def command(fake_run: FakeRun, *options: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("ng_collect_rollouts")),
        f"+head_server.port={fake_run.port}",
        "+agent_name=alpha",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out.jsonl",
        *options,
    ]


def start(fake_run: FakeRun, folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command(fake_run, *options), cwd=folder, stdout=nowhere, stderr=nowhere)


def peak_mb(process: "subprocess.Popen[bytes]") -> float:
    """The most memory a living process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def write_rows(folder: Path, number: int) -> None:
    folder.mkdir()
    with (folder / "in.jsonl").open("w") as file:
        for n in range(number):
            file.write(f'{{"responses_create_params":{{"input":"task {n}, with some words to it"}},"n":{n}}}\n')


def peak_of_finished_run(fake_run: FakeRun, folder: Path, rollouts: int, place: str) -> float:
    async def answer(row: Row, attempt: int) -> Row:
        bulk = "x" * ROLLOUT_BYTES
        result = await right_away(row, attempt)
        return {**result, "bulk": bulk} if place == "a field" else {**result, "response": {"output": [bulk]}}

    fake_run.answer = answer
    write_rows(folder, rollouts)
    measured = [sys.executable, "-c", MEASURED, *command(fake_run)]
    printed = subprocess.run(measured, cwd=folder, capture_output=True, text=True, check=True, timeout=300).stdout
    code, kilobytes = map(int, printed.split())
    assert code == 0
    assert len((folder / "out.jsonl").read_bytes().splitlines()) == rollouts
    return kilobytes / 1024


@pytest.mark.parametrize("place", ["the response", "a field"])
def test_finished_rollouts_take_up_no_memory(place: str, fake_run: FakeRun, tmp_path: Path) -> None:
    def growth() -> list[float]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        few = peak_of_finished_run(fake_run, folder / "few", 200, place)
        many = peak_of_finished_run(fake_run, folder / "many", 2_000, place)
        print(f"\n{ROLLOUT_BYTES:,} bytes in {place}: 200 rollouts {few:.0f} MB, 2,000 {many:.0f} MB")
        return [many / few]

    hold(growth, Target("memory of 2,000 rollouts over that of 200", most=BOUND), rounds=1, more=2)


def peak_while_waiting(fake_run: FakeRun, folder: Path, rows: int, *options: str) -> float:
    """With that many rows, once some of them are done and the rest waits."""

    async def answer(row: Row, attempt: int) -> Row:
        await asyncio.sleep(0.5)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(folder, rows)
    process = start(fake_run, folder, *options)
    try:
        written = folder / "out.jsonl"
        while not written.exists() or written.stat().st_size < 200_000:
            assert process.poll() is None, "the collector ended early"
            time.sleep(0.1)
        return peak_mb(process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("options", [(), ("+resume_from_cache=true",)])
def test_waiting_rows_take_up_no_memory(options: tuple[str, ...], fake_run: FakeRun, tmp_path: Path) -> None:
    def growth() -> list[float]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        few = peak_while_waiting(fake_run, folder / "few", 10_000)
        many = peak_while_waiting(fake_run, folder / "many", 1_000_000)
        if options:  # the same again, on what the killed run left behind
            (folder / "many" / "out_failures.jsonl").touch()
            many = peak_of_resumed(fake_run, folder / "many", *options)
        print(f"\n10,000 waiting rows {few:.0f} MB, 1,000,000 {many:.0f} MB {options}")
        return [many / few]

    hold(growth, Target("memory of a million waiting rows over that of 10,000", most=BOUND), rounds=1, more=2)


def peak_of_resumed(fake_run: FakeRun, folder: Path, *options: str) -> float:
    before = (folder / "out.jsonl").stat().st_size
    process = start(fake_run, folder, *options)
    try:
        while (folder / "out.jsonl").stat().st_size < before + 200_000:
            assert process.poll() is None, "the collector ended early"
            time.sleep(0.1)
        return peak_mb(process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
