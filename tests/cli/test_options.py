from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AliasChoices, Field

from nemo_gym.cli.registry import COMMANDS, all_options, config_class_of
from nemo_gym.config.options import Option, meanings_of, options_of, show_value, validate_options
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Parent(BaseNeMoGymCLIConfig):
    output: str
    """Where it goes,
    and with what name."""


class Sample(Parent):
    limit: int | None = Field(None, ge=1)
    repeats: int | dict[str, int] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] | None = None
    names: list[str] = Field(default_factory=list)
    params: dict[str, Any] = Field(default_factory=lambda: {"a": True}, description="Said in the field.")
    """Said below it."""
    place: Path | None = None
    as_json: bool = Field(False, alias="json")
    upload: bool = Field(True, validation_alias=AliasChoices("upload_rollouts", "upload_rollouts_to_wandb"))


OPTIONS: dict[str, Option] = {option.name: option for option in options_of(Sample)}


@pytest.mark.parametrize(
    ("name", "expects", "default"),
    [
        ("output", "text", None),
        ("limit", "int, at least 1", "null"),
        ("repeats", "int or {text: int}", "1"),
        ("share", "number, more than 0, less than 1", "0.5"),
        ("colour", "red|blue", "red"),
        ("mode", "fast|slow", "null"),
        ("names", "[text,...]", "[]"),
        ("params", "{text: value}", "computed"),
        ("place", "path", "null"),
        ("json", "true|false", "false"),
        ("upload_rollouts", "true|false", "true"),
    ],
)
def test_an_option_says_what_it_expects_and_what_it_is_by_default(name: str, expects: str, default: str | None) -> None:
    assert (OPTIONS[name].expects, OPTIONS[name].default) == (expects, default)


def test_every_accepted_spelling_is_known_and_a_field_behind_an_alias_is_not_one() -> None:
    assert OPTIONS["upload_rollouts"].names == ("upload_rollouts", "upload_rollouts_to_wandb")
    assert OPTIONS["json"].names == ("json",)


def test_text_is_what_can_be_nothing_else() -> None:
    assert {name for name, option in OPTIONS.items() if option.is_text} == {"output", "colour", "mode", "place"}


def test_meanings_come_from_docstrings_of_the_class_and_its_parents_and_from_descriptions() -> None:
    meanings = meanings_of(Sample)
    assert meanings["output"] == "Where it goes, and with what name."
    assert meanings["params"] == "Said in the field."
    assert "limit" not in meanings


def test_a_class_without_source_has_options_without_meanings() -> None:
    made = type("Made", (BaseNeMoGymCLIConfig,), {"__annotations__": {"limit": int}})
    assert [option.name for option in options_of(made)] == ["limit"]
    assert meanings_of(made) == {}


@pytest.mark.parametrize(
    ("value", "typed"),
    [(True, "true"), (None, "null"), ("", '""'), ([1, "a"], "[1,a]"), ({"a": {"b": False}}, "{a: {b: false}}")],
)
def test_values_are_shown_as_they_are_typed(value: object, typed: str) -> None:
    assert show_value(value) == typed


def test_a_mapping_that_the_shell_has_taken_apart_is_answered_with_its_quotes() -> None:
    with pytest.raises(ConfigError, match=r"\+params=top_p:1: expected .*; in quotes, '\+params=\{top_p:1\}'"):
        validate_options(Sample, {"output": "x", "params": "top_p:1"}, "ng_sample")


PATHS = [
    (config_class, option)
    for config_class in filter(None, map(config_class_of, COMMANDS))
    for option in options_of(config_class)
    if option.is_path
]
NO_PATHS = {"artifact_fpath"}
"""Options that are called like paths: a file within a repository of the hub."""


@pytest.mark.parametrize(("config_class", "option"), PATHS, ids=lambda each: getattr(each, "name", None))
def test_every_option_that_is_a_path_refuses_urls(config_class: type[BaseNeMoGymCLIConfig], option: Option) -> None:
    url = "s3://bucket/x.jsonl"
    value = {"a": [url], "b": [url]} if option.expects.startswith("{") else url
    with pytest.raises(ConfigError) as refused:
        validate_options(config_class, {option.name: value}, "ng_any")
    assert str(refused.value).startswith(f"{option.field}={url}: a path on this machine is wanted, no URL")
    assert "\n" not in str(refused.value)


def test_options_with_the_name_of_a_path_are_paths() -> None:
    names = {option.name for option in all_options() if not option.is_path}
    ends = ("path", "_dir", "_glob", "_file", "folder", "_from")
    assert {name for name in names if name.endswith(ends)} <= NO_PATHS
    assert len(PATHS) > 40
