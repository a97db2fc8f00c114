"""Reading a failures sidecar for what can be read of it: it informs, and nothing depends on its last line."""

from collections.abc import Iterator
from pathlib import Path

from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.rollouts.record import Result


def readable_records(path: Path) -> Iterator[Result]:
    """The objects in a file that may be torn, damaged or not there."""
    if not path.exists():
        return
    for line in iter_lines(path):
        try:
            record = parse(line.content)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
