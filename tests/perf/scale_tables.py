"""The tables of docs/scaling.md, made from simulated runs."""

from collections.abc import Sequence

from tests.perf.simulate_scale import (
    _INDEX_BYTES,
    _LOOKS_PER_S,
    _REPORTS_PER_S,
    _SYNC_EVERY_S,
    Costs,
    Outcome,
    Scenario,
    simulate,
)

ROLLOUTS = (10**6, 10**7, 10**8, 10**9)
NODES = (1, 10, 100, 1_000, 10_000)


def all_tables(costs: Costs) -> str:
    """Every table with its heading."""
    parts = (
        ("Time to collect, and what holds it up", _by_size(costs, splits_input=False)),
        ("The same with an input that was cut beforehand", _by_size(costs, splits_input=True)),
        ("One fleet of endpoints with 16,384 slots, 10 million rollouts", _one_fleet(costs)),
        ("How long a rollout may take, 10 million on 1,000 nodes", _timeouts(costs)),
        ("Shards per node, one after the other, 10 million rollouts on 1,000 nodes", _shards_per_node(costs)),
        ("What the driver and the file system see", _loads(costs)),
        ("Merging on one machine", _merging(costs)),
    )
    return "\n".join(f"### {heading}\n\n{table}" for heading, table in parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _by_size(costs: Costs, *, splits_input: bool) -> str:
    rows = []
    for rollouts in ROLLOUTS:
        outcomes = [simulate(Scenario(rollouts, nodes, splits_input=splits_input), costs) for nodes in NODES]
        rows.append([_count(rollouts), *map(_told, outcomes)])
    return _table(["rollouts", *(f"{_count(nodes)} node{'s' * (nodes > 1)}" for nodes in NODES)], rows)


def _told(outcome: Outcome) -> str:
    limit = "" if outcome.limit == "endpoints" else f", {outcome.limit}"
    return f"{_duration(outcome.collected_s)} ({outcome.efficiency:.0%}{limit})"


def _one_fleet(costs: Costs) -> str:
    rows = []
    for nodes in (1, 16, 64, 256, 1_024):
        outcome = simulate(Scenario(10**7, nodes, endpoint_slots=16_384), costs)
        best_s = outcome.scenario.rollouts * outcome.scenario.mean_s / 16_384
        wanted = nodes * outcome.scenario.slots_per_node
        told = [_duration(outcome.collected_s), f"{best_s / outcome.collected_s:.0%}"]
        rows.append([_count(nodes), _count(wanted), *told])
    return _table(["nodes", "slots they could use", "time", "use of the fleet"], rows)


def _timeouts(costs: Costs) -> str:
    rows = []
    for timeout_s in (300.0, 600.0, 1_800.0, 21_600.0):
        for slots in (64, 256, 1_024):
            outcome = simulate(Scenario(10**7, 1_000, timeout_s=timeout_s, slots_per_node=slots), costs)
            told = [_duration(outcome.collected_s), f"{outcome.efficiency:.0%}"]
            rows.append([_duration(timeout_s), _count(slots), *told])
    return _table(["rollout_timeout_s", "slots per shard", "time", "efficiency"], rows)


def _shards_per_node(costs: Costs) -> str:
    rows = []
    for shards in (1, 2, 4, 8):
        outcome = simulate(Scenario(10**7, 1_000, shards_per_node=shards, node_fails_every_s=10 * 86_400.0), costs)
        total_s = sum(outcome.busy_s.values())
        spent = [f"{outcome.busy_s[name] / total_s:.0%}" for name in ("rollouts", "stragglers", "input")]
        rows.append([str(shards), _duration(outcome.collected_s), *spent, str(outcome.failures)])
    return _table(["shards per node", "time", "rollouts", "stragglers", "reading input", "nodes lost"], rows)


def _loads(costs: Costs) -> str:
    rows = []
    for shards in (10, 100, 1_000, 10_000):
        every_s = max(0.5, shards / _REPORTS_PER_S)
        board = shards / every_s * costs.report_s
        driver = shards * _LOOKS_PER_S * costs.look_s_per_shard
        written = shards * min(256 / 60, 1 / costs.rollout_cpu_s) * 20_000
        syncs = 2 * shards / _SYNC_EVERY_S
        rows.append(
            [_count(shards), f"{every_s:g} s", f"{board:.0%}", f"{driver:.0%}", f"{syncs:,.0f}/s", _rate(written)]
        )
    head = ["shards", "report every", "board busy", "driver busy", "syncs", "written"]
    return _table(head, rows)


def _merging(costs: Costs) -> str:
    rows = []
    for rollouts in ROLLOUTS:
        outcome = Outcome(Scenario(rollouts, 1), costs)
        terabytes = rollouts * outcome.scenario.rollout_bytes / 1e12
        memory = rollouts * _INDEX_BYTES / 1e9
        rows.append([_count(rollouts), _duration(outcome.merge_s), f"{memory:.2g} GB", f"{terabytes:.2g} TB"])
    return _table(["rollouts", "time", "memory of the index", "data"], rows)


def _count(number: int) -> str:
    return f"{number:,}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s"


def _duration(seconds: float) -> str:
    for unit, size in (("years", 365 * 86_400.0), ("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
