"""How runs that go on are shown on a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.runs.sockets import LivingRun
from nemo_gym.terminal import new_table, print_line, print_table, shown

_AGENTS_SHOWN = 3


def print_runs(runs: Sequence[LivingRun]) -> None:
    """Print a table of runs, and how many there are."""
    table = new_table("run", "id", "state", "done", "in flight", "failed", "rate", "time left", "score", "cost")
    has_cost = any(run.status.get("cost_usd") is not None for run in runs)
    if not has_cost:
        table = new_table(*table.columns[:-1])
    for run in runs:
        table.add_row(*(_cells(run) if has_cost else _cells(run)[:-1]))
    print_table(table)
    print_line(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} going on")


def _cells(run: LivingRun) -> list[object]:
    status = run.status
    total, eta_s, cost = status.get("total"), status.get("eta_s"), status.get("cost_usd")
    return [
        shown(str(run.output)),
        run.id,
        status.get("state"),
        f"{status.get('done')}{'' if total is None else f'/{total}'}",
        status.get("in_flight"),
        status.get("failed"),
        f"{60 * float(status.get('rate_per_s') or 0):.1f}/min",
        "?" if eta_s is None else _duration(float(eta_s)),
        _scores(status.get("scores") or {}),
        "" if cost is None else f"${float(cost):.4g}",
    ]


def _scores(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """The mean of each agent, with its 95 % interval."""
    texts = []
    for agent, score in list(scores.items())[:_AGENTS_SHOWN]:
        if score.get("mean") is None:
            continue
        ends = score.get("ci95")
        interval = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else ""
        name = f"{shown(agent)} " if len(scores) > 1 else ""
        texts.append(f"{name}{score['mean']:.3g}{interval}")
    more = f", {len(scores) - _AGENTS_SHOWN} more" if len(scores) > _AGENTS_SHOWN else ""
    return ", ".join(texts) + more


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
