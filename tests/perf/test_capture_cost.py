"""What it costs to observe rollouts of several steps, measured in turn with rollouts that nobody observes."""

import itertools
from pathlib import Path

import pytest

from tests.perf.side_by_side.estimates import Target, hold
from tests.perf.test_recording_cost import ROLLOUTS, collect
from tests.recording.harness import noisy_endpoint

ROUNDS = 4
MOST_TO_CAPTURE = 1.35
"""The aim is 1.10; 1.20 to 1.27 was measured in six rounds, 1.28 to 1.40 while each call was captured by itself."""


def test_observing_a_thousand_rollouts_costs_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = itertools.count()

    def observed_over_plain() -> list[float]:
        number = next(numbers)
        plain_s, _ = collect(tmp_path, f"plain{number}", endpoint.port)
        observed = "+observability_enabled=true", f"+model_call_capture_dir={tmp_path}/captures{number}"
        observed_s, records = collect(tmp_path, f"observed{number}", endpoint.port, *observed)
        assert len(records) == ROLLOUTS
        assert all(record["ng_trajectory"]["model_calls"] for record in records)
        return [observed_s / plain_s]

    with noisy_endpoint() as endpoint, capsys.disabled():
        hold(observed_over_plain, Target("CPU observed over not observed", most=MOST_TO_CAPTURE), rounds=ROUNDS)
