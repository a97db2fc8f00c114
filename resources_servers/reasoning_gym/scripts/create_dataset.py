"""Write a data set of generated tasks: `create_dataset --tasks gcd,chain_sum --size 500 --seed 1 --output x.jsonl`.

The same arguments give the same file on every machine with the same version of reasoning-gym.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[3]))  # started as a file, beside its package

from nemo_gym.config_types import ConfigError
from resources_servers.reasoning_gym.rows import WITHOUT_ANSWER, generate_rows, hashes_are_fixed, task_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows; returns the exit code."""
    options = _parser().parse_args(arguments)
    draft = options.output.with_name(f"{options.output.name}.part")
    try:
        if options.all_tasks:
            tasks = [name for name in task_names() if options.include_unanswered or name not in WITHOUT_ANSWER]
        else:
            tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps(row, ensure_ascii=False) + "\n" for row in generate_rows(tasks, options.size, options.seed)
            )
        draft.replace(options.output)
    except ConfigError as error:
        draft.unlink(missing_ok=True)
        sys.stderr.write(f"Error: {error}\n")
        return 2
    sys.stdout.write(f"{options.size} rows of {len(tasks)} tasks written to {options.output}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tasks", "--task", help="names of reasoning-gym tasks, separated by commas")
    chosen.add_argument("--all-tasks", action="store_true", help="every task that has a reference answer")
    parser.add_argument(
        "--include-unanswered", action="store_true", help="with --all-tasks: also tasks without a reference answer"
    )
    parser.add_argument("--size", type=_positive, required=True, help="number of rows; the tasks take turns")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    if not hashes_are_fixed():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
