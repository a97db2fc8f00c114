"""Clocks that jump while rollouts are under way: those of the servers and of the collector, never the system's."""

from pathlib import Path

from tests.chaos.fleet import counter_config
from tests.chaos.lab import Job, Lab
from tests.chaos.ledger import Tally
from tests.chaos.scenario import scenario

JUMPS = ("-3600", "34560000", "-86400", "7200")
"""Seconds, from the true time: an hour back, 400 days ahead, a day back, two hours ahead."""


@scenario("clock set back and forth by hours and days")
def clock_jumps(lab: Lab) -> Tally:
    """Sessions, retries, time limits and files do not mind."""
    clock = lab.folder / "clock"
    clock.write_text("0")
    env = {"CHAOS_CLOCK": str(clock), "PYTHONPATH": str(Path(__file__).parent / "jumping_clock")}
    fleet = lab.fleet(counter_config(), env=env)
    job = Job(lab, fleet, rows=60)
    jumps = list(JUMPS)
    lab.chance.shuffle(jumps)

    def set_to(jump: str) -> None:
        aside = clock.with_suffix(".new")
        aside.write_text(jump)
        aside.replace(clock)

    with job.collecting(env=env) as collector:
        for jump in jumps:
            job.at_a_random_moment(collector, lambda: set_to(jump), upto=0.25)  # noqa: B023
        collector.wait()
    return job.finish(env=env)
