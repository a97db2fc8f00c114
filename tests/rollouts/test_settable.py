"""Options that are said once are obeyed: those that can be changed while a run goes on, and those of the dispatcher."""

import asyncio
import re
from dataclasses import fields
from typing import Any
from unittest.mock import MagicMock

import pytest

from nemo_gym.collect.control import SETTABLE, RunControl
from nemo_gym.collect.dispatch import DispatchSettings
from nemo_gym.config.options import meanings_of
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.schemas.cli_config import ControlConfig

OTHERS: dict[str, Any] = {
    "num_samples_in_parallel": 7,
    "rollout_timeout_s": 123.0,
    "run_timeout_s": 456.0,
    "fail_fast": True,
    "max_failure_fraction": 0.25,
}
"""Values that no option has by itself."""


def config(**options: Any) -> RolloutCollectionConfig:
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", **options}
    return RolloutCollectionConfig.model_validate(given)


@pytest.mark.parametrize("name", sorted(SETTABLE))
def test_whatever_can_be_set_reaches_the_dispatcher(name: str) -> None:
    dispatch = MagicMock(policies=[])
    dispatch.settings.post_keeps_time = False
    control = RunControl(MagicMock(config=config(), manifest=None), MagicMock(owed_by_agent={"a": 1}), MagicMock())
    control.begin(dispatch)

    answer = asyncio.run(control.answer({"do": "set", "values": {name: OTHERS[name]}}))

    assert answer == {"set": {name: OTHERS[name]}}
    calls = [call for call in dispatch.method_calls if call[0].startswith("set_")]
    assert len(calls) == 1
    told = [*calls[0].args, *calls[0].kwargs.values()]
    assert OTHERS[name] in [getattr(value, "total", value) for value in told]


def test_the_help_of_ng_control_names_what_can_be_set() -> None:
    words = meanings_of(ControlConfig)["values"]
    listed = words.partition("new values:")[2].partition("and budgets")[0]

    assert set(re.findall(r"\w+", listed)) == SETTABLE


def test_the_dispatcher_takes_every_setting_that_is_an_option() -> None:
    asked = config(**OTHERS)
    names = [field.name for field in fields(DispatchSettings) if hasattr(asked, field.name)]
    taken, unset = DispatchSettings.of(asked), DispatchSettings()

    assert {name: getattr(taken, name) for name in names} == {name: getattr(asked, name) for name in names}
    assert [name for name in names if getattr(taken, name) == getattr(unset, name)] == []
