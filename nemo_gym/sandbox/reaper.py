"""Removes the containers that a run has left behind, by the run's label and nothing else.

Providers note in a book, one JSON object per line, which program has made containers for a run and under which label,
before the first is made. The launcher reads it when it shuts down, the warden when the launcher was killed. A program
without a launcher starts this file as a process that waits for its end: `python -I -S reaper.py <book> watch`.

Standard library only: whoever runs it may have lost everything else.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

RUN_LABEL = "nemo-gym.run"
_COMMAND_TIMEOUT_S = 60.0
_MAX_PASSES = 20
_EMPTY_PASSES, _EMPTY_PASSES_AFTER_A_PROGRAM = 2, 8
_PASS_EVERY_S = 0.5
_STARTED: list[Any] = []


def book_beside(config_file: str) -> str:
    """The book of the run whose processes were handed this config file."""
    return f"{os.path.splitext(config_file)[0]}.sandboxes"  # noqa: PTH122 - pathlib is slow to load


def instance_prefix(label: str) -> str:
    """How the names of everything begin that belongs to a run and can have no label."""
    return f"nemo-gym-{label}-"


def reap(book: str, empty_passes: int = _EMPTY_PASSES) -> list[str]:
    """Remove everything that the book speaks of, and the book if that went well; what went wrong, one line each.

    What was still being made when its maker was killed appears later: so it is looked for again, until nothing is found
    `empty_passes` times. What cannot be removed keeps nothing else from it, and is tried again: its maker, who was just
    killed, may have had it removed.
    """
    try:
        with open(book, encoding="utf-8") as file:  # noqa: PTH123
            entries = [entry for line in file if (entry := _entry(line)) is not None]
    except OSError:
        return []
    empty = 0
    problems: list[str] = []
    for number in range(_MAX_PASSES):
        if number:
            time.sleep(_PASS_EVERY_S)
        problems = []
        found = sum(_reap_once(entry, problems) for entry in entries)
        empty = 0 if found else empty + 1
        if (problems and not found) or empty >= empty_passes:
            break
    if not problems:
        for entry in entries:
            _remove_folders(entry)
        _remove(book)
    return problems


def reap_in_background(book: str) -> None:
    """Have a process of its own do it: the run is long over, and nobody waits."""
    if os.path.exists(book):  # noqa: PTH110
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), book]  # noqa: PTH100
        nowhere = subprocess.DEVNULL
        started = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
        _STARTED.append(started)


def _entry(line: str) -> dict[str, str] | None:
    try:
        entry = json.loads(line)
    except ValueError:  # its writer was killed while it wrote: nothing has been made yet
        return None
    is_complete = isinstance(entry, dict) and {"runtime", "program", "label", "folder"} <= set(entry)
    return entry if is_complete and entry["label"] else None


def _reap_once(entry: dict[str, str], problems: list[str]) -> int:
    """Remove what is there; how much that was. Nothing is known to be there if the program does not answer."""
    is_docker = entry["runtime"] == "docker"
    try:
        names = _containers(entry) if is_docker else _instances(entry)
        for name in names:
            try:
                _run(entry, ["rm", "-f", "-v", name] if is_docker else ["instance", "stop", name])
            except subprocess.CalledProcessError as error:
                problems.append(f"{entry['program']}: {_why(error)}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        problems.append(f"{entry['program']}: {_why(error)}")
        return 0
    return len(names)


def _containers(entry: dict[str, str]) -> list[str]:
    return _run(entry, ["ps", "-aq", "--no-trunc", "--filter", f"label={RUN_LABEL}={entry['label']}"]).split()


def _instances(entry: dict[str, str]) -> list[str]:
    listed = json.loads(_run(entry, ["instance", "list", "--json"]) or "{}")
    names = [str(each.get("instance")) for each in listed.get("instances") or []]
    return [name for name in names if name.startswith(instance_prefix(entry["label"]))]


def _run(entry: dict[str, str], arguments: list[str]) -> str:
    command = [entry["program"], *arguments]
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_COMMAND_TIMEOUT_S,
        check=True,
    )
    return str(done.stdout)


def _why(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return reason(str(said or "")) or str(error)


def reason(said: str) -> str:
    """The line of what a container program said that tells why: the last that does not just point to its help."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if not (line.startswith(("Run '", "See '")) and "--help'" in line)]
    return (telling or lines or [""])[-1]


def _remove_folders(entry: dict[str, str]) -> None:
    if entry["folder"]:
        pattern = f"{glob.escape(entry['folder'])}/{glob.escape(instance_prefix(entry['label']))}*"
        for folder in glob.glob(pattern):  # noqa: PTH207
            shutil.rmtree(folder, ignore_errors=True)


def _remove(file: str) -> None:
    try:  # noqa: SIM105
        os.unlink(file)  # noqa: PTH108
    except OSError:
        pass


def _main(book: str, mode: str) -> int:
    if mode == "watch":
        while os.read(0, 4096):
            pass
    problems = reap(book, _EMPTY_PASSES_AFTER_A_PROGRAM if mode == "watch" else _EMPTY_PASSES)
    for problem in problems:
        sys.stderr.write(f"sandboxes are left behind: {problem}\n")
    if mode == "watch":
        _remove(book)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "now"))
