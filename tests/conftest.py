"""What every test can rely on."""

import gc
import signal

import pytest

# A runner started in the background ignores Ctrl-C, one started by nohup the end of its terminal, and so would every
# process that the tests start from it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Thousands of tests are collected, and nothing of that is ever garbage: looking for some costs as much as collecting.
gc.disable()

LONGEST = (
    "tests/collection/test_patience.py",
    "tests/test_environment_readmes.py",
    "tests/hostile/test_scored.py",
    "tests/collection/test_real_servers.py",
    "tests/rollouts/test_server_watch.py",
    "tests/sandbox/test_isolation.py",
    "tests/sandbox/test_hostile.py",
    "tests/test_guides.py",
    "tests/compat/test_third_party_servers.py",
    "tests/compat/test_foreign_checkout.py",
    "tests/data/test_first_environment.py",
    "tests/data/benchmarks/test_readmes.py",
    "tests/security/test_linear_time.py",
    "tests/cli/launch/test_run_helper.py",
    "tests/cli/commands/test_e2e_collect_rollouts.py",
    "tests/cli/commands/test_slurm.py",
    "tests/contract/test_docs_types.py",
    "tests/collection/test_disk.py",
)
"""Files that take longest: they come first, so that none of them is left at the end with the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "bad input, made up at random (tests/fuzz)")
    group.addoption("--fuzz-examples", type=int, default=None, help="how many inputs each test makes up")
    group.addoption("--fuzz-seed", type=int, default=None, help="which inputs; without it always the same ones")


@pytest.fixture
def bare_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest that a test starts loads none of the plugins that happen to be installed here, which takes seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
