from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.runs.facts import known_names, pass_rate, select_tasks
from nemo_gym.runs.select import Expression, SelectError, field_of

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
PROFILES[0]["sample"] = {"level": "easy", "meta": {"solved": True}}
PROFILES[3]["sample"] = {"level": "hard", "meta": {"solved": False}}


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
        ("(mean) > 0.5 and 0.8 < (mean)", [3]),
        ("((mean)) > -(-0.8)", [3]),
        ("((mean > 0.8))", [3]),
        ("mean in (0, 1.0)", [0, 3]),
        ("mean not in [0, 1]", [1, 2]),
        ("`mean/my field` > 12", [2, 3]),
        ('level == "hard"', [3]),
        ("row.level in ['easy', 'hard'] and record.level != 'easy'", [3]),
        ("meta.solved", [0]),
        ("not meta.solved", [3]),
        ("meta.solved == null", [1, 2]),
        ("level != null and mean > 0", [3]),
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
        ("mean and 1", 10, "expected a comparison"),
        ("mean + 1 > 0", 6, "this is not an expression"),
        ("mean > abs(3)", 11, "this is not an expression"),
        ("__import__('os').system('true') > 0", 17, "this is not an expression"),
        ("mean in (1, std)", 13, r"this is not an expression \(expected a number or a text in quotes"),
        ("mean in [1, 2", 9, r"this is not an expression \('\[' was never closed"),
        ("mean in [1 2]", 12, r"this is not an expression \(expected , or \]"),
        ("mean is std", 6, "this is not an expression"),
        ("mean < [0][0]", 8, "this is not an expression"),
        ("(lambda: 1) < 2", 8, "this is not an expression"),
        ("mean > 'open", 8, "this is not an expression"),
        ("mean/ > 1", 7, "this is not an expression"),
        ("(" * 60 + "mean > 1", 51, "this is not an expression"),
        ("0 <", 4, "this is not an expression"),
        ("(mean > 1", 1, "this is not an expression"),
        ("é > mean ; 1", 10, "this is not an expression"),
        ("mean > 0 and é > 1", 14, "there is no 'é'"),
        ("mean > None", 8, r"this is not an expression \(null can be compared"),
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


RECORD = {
    "level": "hard",
    "ok": True,
    "off": False,
    "nothing": None,
    "number": 3,
    "tools": ["search", "open"],
    "a.b": "flat",
    "a": {"c": {"d": "deep"}, "b": "nested"},
    "quote": 'say "hi"\n',
}


@pytest.mark.parametrize(
    ("expression", "truth"),
    [
        ("level == 'hard'", True),
        ('level == "hard" and ok', True),
        ("level < 'i'", True),
        ("'ar' in level", True),
        ("'x' not in level", True),
        ("'search' in tools and not 'close' in tools", True),
        ("level in ['easy', 'hard']", True),
        ("number in [1, 3]", True),
        ("number in ['3']", False),
        ("number not in ['3']", True),
        ("nothing in [1, null]", True),
        ("nothing not in [1]", False),
        ("off == false and ok != false", True),
        ("off", False),
        ("not off", True),
        ("number", False),
        ("not number", False),
        ("nothing == null and absent == null and level != null", True),
        ("absent == 1 or absent != 1 or not absent == 1", False),
        ("level == 3 or not level == 3", False),
        ("ok == 1", False),
        ("ok < true", False),
        ("a.b == 'flat' and a.c.d == 'deep'", True),
        ("-number < -2", True),
        ("-level == 3", False),
        (r"""quote == 'say \"hi\"\n'""", True),
        (r"level == '\u0068ard'", True),
        ("true and not false", True),
        ("1 < number <= 3 != 4", True),
    ],
)
def test_expressions_about_records(expression: str, truth: bool) -> None:
    assert Expression.parse(expression).holds(lambda name: field_of(RECORD, name)) is truth


def test_a_name_that_is_not_known_is_pointed_at() -> None:
    with pytest.raises(SelectError, match="did you mean 'level'") as error:
        Expression.parse("ok and levle == 'hard'").require_known(RECORD)

    assert (error.value.position, error.value.expression) == (8, "ok and levle == 'hard'")
