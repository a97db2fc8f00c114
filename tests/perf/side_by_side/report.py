"""The findings as a page: tables for people, a plot, and JSON for programs."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import orjson

from tests.perf.side_by_side.estimates import Estimate
from tests.perf.side_by_side.payloads import PayloadCost
from tests.perf.side_by_side.processes import ROOT
from tests.perf.side_by_side.targets import Findings, Load

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.png"
DATA = ROOT / "docs" / "performance.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def publish(findings: Findings) -> None:
    """Write page, plot and data."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(findings)}{END}{after}")
    DATA.write_bytes(orjson.dumps(findings.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")
    plot(findings, PLOT)


def tables(findings: Findings) -> str:
    """All tables, as Markdown."""
    parts = [
        _table(
            ["target", "found", ""],
            [(name, found, outcome.value) for name, found, outcome in findings.verdicts()],
        ),
        _loads(findings.loads),
        "Rollouts of 100 KB:\n\n" + _loads(findings.large),
        "Rollouts that carry much, 16 in flight. In passes of one orjson load and dump: the whole rollout, what its "
        "payload adds to a rollout without any, and the floor, which only moves the same bytes through as many sockets "
        "and files:\n\n" + _payloads(findings.payloads),
        f"The endpoint alone answers {findings.endpoint_per_s:,.0f} requests/s on one core; the fastest product run "
        f"asked it {2 * max(load.per_s for load in findings.loads):,.0f} times a second. "
        f"Meanwhile the hypervisor gave {findings.stolen_share:.1%} of this machine's time to others.\n",
        _table(["waiting and memory", ""], [(name, f"{value:.2f}") for name, value in findings.start_up.items()]),
    ]
    if findings.measured_again:
        parts.append(f"Measured again since, in a run of its own: {', '.join(findings.measured_again)}.\n")
    return "\n".join(["", *parts])


def _loads(loads: list[Load]) -> str:
    heads = ["in flight", "model ms", "replicas", "floor/s", "ours/s", "floor CPU ms", "our CPU ms", "CPU ratio"]
    rows = [
        (
            str(load.in_flight),
            str(load.delay_ms),
            str(load.replicas),
            f"{load.floor_per_s:.0f}",
            f"{load.per_s:.0f}",
            f"{load.floor_cpu_ms:.2f}",
            f"{load.cpu_ms:.2f}",
            str(load.cpu_ratio),
        )
        for load in loads
    ]
    return _table(heads, rows)


def _payloads(costs: list[PayloadCost]) -> str:
    heads = ["payload", "KB", "rollouts/s", "our CPU ms", "one load and dump ms", "ratio", "added by it", "floor"]
    rows = [
        (
            cost.name,
            f"{cost.payload_bytes / 1000:.0f}",
            f"{cost.per_s:.0f}",
            f"{statistics.median(cost.cpu_ms):.1f}",
            f"{statistics.median(cost.pass_ms):.2f}",
            str(Estimate.of(cost.ratios)),
            str(Estimate.of(cost.added_ratios)),
            str(Estimate.of(cost.floor_ratios)) if cost.floor_ms else "",
        )
        for cost in costs
    ]
    return _table(heads, rows)


def _table(heads: list[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(findings: Findings, path: Path) -> None:
    """Rollouts per second and CPU per rollout against rollouts in flight."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (rate, cpu) = plt.subplots(1, 2, figsize=(11, 4.2))
    for delay_ms in sorted({load.delay_ms for load in findings.loads}):
        loads = [load for load in findings.loads if load.delay_ms == delay_ms and load.replicas == 1]
        x = [load.in_flight for load in loads]
        rate.plot(x, [load.floor_per_s for load in loads], "--o", label=f"three bare round trips, {delay_ms} ms")
        rate.plot(x, [load.per_s for load in loads], "-o", label=f"rollouts, {delay_ms} ms")
        cpu.plot(x, [load.floor_cpu_ms for load in loads], "--o", label=f"three bare round trips, {delay_ms} ms")
        cpu.plot(x, [load.cpu_ms for load in loads], "-o", label=f"rollouts, {delay_ms} ms")
    for axes, title in ((rate, "per second"), (cpu, "CPU ms each")):
        axes.set(xscale="log", xlabel="in flight", title=title)
        axes.set_xticks([load.in_flight for load in findings.loads if load.delay_ms == 0 and load.replicas == 1])
        axes.get_xaxis().set_major_formatter(mpl.ticker.ScalarFormatter())
        axes.grid(alpha=0.3)
    rate.set_yscale("log")
    cpu.set_ylim(bottom=0)
    cpu.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
