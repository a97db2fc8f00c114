"""Files that a crash left torn, or with garbage at the end: each of the five, in every way."""

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

from nemo_gym.runs.files import RolloutPaths
from tests.chaos.endpoint_faults import FLAKY, endpoints
from tests.chaos.lab import EXIT_OK, Job, Lab
from tests.chaos.ledger import Tally, read_lines
from tests.chaos.scenario import scenario

_TRY_AGAIN = "+retry_exhausted=true"
ROUNDS = 2
"""How many of the kinds of damage one file suffers in one go."""
Damage = Callable[[bytes, random.Random], bytes]


def _torn(content: bytes, chance: random.Random) -> bytes:
    return content[: len(content) - chance.randrange(1, max(2, len(content) // 2))]


def _with_garbage(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.randrange(1, 2_000))


def _with_zeros(content: bytes, chance: random.Random) -> bytes:
    return content + bytes(chance.randrange(1, 5_000))


def _overwritten(content: bytes, chance: random.Random) -> bytes:
    """The last block of the right length, but never written: what a power failure leaves."""
    lost = chance.randrange(1, max(2, len(content) // 3))
    return content[: len(content) - lost] + bytes(lost - 1) + b"\n"


DAMAGES: tuple[Damage, ...] = (_torn, _with_garbage, _with_zeros, _overwritten)


def _damage(job: Job, path: Path, damage: Damage) -> None:
    content = path.read_bytes() if path.exists() else b""
    if content:
        path.write_bytes(damage(content, job.lab.chance))
        job.tally.injected += 1


def _damaged(lab: Lab, choose: Callable[[RolloutPaths], Path]) -> Tally:
    """Killed and damaged, more than once; then finished, and every file is sound."""
    job = Job(lab, endpoints(lab.shared), agent=FLAKY, rows=60)
    path = choose(RolloutPaths(job.output))
    for damage in lab.chance.sample(DAMAGES, ROUNDS):
        with job.collecting(_TRY_AGAIN) as collector:
            if job.at_a_random_moment(collector, lambda: collector.send(signal.SIGKILL), upto=0.4):
                job.tally.injected -= 1
            collector.wait()
        _damage(job, path, damage)
    job.is_complete = False
    return _sound(job, job.finish(_TRY_AGAIN))


def _sound(job: Job, tally: Tally) -> Tally:
    paths = RolloutPaths(job.output)
    try:
        for path in (paths.rollouts, paths.failures, paths.materialized_inputs):
            read_lines(path)
        for path in (paths.manifest, paths.aggregate_metrics):
            json.loads(path.read_bytes())
    except ValueError as error:
        tally.problems.append(f"{path} is still damaged: {error}")
    return tally


@scenario("torn or garbage tail: rollouts", short=True)
def rollouts(lab: Lab) -> Tally:
    """Finished rollouts."""
    return _damaged(lab, lambda paths: paths.rollouts)


@scenario("torn or garbage tail: failures sidecar")
def failures(lab: Lab) -> Tally:
    """Failed attempts."""
    return _damaged(lab, lambda paths: paths.failures)


@scenario("torn or garbage tail: materialized inputs")
def materialized_inputs(lab: Lab) -> Tally:
    """The rows of the run."""
    return _damaged(lab, lambda paths: paths.materialized_inputs)


@scenario("torn or garbage tail: manifest")
def manifest(lab: Lab) -> Tally:
    """What was run."""
    return _damaged(lab, lambda paths: paths.manifest)


@scenario("torn or garbage tail: aggregate metrics")
def aggregate_metrics(lab: Lab) -> Tally:
    """Of a run that is complete: they are computed again."""
    job = Job(lab, lab.shared.steady, rows=20)
    metrics = RolloutPaths(job.output).aggregate_metrics
    for damage in lab.chance.sample(DAMAGES, ROUNDS):
        with job.collecting() as collector:
            job.expect(collector.wait() == EXIT_OK, collector.printed[-1000:])
        _damage(job, metrics, damage)
    job.is_complete = False
    return _sound(job, job.finish())
