"""Faults of the collector itself: it is killed, interrupted, or not alone."""

import signal
import time

from tests.chaos.lab import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_MISTAKE, Job, Lab
from tests.chaos.ledger import Tally
from tests.chaos.scenario import scenario
from tests.rollouts.racing import WITHOUT_LOCKS


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


@scenario("two collectors on one output, one of them through a link", short=True)
def two_names(lab: Lab) -> Tally:
    """A symbolic or a hard link, in another folder: the second is refused."""
    job = Job(lab, lab.shared.steady)
    for link in ("symbolic.jsonl", "hard.jsonl"):
        other = lab.folder / "elsewhere" / link
        other.parent.mkdir(exist_ok=True)
        with job.collecting() as first:
            if not job.at_a_random_moment(first, lambda: None, upto=0.3):
                continue
            if link == "symbolic.jsonl":
                other.symlink_to(job.output)
            else:
                other.hardlink_to(job.output)
            with job.collecting(f"+output_jsonl_fpath={other}", name=f"rival-{link}") as rival:
                code = rival.wait()
            if first.is_running:
                job.expect(code == EXIT_USER_MISTAKE, f"exit code {code}: {rival.printed[-1000:]}")
                job.expect("collect" in rival.printed, rival.printed[-500:])
                first.send(signal.SIGTERM)
            first.wait()
    job.is_complete = False
    return job.finish()


@scenario("two collectors at once, where files cannot be locked")
def two_without_locks(lab: Lab) -> Tally:
    """Whoever creates the lock file has it, and nobody else."""
    (lab.folder / "without").mkdir()
    (lab.folder / "without" / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    env = {"PYTHONPATH": str(lab.folder / "without")}
    job = Job(lab, lab.shared.steady)
    with job.collecting(env=env) as one, job.collecting(name="rival", env=env) as other:
        codes = one.wait(), other.wait()
    job.tally.injected += 1
    job.expect(EXIT_OK in codes, f"exit codes {codes}: {one.printed[-500:]} {other.printed[-500:]}")
    job.expect(set(codes) <= {EXIT_OK, EXIT_USER_MISTAKE}, f"exit codes {codes}")
    job.is_complete = False
    return job.finish(env=env)
