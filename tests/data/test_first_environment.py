"""The tutorial, word for word: its files are written and its commands typed, in its order, in an empty folder."""

import json
import re
from pathlib import Path

import pytest

from tests.guides import walk


@pytest.mark.usefixtures("bare_pytest")
def test_a_newcomer_can_follow_the_tutorial(tmp_path: Path) -> None:
    with walk(tmp_path) as walking:
        printed = walking.follow("first-environment.md")

    assert printed.count(" passed") == 3
    assert "The example data of resources_servers/word_count is complete." in printed
    rollouts = [json.loads(line) for line in (tmp_path / "results/word_count.jsonl").read_text().splitlines()]
    assert len(rollouts) == 100
    assert 0.6 < sum(rollout["reward"] for rollout in rollouts) / 100 < 0.9
    interval = re.search(r"mean/reward +\S+ +\[(\S+), (\S+)\] +100", printed)
    assert interval is not None
    assert float(interval[1]) < 0.75 < float(interval[2])
    assert re.search(
        r"mean/words_found|words_found", (tmp_path / "results/word_count_aggregate_metrics.json").read_text()
    )
