"""Faults of the collector itself: it is killed, interrupted, or not alone."""

import signal
import time

from tests.chaos.lab import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_MISTAKE, Job, Lab
from tests.chaos.ledger import Tally
from tests.chaos.scenario import scenario


def _interrupted(lab: Lab, rounds: int, *numbers: signal.Signals) -> Tally:
    """Collectors that get these signals, one after the other at random moments."""
    job = Job(lab, lab.shared.steady, rows=60)
    for _ in range(rounds):
        with job.collecting() as collector:

            def strike() -> None:
                for number in numbers:
                    collector.send(number)
                    time.sleep(lab.chance.uniform(0.0, 0.1))

            struck = job.at_a_random_moment(collector, strike, upto=0.5)
            code = collector.wait()
            is_good = code == EXIT_OK
            if struck:  # Python, too, ends at a signal that comes before the command is there
                is_good = code == EXIT_INTERRUPTED or (code == -numbers[0] and not collector.has_begun)
            job.expect(is_good or code == -signal.SIGKILL, f"exit code {code}: {collector.printed[-1000:]}")
    return job.finish()


@scenario("collector killed (SIGKILL)", short=True)
def killed(lab: Lab) -> Tally:
    """Again and again."""
    return _interrupted(lab, 4, signal.SIGKILL)


@scenario("collector stopped (SIGTERM)")
def stopped(lab: Lab) -> Tally:
    """In good order."""
    return _interrupted(lab, 2, signal.SIGTERM)


@scenario("collector: Ctrl-C twice")
def interrupted_twice(lab: Lab) -> Tally:
    """Without waiting for what is in flight."""
    return _interrupted(lab, 2, signal.SIGINT, signal.SIGINT)


@scenario("two collectors on one output", short=True)
def two_at_once(lab: Lab) -> Tally:
    """The second is refused, whenever it comes."""
    job = Job(lab, lab.shared.steady)
    with job.collecting() as first:
        job.at_a_random_moment(first, lambda: None)
        with job.collecting(name="rival") as rival:
            codes = rival.wait(), first.wait()
        if codes[0] != EXIT_OK:  # else the first was done before the second looked
            job.expect(codes == (EXIT_USER_MISTAKE, EXIT_OK), f"exit codes {codes}")
            job.expect(f"process {first.pid} is already collecting" in rival.printed, rival.printed[-500:])
    return job.finish()
