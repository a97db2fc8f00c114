"""What every test can rely on."""

import signal

import pytest

# A runner started in the background ignores Ctrl-C, and so would every process that the tests start from it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "bad input, made up at random (tests/fuzz)")
    group.addoption("--fuzz-examples", type=int, default=None, help="how many inputs each test makes up")
    group.addoption("--fuzz-seed", type=int, default=None, help="which inputs; without it always the same ones")
