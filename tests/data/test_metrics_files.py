"""Metrics files: what counts as a disagreement, and what happens then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.data.metrics_files import differences
from nemo_gym.train_data_utils import MetricsConflictError, TrainDataProcessor

WriteRows = Callable[..., Path]
AgentConfig = Callable[..., dict[str, Any]]


def prepare(config: dict[str, Any], **options: Any) -> None:
    chosen = {"output_dirpath": "out", "mode": "train_preparation"} | options
    TrainDataProcessor().run(OmegaConf.create(config | chosen))


def train(path: Path) -> dict[str, Any]:
    return {"name": "demo", "type": "train", "jsonl_fpath": str(path), "license": "MIT"}


def row(**fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "q"}, **fields}


def test_metrics_that_changed_are_a_conflict_and_the_old_ones_stay(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    other = write_rows("u.jsonl", row())
    path = write_rows("t.jsonl", row(v=1))
    config = agent_config(a=[train(path), train(other)])
    prepare(config)
    old = (tmp_path / "t_metrics.json").read_text()
    write_rows("t.jsonl", row(v=2))

    with pytest.raises(MetricsConflictError) as caught:
        prepare(config)

    assert "Found conflicting aggregate metrics that need to be corrected:" in str(caught.value)
    assert "t_metrics_conflict.json" in str(caught.value)
    assert "+overwrite_metrics_conflicts=true" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert (tmp_path / "t_metrics.json").read_text() == old
    assert json.loads((tmp_path / "t_metrics_conflict.json").read_text())["v"]["Average"] == 2.0

    prepare(config, overwrite_metrics_conflicts=True)
    assert not list(tmp_path.glob("*conflict*"))
    assert json.loads((tmp_path / "t_metrics.json").read_text())["v"]["Average"] == 2.0
    assert json.loads((tmp_path / "out/train.jsonl").read_text().splitlines()[0])["v"] == 2


def test_a_conflict_of_the_combined_metrics_leaves_its_rows_unwritten(
    write_rows: WriteRows, agent_config: AgentConfig
) -> None:
    path = write_rows("t.jsonl", row(v=1))
    Path("out").mkdir()
    Path("out/train_metrics.json").write_text('{"Number of examples": 7}')

    with pytest.raises(MetricsConflictError, match=r"train_metrics_conflict\.json"):
        prepare(agent_config(a=[train(path)]))

    assert sorted(path.name for path in Path("out").iterdir()) == ["train_metrics.json", "train_metrics_conflict.json"]


def test_metrics_that_agree_are_left_untouched(
    write_rows: WriteRows, agent_config: AgentConfig, tmp_path: Path
) -> None:
    path = write_rows("t.jsonl", row(v=1))
    config = agent_config(a=[train(path)])
    prepare(config)
    metrics = tmp_path / "t_metrics.json"
    by_hand = metrics.read_text().replace("    ", " ")
    metrics.write_text(by_hand)
    metrics.chmod(0o444)

    prepare(config)

    assert metrics.read_text() == by_hand


@pytest.mark.parametrize(
    ("old", "new", "agrees"),
    [
        (100.0, 100.004, True),
        (100.0, 100.006, False),
        (0.5, 0.5004, True),
        (0.5, 0.5006, False),
        (0.999, 1.0039, True),
        (0.9, 0.9006, False),
        (2, 2.001, False),
        (2.0, 2.001, True),
        ("x", "x", True),
        ([1, 1, 2], [2, 1, 1], True),
        ([1, 1, 2], [1, 2, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}], True),
    ],
)
def test_metrics_agree_within_a_tolerance(old: object, new: object, agrees: bool) -> None:
    assert (list(differences({"key": old}, {"key": new})) == []) is agrees
