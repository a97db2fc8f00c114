"""The simulation behind docs/scaling.md, and that the page shows what it says."""

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.perf import scale_tables
from tests.perf.simulate_scale import Costs, Scenario, read_costs, simulate

PAGE = (PARENT_DIR / "docs" / "scaling.md").read_text()


@pytest.fixture(scope="module")
def costs() -> Costs:
    return read_costs()


def test_the_page_shows_what_the_simulation_says(costs: Costs) -> None:
    for table in (scale_tables._one_fleet, scale_tables._timeouts, scale_tables._loads, scale_tables._merging):
        assert table(costs) in PAGE


def test_without_anything_in_the_way_twice_the_nodes_take_half_the_time(costs: Costs) -> None:
    few, many = (simulate(Scenario(10**6, nodes, sigma=0.1), costs) for nodes in (2, 4))

    assert few.collected_s / many.collected_s == pytest.approx(2, rel=0.05)
    assert few.efficiency == pytest.approx(1, rel=0.05)
    assert few.limit == "endpoints"


@pytest.mark.parametrize(
    ("scenario", "limit"),
    [
        (Scenario(10**5, 100), "stragglers"),
        (Scenario(10**7, 100, storage_bytes_per_s=2e7), "input"),
        (Scenario(10**6, 10, mean_s=0.5, sigma=0.1), "processor"),
        (Scenario(10**6, 10, rollout_bytes=1e7, sigma=0.1, storage_bytes_per_s=1e8), "storage"),
        (Scenario(10**5, 1, mean_s=0.01, sigma=0.1, rollout_bytes=1e6, node_bytes_per_s=1e6), "merge"),
    ],
)
def test_what_holds_a_run_up_is_named(scenario: Scenario, limit: str, costs: Costs) -> None:
    assert simulate(scenario, costs).limit == limit


def test_a_lost_node_costs_what_was_in_flight_and_a_start(costs: Costs) -> None:
    steady = simulate(Scenario(10**6, 10, sigma=0.1), costs)
    shaky = simulate(Scenario(10**6, 10, sigma=0.1, node_fails_every_s=86_400.0), costs)

    assert shaky.failures > 0
    assert steady.collected_s < shaky.collected_s < 1.5 * steady.collected_s
