"""What goes on: `ng_status` (servers, runs), `ng_attach` (the living line of a run), `ng_control` (steering one)."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.collect.line import COLLECTING, Snapshot, view_for
from nemo_gym.errors import GymError
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import is_being_written
from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.sockets import LivingRun, Request, ask, find_run, living_runs
from nemo_gym.schemas.cli_config import AttachConfig, ControlConfig, StatusConfig
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table, shown

_ASK_EVERY_S = 0.5
_PATIENCE_S = 60.0
_ANSWERS_WITHIN_S = 60.0
_AGENTS_SHOWN = 3


def status(config: StatusConfig) -> None:
    """`ng_status`."""
    from nemo_gym.server_status import StatusCommand  # with aiohttp, which asking a run does not need

    servers_status = StatusCommand()
    servers = servers_status.discover_servers()
    if config.json_format:
        listed = [server.model_dump(mode="json") for server in servers]
        listing = {"servers": listed, "runs": [run.status for run in living_runs()]} if config.runs else listed
        print(json.dumps(listing, indent=2))
        return
    servers_status.display_status(servers)
    runs = living_runs()
    if runs:
        print_runs(runs)


def attach(config: AttachConfig) -> int:
    """`ng_attach`."""
    address = find_run(config.run)
    output = Path(str(ask(address, {"do": "status"})["output"]))
    try:
        _show_until_gone(address)
        while is_being_written(RolloutPaths(output)):
            time.sleep(_ASK_EVERY_S)
    except KeyboardInterrupt:
        print(f"\nThe run goes on; ng_attach +run={output} shows it again.", file=sys.stderr)
        return 0
    return _tell_end(RolloutPaths(output))


def _show_until_gone(address: Path) -> None:
    """Show the line as long as there is one; a collector that is too busy to answer is asked again."""
    snapshot = _snapshot(address)
    view = view_for(sys.stderr, snapshot)
    began_s = heard_s = shown_s = time.monotonic()
    view.show(snapshot)
    try:
        while True:
            time.sleep(_ASK_EVERY_S)
            now_s = time.monotonic()
            try:
                snapshot = _snapshot(address)
                heard_s = now_s
            except GymError:
                if not address.exists() or now_s - heard_s > _PATIENCE_S:
                    return
                continue
            if now_s - shown_s >= view.pause_s(now_s - began_s):
                view.show(snapshot)
                shown_s = now_s
    finally:
        view.close(snapshot)


def _snapshot(address: Path) -> Snapshot:
    line = ask(address, {"do": "line"})
    return Snapshot(int(line["done"]), line["total"], str(line["tail"]), str(line.get("title", COLLECTING)))


def _tell_end(paths: RolloutPaths) -> int:
    manifest = read_manifest(paths.manifest)
    counts = {} if manifest is None else manifest.counts
    if "expected" not in counts:
        print(f"The run has ended: {paths.rollouts}")
        return 0
    print(f"The run has ended: {counts['success']} of {counts['expected']} rollouts are in {paths.rollouts}")
    return 1 if counts["missing"] else 0


def control(config: ControlConfig) -> None:
    """`ng_control`."""
    address = find_run(config.run)
    answers = {str(request["do"]): ask(address, request, _ANSWERS_WITHIN_S) for request in _requests(config)}
    if config.json_format:
        print(harmless_json(json.dumps(answers)))
        return
    for what, answer in answers.items():
        _show(what, answer, address)


def _requests(config: ControlConfig) -> Iterator[Request]:
    """What is asked for, in an order in which it makes sense; how the run stands, when it is nothing."""
    asked = False
    for is_wanted, request in (
        (config.values is not None, {"do": "set", "values": config.values}),
        (config.pause, {"do": "pause"}),
        (config.cancel is not None, {"do": "cancel", "rollout": config.cancel}),
        (config.retry is not None, {"do": "retry", "what": config.retry}),
        (config.resume, {"do": "resume"}),
        (config.stop, {"do": "stop"}),
        (config.in_flight, {"do": "in_flight"}),
    ):
        if is_wanted:
            asked = True
            yield request
    if not asked:
        yield {"do": "status"}


def _show(what: str, answer: dict[str, Any], address: Path) -> None:
    if what == "status":
        print_runs([LivingRun(address, answer)])
    elif what == "in_flight":
        _show_in_flight(answer)
    elif what == "set":
        print_line("Set: " + ", ".join(f"{name}={json.dumps(value)}" for name, value in answer["set"].items()))
    elif what in ("pause", "resume"):
        already = "" if answer["changed"] else " already"
        print_line(f"The run is {answer['state']}{already}; {answer['in_flight']} rollouts are in flight")
    elif what == "stop":
        grace = "are let go" if answer["at_once"] else "have ten seconds; a second +stop=true ends it at once"
        print_line(f"The run stops; the {answer['in_flight']} rollouts in flight {grace}")
    elif what == "cancel":
        print_line(f"Cancelled: {', '.join(answer['cancelled'])}")
    else:
        print_line(f"To be tried again: {answer['retried']} rollouts")


def _doing(rollout: dict[str, Any]) -> str:
    """What its agent says: the call under way, and how many came before."""
    call, calls = rollout.get("call"), rollout.get("calls")
    before = "" if not calls else f"after {calls} {'call' if calls == 1 else 'calls'}"
    if not isinstance(call, dict):
        return before
    under_way = f"{shown(str(call.get('server')))}{shown(str(call.get('path')))} for {float(call['for_s']):.0f} s"
    return f"{under_way}, {before}" if before else under_way


def _show_in_flight(answer: dict[str, Any]) -> None:
    table = new_table("rollout", "agent", "attempt", "since", "for", "doing")
    for each in answer["in_flight"]:
        took = f"{each['for_s']:.0f} s"
        table.add_row(each["rollout"], each["agent"], each["attempt"], each["since"], took, _doing(each))
    print_table(table)
    more = f", {answer['left_out']} of them not listed" if answer["left_out"] else ""
    print_line(f"{len(answer['in_flight']) + answer['left_out']} rollouts in flight{more}")


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
