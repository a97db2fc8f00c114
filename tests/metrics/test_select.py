from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.metrics.select import SelectError, known_names, pass_rate, select_tasks

PROFILES: list[dict[str, Any]] = [
    {
        "mean/reward": mean,
        "min/reward": 0.0,
        "max/reward": 1.0,
        "std/reward": 0.1,
        "median/reward": mean,
        "mean/total_tokens": tokens,
        "max/usage.reward": 3,
        "mean/my field": tokens / 2,
        "num_rollouts": count,
        "rollout_infos": [{"reward": reward} for reward in rewards],
    }
    for mean, tokens, count, rewards in (
        (0.0, 10, 4, [0, 0]),
        (0.25, 20, 4, [0.5, 0]),
        (0.75, 30, 2, [1, 0.5]),
        (1.0, 40, 2, [1, 1]),
    )
]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 < mean < 1", [1, 2]),
        ("mean == 1", [3]),
        ("mean != 1", [0, 1, 2]),
        ("mean <= 0.25", [0, 1]),
        ("mean >= .75", [2, 3]),
        ("1 > mean", [0, 1, 2]),
        ("-1 < mean < +0.5", [0, 1]),
        ("pass_rate > 0", [2, 3]),
        ("num_rollouts == 4 and mean > 0", [1]),
        ("mean == 0 or mean == 1", [0, 3]),
        ("not mean > 0.5", [0, 1]),
        ("not (mean > 0.5 or num_rollouts < 3)", [0, 1]),
        ("mean == 0 or mean > 0.5 and num_rollouts == 2", [0, 2, 3]),
        ("mean/total_tokens < 25", [0, 1]),
        ("mean/reward == median", [0, 1, 2, 3]),
        ("max/usage.reward > 2 and std < 1 and min < max", [0, 1, 2, 3]),
        ('"mean/my field" > 12', [2, 3]),
        ("mean/'my field' > 12", [2, 3]),
        ("  mean\n  > 0.8 ", [3]),
        ("mean < 1e999", [0, 1, 2, 3]),
        ("mean > 0.5 == True", []),
    ],
)
def test_expressions(expression: str, expected: list[int]) -> None:
    assert select_tasks(expression, PROFILES) == expected


@pytest.mark.parametrize("expression", ["mean/score > 0", "not mean/score > 0", "mean/score > 0 and mean == 0"])
def test_a_task_without_the_statistic_is_never_selected(expression: str) -> None:
    profiles = [{"mean/reward": 0.0}, {"mean/reward": 0.0, "mean/score": 5.0}]

    assert 0 not in select_tasks(expression, profiles)


def test_what_is_true_whatever_the_missing_statistic_is_holds() -> None:
    profiles = [{"mean/reward": 0.0}, {"mean/score": 5.0}]

    assert select_tasks("mean/score > 0 or mean == 0", profiles) == [0, 1]


@pytest.mark.parametrize(
    ("expression", "position", "problem"),
    [
        (
            "mena > 0",
            1,
            r"there is no 'mena' \(did you mean 'mean'\?\)\. Known names: mean, max, min, median, std, pass_rate",
        ),
        ("0 < mean < stf", 12, r"there is no 'stf' \(did you mean 'std'\?\)"),
        ("mean", 1, "expected a comparison"),
        ("mean and 1", 1, "expected a comparison"),
        ("mean + 1 > 0", 1, "expected a number or a name"),
        ("mean > abs(3)", 8, "expected a number or a name"),
        ("__import__('os').system('true') > 0", 1, "expected a number or a name"),
        ("mean in (1, 2)", 9, "expected a number or a name"),
        ("mean is std", 9, "compare with <, <="),
        ("mean < [0][0]", 8, "expected a number or a name"),
        ("(lambda: 1) < 2", 2, "expected a number or a name"),
        ("0 <", 4, "this is not an expression"),
        ("(mean > 1", 1, "this is not an expression"),
        ("é > mean ; 1", 10, "this is not an expression"),
        ("mean > 0 and é > 1", 14, "there is no 'é'"),
        ("mean > None", 8, "expected a number or a name"),
        ("", 1, "this is not an expression"),
        ("not " * 5000 + "mean > 0", 1, "this is not an expression"),
    ],
)
def test_what_cannot_be_understood_is_an_error_that_points_at_it(expression: str, position: int, problem: str) -> None:
    with pytest.raises(SelectError, match=rf"^\+select, position {position}: {problem}") as error:
        select_tasks(expression, PROFILES)

    assert isinstance(error.value, ConfigError)
    assert str(error.value).splitlines()[-1].index("^") == position + 1


def test_an_expression_over_no_tasks_still_has_to_make_sense() -> None:
    assert select_tasks("num_rollouts > 1", []) == []
    with pytest.raises(SelectError, match="there is no 'mean'"):
        select_tasks("mean > 1", [])


def test_names_come_from_the_profiles() -> None:
    assert known_names([{"mean/score": 1.0, "sample": {}, "mean": 3}])[-1] == "mean/score"
    assert "pass_rate" not in known_names([{"mean/score": 1.0}])


def test_a_pass_is_a_reward_of_at_least_one() -> None:
    assert pass_rate({"rollout_infos": [{"reward": 1.5}, {"reward": 0.99}, {}]}) == 0.5
    assert pass_rate({"rollout_infos": [{}]}) is None
