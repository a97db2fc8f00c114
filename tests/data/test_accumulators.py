"""Accumulators and functions by which programs elsewhere measure rows themselves."""

import json
from collections import Counter
from typing import Any

import pytest

from nemo_gym.train_data_utils import (
    Accumulator,
    AvgMinMax,
    DatasetMetrics,
    DatasetValidatorState,
    StringMetrics,
    TrainDataProcessorConfig,
    aggregate_other_metrics,
    compute_sample_metrics,
    postprocess_other_metrics,
)

SAMPLE = {
    "responses_create_params": {"input": [{"role": "user", "content": "hi there"}], "temperature": 0.5, "tools": []},
    "score": 3,
    "tags": ["a", "b", "a"],
    "mixed": [1, "x"],
    "temperature": 7,
    "nested": {"x": 1},
    "none": None,
}


def numbers(*values: float) -> AvgMinMax:
    made = AvgMinMax()
    for value in values:
        made.observe(value)
    return made


def test_numbers_collected_in_parts_are_those_collected_at_once() -> None:
    parts, at_once = numbers(1, 2.5), numbers(1, 2.5, 4, 0.0004)
    parts.add(numbers(4, 0.0004))
    parts.add(AvgMinMax())

    assert parts.model_dump(include={"total", "min", "max"}) == {"total": 4, "min": 0.0004, "max": 4.0}
    assert [parts.mean, parts.M2] == pytest.approx([at_once.mean, at_once.M2])
    assert parts.aggregate() == at_once.aggregate().model_copy(update={"mean": parts.mean, "M2": parts.M2})


def test_what_is_read_is_rounded_and_not_added_to_again() -> None:
    made = numbers(1, 2, 4, 0.0004).aggregate()

    assert isinstance(made, Accumulator)
    assert made.is_aggregated
    assert made.model_dump(by_alias=True) == {
        "Total # non-null values": 4,
        "Average": 1.75,
        "Min": 0.0,
        "Max": 4.0,
        "Standard deviation": 1.71,
    }
    assert AvgMinMax().aggregate().model_dump() == {"total": 0, "average": 0, "min": 0, "max": 0, "stddev": 0}
    for one, other in ((made, AvgMinMax()), (AvgMinMax(), made)):
        with pytest.raises(ValueError, match="was aggregated"):
            one.add(other)


def test_one_sample_is_measured_or_offending() -> None:
    metrics, is_offending = compute_sample_metrics(json.dumps(SAMPLE))

    assert not is_offending
    assert (metrics.number_of_examples, metrics.number_of_tools.total, metrics.temperature.mean) == (1, 1, 0.5)
    assert metrics.number_of_turns.max == 1
    minimal, _ = compute_sample_metrics('{"responses_create_params": {"input": []}}')
    assert minimal.json_dumped_number_of_words.max == 2
    for bad in ("{", "[]", "{}", '{"responses_create_params": {"input": 3}}', '{"a": "\udcff"}'):
        assert compute_sample_metrics(bad) == (DatasetMetrics(), True)


def test_other_fields_become_attributes_of_the_metrics() -> None:
    gathered: dict[str, Any] = {}
    for _ in range(2):
        aggregate_other_metrics(gathered, SAMPLE)
    metrics = DatasetMetrics()
    postprocess_other_metrics(metrics, gathered)

    assert isinstance(gathered["score"], AvgMinMax)
    assert metrics.score.average == 3  # type: ignore[attr-defined]
    assert metrics.tags == StringMetrics(unique_count=2, total_count=6)  # type: ignore[attr-defined]
    assert metrics.mixed["unique_count"] == metrics.mixed["Average"] == 1  # type: ignore[attr-defined]
    assert isinstance(metrics.temperature, AvgMinMax)
    assert metrics.temperature.total == 0  # a row's own field of that name is another thing
    written = metrics.after({})
    assert written["temperature (field)"]["Average"] == 7
    assert written["tags"] == {"unique_count": 2, "total_count": 6}
    assert "nested" not in written
    assert "none" not in written


def test_a_validator_keeps_what_it_has_seen() -> None:
    state = DatasetValidatorState()
    for index, line in enumerate([json.dumps(SAMPLE), "{}", json.dumps(SAMPLE)]):
        state.observe(index, line)

    assert state.offending_example_idxs == [1]
    assert state.metrics.number_of_examples == 2
    assert state.key_counts == Counter(dict.fromkeys(SAMPLE, 2))
    assert state.other_metrics["score"].total == 2


def test_a_mode_says_which_data_sets_are_in_scope() -> None:
    def scope(mode: str) -> list[str]:
        config = TrainDataProcessorConfig.model_validate({"output_dirpath": "out", "mode": mode})
        return list(config.in_scope_dataset_types)

    assert scope("train_preparation") == ["train", "validation", "benchmark"]
    assert scope("example_validation") == ["example"]
