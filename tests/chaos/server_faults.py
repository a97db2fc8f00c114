"""Faults of servers: killed, hung, restarted, with everything they had in memory."""

import os
import signal
import time

from tests.chaos.fleet import AGENT, MODEL, RESOURCES, Fleet, counter_config
from tests.chaos.lab import Job, Lab
from tests.chaos.ledger import Tally
from tests.chaos.scenario import scenario

_RESTARTING = "+restart_crashed_servers=true"


def _kill(fleet: Fleet, server: str) -> None:
    fleet.signal_server(server, signal.SIGKILL)


def _hang(fleet: Fleet, server: str, seconds: float, then: signal.Signals) -> None:
    pid = fleet.signal_server(server, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, then)


def _each_fault(lab: Lab, server: str, *, alone: bool) -> Tally:
    """Killed; hung and let go; hung and killed: one collector for each, all on one output."""
    fleet = lab.fleet(counter_config(alone=alone), _RESTARTING)
    job = Job(lab, fleet, rows=60)
    faults = [
        lambda: _kill(fleet, server),
        lambda: _hang(fleet, server, lab.chance.uniform(0.5, 3.0), signal.SIGCONT),
        lambda: _hang(fleet, server, lab.chance.uniform(0.5, 2.0), signal.SIGKILL),
    ]
    lab.chance.shuffle(faults)
    with job.collecting() as collector:
        for fault in faults:
            job.at_a_random_moment(collector, fault, upto=0.3)
        collector.wait(120.0)
    return job.finish()


@scenario("agent killed, hung and restarted")
def agent(lab: Lab) -> Tally:
    """In a process of its own."""
    return _each_fault(lab, AGENT, alone=True)


@scenario("resources server killed, hung and restarted; its sessions lost", short=True)
def resources(lab: Lab) -> Tally:
    """It keeps a counter per rollout: whoever had one there must begin anew, and is never scored without it."""
    return _each_fault(lab, RESOURCES, alone=True)


@scenario("model server killed, hung and restarted")
def model(lab: Lab) -> Tally:
    """In a process of its own."""
    return _each_fault(lab, MODEL, alone=True)


@scenario("host process of all servers killed, hung and restarted")
def host(lab: Lab) -> Tally:
    """Everything at once."""
    return _each_fault(lab, AGENT, alone=False)


@scenario("head server and launcher killed, all servers started again", short=True)
def head_killed(lab: Lab) -> Tally:
    """With the launcher everything goes; somebody starts it again while the collector waits."""
    fleet = lab.fleet(counter_config())
    job = Job(lab, fleet)

    def strike() -> None:
        fleet.launcher.send(signal.SIGKILL)
        fleet.launcher.wait()
        fleet.start()

    with job.collecting() as collector:
        job.at_a_random_moment(collector, strike, upto=0.6)
        collector.wait(120.0)
    return job.finish()


@scenario("head server and launcher hung")
def head_hung(lab: Lab) -> Tally:
    """The servers go on without it."""
    fleet = lab.fleet(counter_config())
    job = Job(lab, fleet)

    def strike() -> None:
        fleet.launcher.send(signal.SIGSTOP)
        time.sleep(lab.chance.uniform(1.0, 3.0))
        fleet.launcher.send(signal.SIGCONT)

    with job.collecting() as collector:
        job.at_a_random_moment(collector, strike, upto=0.6)
        collector.wait(120.0)
    return job.finish()
