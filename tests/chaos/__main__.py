"""Runs the scenarios, shows them as they end, and writes down what was measured."""

import sys

from tests.chaos.command import main

if __name__ == "__main__":
    sys.exit(main())
