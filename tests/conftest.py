"""What every test can rely on."""

import gc
import signal
from importlib.util import find_spec

import pytest

# A runner started in the background ignores Ctrl-C, one started by nohup the end of its terminal, and so would every
# process that the tests start from it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says more about the machine than about us. Where trainers are tested there is no hypothesis.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any_machine")

# Thousands of tests are collected, and nothing of that is ever garbage: looking for some costs as much as collecting.
gc.disable()

LONGEST = (
    "tests/collection/test_patience.py",
    "tests/test_environment_readmes.py",
    "tests/rollouts/test_server_watch.py",
    "tests/security/test_linear_time.py",
    "tests/sandbox/test_hostile.py",
    "tests/hostile/test_answers.py",
    "tests/hostile/test_scored.py",
    "tests/test_guides.py",
    "tests/test_reference_pages.py",
    "tests/contract/test_import_budget.py",
    "tests/executors/test_steering.py",
    "tests/sandbox/test_docker.py",
    "tests/collection/test_disk.py",
    "tests/cli/commands/test_slurm.py",
    "tests/test_model_readmes.py",
    "tests/test_bench_peers.py",
    "tests/test_tutorial.py",
    "tests/collection/test_real_servers.py",
    "tests/data/test_first_environment.py",
    "tests/cli/launch/test_run_helper.py",
    "tests/data/benchmarks/test_readmes.py",
    "tests/cli/launch/test_run_helper_faults.py",
    "tests/executors/test_driver.py",
    "tests/cli/commands/test_e2e_collect_rollouts.py",
    "tests/sandbox/test_isolation.py",
    "tests/dialects/test_sdk_clients.py",
    "tests/token_id_capture/test_real_servers.py",
    "tests/collection/test_budget_on_servers.py",
    "resources_servers/math_with_judge/tests/test_app.py",
    "tests/servers/test_host.py",
    "responses_api_models/token_model/tests/test_app.py",
    "tests/compat/test_third_party_servers.py",
    "tests/view/test_api.py",
    "resources_servers/math_with_judge/tests/test_library_pool.py",
    "tests/compat/test_foreign_checkout.py",
    "tests/observability/test_capture.py",
    "tests/cli/launch/test_sandboxes.py",
    "tests/contract/test_docs_types.py",
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
