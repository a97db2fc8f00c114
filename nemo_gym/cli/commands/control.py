"""`ng_control`: ask and steer a run while it is made."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym.cli.command import command
from nemo_gym.cli.runs import print_runs
from nemo_gym.runs.sockets import LivingRun, Request, ask, find_run
from nemo_gym.schemas.cli_config import ControlConfig
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table, shown

_ANSWERS_WITHIN_S = 60.0


@command(ControlConfig, reads_config=False)
def main(config: ControlConfig) -> None:
    """Ask a running collector how it is doing, or change what it does: pause, other caps, one rollout less, stop.

    The run is named by its output or by its id, as ng_status shows them; if only one is going on, it need not be. Only
    the user who started it can do this, on the machine where its collector (with Ray: its driver) runs. What was
    changed is recorded in the run's manifest.

    Examples:
        ng_control +run=results/rollouts.jsonl +set='{num_samples_in_parallel: 64, rollout_timeout_s: 600}'
        ng_control +pause=true
        ng_control +run=results/rollouts.jsonl +in_flight=true
        ng_control +run=results/rollouts.jsonl +cancel=17/3
        ng_control +run=results/rollouts.jsonl +retry=failed
        ng_control +run=results/rollouts.jsonl +stop=true
    """
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
