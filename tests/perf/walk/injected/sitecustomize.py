"""Count the functions and lines of this project that a process runs, from its first import on.

Python imports this file at the start of every process that has its folder on PYTHONPATH. When a file named
`ask-<label>` appears in the folder NEMO_GYM_WALK_FOLDER, each process writes its counts to `<label>-<pid>.json`
there; a process that ends writes `end-<pid>.json`.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

FOLDER = os.environ["NEMO_GYM_WALK_FOLDER"]
TRACED = tuple(os.environ["NEMO_GYM_WALK_TRACED"].split(os.pathsep))
LONGEST_LOG = 100_000

calls: Counter[tuple[str, int, str]] = Counter()
lines: Counter[tuple[str, int]] = Counter()
log: list[tuple[str, int, str]] = []
switches = 0
last_file = ""
traced: dict[str, bool] = {}


def is_traced(file: str) -> bool:
    found = traced.get(file)
    if found is None:
        found = traced[file] = file.startswith(TRACED)
    return found


def on_line(frame: FrameType, event: str, argument: Any) -> Any:
    global last_file, switches
    if event == "line":
        file = frame.f_code.co_filename
        lines[file, frame.f_lineno] += 1
        if file != last_file:
            switches += 1
            last_file = file
    return on_line


def on_call(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    if not is_traced(code.co_filename):
        return None
    name = (code.co_filename, code.co_firstlineno, code.co_qualname)
    calls[name] += 1
    if len(log) < LONGEST_LOG:
        log.append(name)
    return on_line


def write(label: str) -> None:
    first_seen = list(dict.fromkeys(log))
    log.clear()
    counts = {
        "program": sys.argv[0] if hasattr(sys, "argv") else "",
        "calls": [[*name, count] for name, count in calls.copy().items()],
        "lines": [[*place, count] for place, count in lines.copy().items()],
        "order": first_seen,
        "switches": switches,
    }
    path = os.path.join(FOLDER, f"{label}-{os.getpid()}.json")
    with open(path + ".new", "w") as file:
        json.dump(counts, file)
    os.replace(path + ".new", path)


def watch() -> None:
    answered: set[str] = set()
    while True:
        for name in os.listdir(FOLDER):
            if name.startswith("ask-") and name not in answered:
                answered.add(name)
                write(name.removeprefix("ask-"))
        time.sleep(0.05)


def write_and_exit(code: int, exit_at_once: Any = os._exit) -> None:
    write("end")
    exit_at_once(code)


os._exit = write_and_exit  # type: ignore[assignment]
atexit.register(write, "end")
threading.Thread(target=watch, daemon=True).start()
threading.settrace(on_call)
sys.settrace(on_call)
