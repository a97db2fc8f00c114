"""A pace of 600 requests a minute over four replicas: what they send, what arrives, and the same without a pace."""

import tempfile
from pathlib import Path

import pytest

from tests.collection.pace_lab import FREE, PACED, most_within, pace_lab
from tests.perf.side_by_side.estimates import Target, hold

PER_MINUTE, REPLICAS = 600, 4
LASTS_S, WINDOW_S = 60, 10.0
AT_THE_ENDPOINT, WHERE_SENT = 1.05, 1.02
ROLLOUTS = PER_MINUTE * LASTS_S // 60
UNPACED = 200


def test_four_replicas_keep_600_requests_a_minute_in_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = PER_MINUTE * WINDOW_S / 60
    targets = (
        Target("most sent in 10 s", most=allowed * WHERE_SENT),
        Target("most that arrived in 10 s", most=allowed * AT_THE_ENDPOINT),
        Target("seconds for all", most=LASTS_S * 1.1),  # a pace that is far below the limit would be easy to keep
    )

    def paced() -> list[float]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        monkeypatch.chdir(folder)
        return list(sent_and_arrived(folder, allowed))

    hold(paced, *targets, rounds=1, more=2)


def sent_and_arrived(folder: Path, allowed: float) -> tuple[float, float, float]:
    """The most that went out and came in within a window, and how long all of it took."""
    with pace_lab(folder, REPLICAS, PER_MINUTE * 1.1, requests_per_minute=PER_MINUTE) as lab:
        summary = lab.collect(PACED, ROLLOUTS)
        sent, arrived = lab.sent(), lab.arrived()
        free = lab.collect(FREE, UNPACED)
        refused = sum(status == 429 for _, status in lab.arrived())

    times = [at for at, _ in sent]
    most_sent, most_arrived = (most_within(of, WINDOW_S) for of in (times, [at for at, _ in arrived]))
    statuses = [status for _, status in arrived]
    took_s = times[-1] - times[0]
    per_replica = sorted(sum(pid == of for _, pid in sent) for of in {pid for _, pid in sent})
    print(f"\n{len(sent)} requests in {took_s:.1f} s, {(len(sent) - 1) / took_s * 60:.1f} a minute")
    print(f"per replica: {per_replica}; most in 10 s: {most_sent} sent, {most_arrived} arrived ({allowed:g} allowed)")
    print(f"429s: {statuses.count(429)} paced, {refused} in {UNPACED} rollouts without a pace")
    assert (summary.exit_code, free.exit_code, len(sent)) == (0, 0, ROLLOUTS)
    assert statuses.count(200) == len(statuses)
    assert refused >= 200
    assert min(per_replica) >= ROLLOUTS / REPLICAS / 2
    return most_sent, most_arrived, took_s
