"""Whatever call of the file system is refused while a run is made: one line, the right exit code, no rollout lost."""

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, keys_in, rows_of, write_rows

CALLS: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("open", "stat", "lstat", "fstat", "scandir", "listdir", "readlink", "mkdir", "unlink", "rename", "replace"),
        *("write", "writev", "pwrite", "pread", "fsync", "truncate", "ftruncate"),
    ),
    fcntl: ("flock",),
    io: ("open",),
}
"""The calls by which a run reaches its files."""
STRIDE = 19
ROWS = 2
KEYS = [(task, 0) for task in range(ROWS)]
OUTPUT = Path("results/out.jsonl")


class Refusal:
    """Has one call about a file below a folder refused, by its number; `with monkeypatch.context()` ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, at: int) -> None:
        self._folder, self._number, self._at = str(folder.absolute()), number, at
        self._calls = 0
        self.refused: str | None = None
        for module, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(module, name, self._refusing(name, getattr(module, name)))

    def _refusing(self, name: str, real: Callable[..., Any], readlink: Callable[..., str] = os.readlink) -> Any:
        def call(what: Any = ".", *args: Any, **kwargs: Any) -> Any:
            try:
                place = readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.path.abspath(what)  # noqa: PTH100
            except (OSError, TypeError):
                place = ""
            if place.startswith(self._folder):
                self._calls += 1
                if self._calls == self._at:
                    self.refused = f"{name} of {place}"
                    named = () if isinstance(what, int) else (what,)
                    raise OSError(self._number, os.strerror(self._number), *named)
            return real(what, *args, **kwargs)

        return call


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files come from /proc")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_a_refused_call_is_one_line_and_no_rollout_is_lost(
    collect: Collect, fake_run: FakeRun, resumed: bool, number: int
) -> None:
    write_rows(Path("in.jsonl"), rows_of(ROWS))
    resume = "+resume_from_cache=true"
    refused = 0
    for at in range(1 + number % STRIDE, 2_000, STRIDE):
        shutil.rmtree(OUTPUT.parent, ignore_errors=True)
        before = b""
        if resumed:
            assert collect(f"+output_jsonl_fpath={OUTPUT}").exit_code == 0
            before = OUTPUT.read_bytes().splitlines(keepends=True)[0]
            OUTPUT.write_bytes(before + b"{torn")
        with pytest.MonkeyPatch.context() as patched:
            refusal = Refusal(patched, OUTPUT.parent, number, at)
            done = collect(f"+output_jsonl_fpath={OUTPUT}", *([resume] if resumed else []))
        if refusal.refused is None:
            break
        refused += 1
        assert "Traceback" not in done.stderr, (refusal.refused, done.stderr)
        said = [line for line in done.stderr.splitlines() if line.startswith(("Error: ", "The metrics are missing"))]
        assert len(said) == (done.exit_code != 0), (refusal.refused, done)
        assert done.exit_code in (0, 1, 2), (refusal.refused, done)
        assert not OUTPUT.exists() or OUTPUT.read_bytes().startswith(before), refusal.refused
        assert collect(f"+output_jsonl_fpath={OUTPUT}", resume).exit_code == 0, refusal.refused
        assert keys_in(OUTPUT) == KEYS, refusal.refused
    assert refused > 5


@pytest.mark.parametrize(
    "name", ["out.lock", "out_failures.jsonl", "out_manifest.json", "out_materialized_inputs.jsonl"]
)
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_a_folder_in_place_of_a_file_is_one_line(collect: Collect, fake_run: FakeRun, resumed: bool, name: str) -> None:
    write_rows(Path("in.jsonl"), rows_of(ROWS))
    if resumed:
        assert collect(f"+output_jsonl_fpath={OUTPUT}").exit_code == 0
        (OUTPUT.parent / name).unlink(missing_ok=True)
    (OUTPUT.parent / name).mkdir(parents=True)

    done = collect(f"+output_jsonl_fpath={OUTPUT}", *(["+resume_from_cache=true"] if resumed else []))

    assert done.exit_code == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert name in error
    assert "Traceback" not in done.stderr
    assert not resumed or keys_in(OUTPUT) == KEYS
