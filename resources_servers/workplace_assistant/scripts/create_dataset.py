"""Write a data set of tasks in the company that is made up: `create_dataset --size 500 --seed 1 --output x.jsonl`.

The same arguments give the same file on every machine.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[3]))  # started as a file, beside its package

from resources_servers.workplace_assistant.tasks import generate_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="how many tasks")
    parser.add_argument("--seed", type=int, default=0, help="which tasks")
    parser.add_argument("--world-seed", type=int, default=0, help="which company; the server's `world_seed`")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    options = parser.parse_args(arguments)
    try:
        rows = list(generate_rows(options.size, options.seed, options.world_seed))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    sys.stdout.write(f"{len(rows)} tasks written to {options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
