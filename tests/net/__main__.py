"""Record the responses of all servers of a checkout, or compare two recordings."""

import argparse
import sys
from pathlib import Path

from tests.checkouts import ROOT
from tests.net import cases, recording


def main() -> int:
    """Record or compare; 1 if recordings differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.net", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="start every bundled server and store what it answers")
    record.add_argument("output", type=Path, help="file to write, one response per line")
    record.add_argument("--root", type=Path, default=ROOT, help="a checkout with its own .venv (default: this one)")
    record.add_argument("--only", help="parts with this in their name, such as mcqa or 'model vllm'")
    diff = commands.add_parser("diff", help="print every response that differs between two recordings")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        exchanges = cases.run(options.root.resolve(), options.only)
        recording.write(options.output, exchanges)
        print(f"{len(exchanges)} responses in {options.output}")
        return 0
    before, after = recording.read(options.before), recording.read(options.after)
    found = list(recording.differences(before, after))
    print("\n\n".join([*found, f"{len(found)} of {len({*before, *after})} responses differ"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
