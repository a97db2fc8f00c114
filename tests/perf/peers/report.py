"""The findings as a section of docs/performance.md: a table per task, a plot, and JSON for programs."""

from pathlib import Path

import orjson

from tests.perf.peers.contenders import OURS
from tests.perf.peers.findings import Findings
from tests.perf.peers.tasks import ROOT, TASKS

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance-peers.png"
DATA = ROOT / "docs" / "performance-peers.json"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
TITLES = {
    "cpu_ms": "CPU ms per rollout",
    "per_s": "rollouts/s",
    "peak_mb": "most memory, MB",
    "first_result_s": "start to first result, s",
}

FAR_APART = ("cpu_ms", "per_s")
"""What the plot shows on a logarithmic scale."""


def publish(findings: Findings, page: Path = PAGE, plot_to: Path = PLOT, data: Path = DATA) -> None:
    """Write section, plot and data; the rest of the page stays."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no section between {BEGIN} and {END}; put both lines back")
    page.write_text(f"{before}{BEGIN}\n{tables(findings)}{END}{after}")
    data.write_bytes(orjson.dumps(findings.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
    plot(findings, plot_to)


def tables(findings: Findings) -> str:
    """A table per task, as Markdown."""
    parts = [_task(findings, task) for task in findings.rounds]
    rounds = len(next(iter(findings.rounds.values()))[OURS])
    parts.append(
        f"Rounds: {rounds}, on {findings.cores} cores. When they began, {findings.load:.1f} other processes wanted to "
        f"run; meanwhile the hypervisor gave {findings.stolen_share:.1%} of the machine's time to others.\n"
    )
    return "\n".join(["", *parts])


def _task(findings: Findings, task: str) -> str:
    heads = ["", "rollouts", "in flight", *TITLES.values()]
    rows = [
        [
            findings.versions[name],
            f"{findings.rollouts[name]:,}",
            str(findings.in_flight[name]),
            *(_cell(findings, task, name, metric) for metric in TITLES),
        ]
        for name in findings.rounds[task]
    ]
    lines = "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *rows])
    known = TASKS[task]
    return (
        f"**`{known.environment}`**: {known.model_calls} model calls and {len(known.tool_calls)} tool "
        f"call{'s' * (len(known.tool_calls) > 1)} per rollout.\n\n{lines}"
    )


def _cell(findings: Findings, task: str, contender: str, metric: str) -> str:
    found = _number(findings.spread(task, contender, metric).median)
    if contender == OURS:
        return found
    ratio = findings.ratio(task, contender, metric)
    return f"{found}: **{_number(ratio.median)} x** ({_number(ratio.low)} to {_number(ratio.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(findings: Findings, path: Path) -> None:
    """What everybody needs, one picture per figure, both tasks in each; the lines are the spread of the rounds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, pictures = plt.subplots(1, len(TITLES), figsize=(15, 3.6), sharey=True)
    names = list(findings.versions)
    places = [place + 0.2 for place in range(len(names))]
    for axes, (metric, title) in zip(pictures, TITLES.items(), strict=True):
        for offset, task in enumerate(findings.rounds):
            found = [findings.spread(task, name, metric) for name in names]
            axes.barh(
                [place + 0.4 * offset for place in range(len(names))],
                [one.median for one in found],
                height=0.38,
                xerr=[[one.median - one.low for one in found], [one.high - one.median for one in found]],
                label=task,
            )
        axes.set(title=title, xscale="log" if metric in FAR_APART else "linear", yticks=places)
        axes.set_yticklabels([findings.versions[name] for name in names])
        axes.grid(alpha=0.3, axis="x")
    pictures[0].invert_yaxis()
    pictures[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
