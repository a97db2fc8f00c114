import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.metrics.columns import Column
from nemo_gym.metrics.profile import group_statistics, iter_group_dicts

numbers = st.floats(-1e6, 1e6) | st.just(math.nan)


@given(st.lists(st.tuples(st.integers(0, 5), numbers), max_size=40))
def test_group_statistics_equal_numpys_group_by_group(pairs: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in pairs], np.int64)
    values = np.array([value for _, value in pairs], np.float64)

    statistics = group_statistics(values, groups)

    present = groups[~np.isnan(values)]
    assert statistics.groups.tolist() == sorted(set(present.tolist()))
    for place, group in enumerate(statistics.groups.tolist()):
        members = values[(groups == group) & ~np.isnan(values)]
        assert statistics.counts[place] == len(members)
        expected = [members.mean(), members.max(), members.min(), np.median(members)]
        actual = [statistics.mean[place], statistics.max[place], statistics.min[place], statistics.median[place]]
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-9)
        std = members.std(ddof=1) if len(members) > 1 else math.nan
        assert statistics.std[place] == pytest.approx(std, rel=1e-9, abs=1e-9, nan_ok=True)


def test_equal_values_have_exactly_their_mean_and_no_deviation() -> None:
    statistics = group_statistics(np.full(3, 0.1), np.zeros(3, np.int64))

    assert (statistics.mean.tolist(), statistics.std.tolist()) == ([0.1], [0.0])


def test_groups_beyond_one_portion_keep_their_order() -> None:
    count = 90_000
    column = Column("x", np.arange(0, count, 2), np.arange(0, count, 2, dtype=np.float64))

    dicts = list(iter_group_dicts([column], np.arange(count), count))

    assert len(dicts) == count
    assert [entry.get("mean/x") for entry in dicts[60_000:60_004]] == [60_000.0, None, 60_002.0, None]
