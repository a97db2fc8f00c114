"""Every name of the original that programs import is there, and takes the parameters they pass."""

import importlib
import inspect
import re
from typing import Any

import pytest

from tests.contract.names_of_the_original import AUGUST_2026, MAY_2026, OCTOBER_2026

ENTRY = re.compile(r"(?P<path>[\w.]+)(?:\((?P<parameters>.*)\)|=(?P<value>.*))?")
ENTRIES = [
    (module, line.strip())
    for names in (MAY_2026, AUGUST_2026, OCTOBER_2026)
    for module, listed in names.items()
    for line in listed.strip().splitlines()
]


def found(module: str, path: str) -> Any:
    """What a path leads to; a field of a model or dataclass is there without being an attribute of the class."""
    here: Any = importlib.import_module(module)
    for step in path.split("."):
        if inspect.isclass(here) and not hasattr(here, step):
            annotated = {name for base in here.__mro__ for name in inspect.get_annotations(base)}
            assert step in annotated, f"{module}.{path}: {here.__name__} has no {step}"
            return None
        here = getattr(here, step)
    return here


@pytest.mark.parametrize(("module", "entry"), sorted(set(ENTRIES)))
def test_names_of_the_original_are_there_with_their_parameters(module: str, entry: str) -> None:
    match = ENTRY.fullmatch(entry)
    assert match is not None, entry
    value = found(module, match["path"])
    if match["value"] is not None:
        assert repr(value) == match["value"] or str(value) == match["value"].strip("'")
    if match["parameters"] and callable(value):
        given = inspect.signature(value).parameters
        wanted = [each.strip() for each in match["parameters"].split(",") if each.strip() not in ("", "*")]
        missing = [each for each in wanted if each.strip("*=") not in given]
        assert missing == []
        must = {each for each in wanted if not each.startswith("*") and not each.endswith("=")}
        required = {
            name
            for name, parameter in given.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
        assert required - {"self", "cls"} <= must, "a parameter is required that programs do not pass"


def test_base_modules_offer_what_environments_import_from_them() -> None:
    for module in ("base_resources_server", "base_responses_api_agent", "base_responses_api_model"):
        loaded = importlib.import_module(f"nemo_gym.{module}")
        for name in (
            "NeMoGymResponse",
            "NeMoGymResponseCreateParamsNonStreaming",
            "ServerClient",
            "Request",
            "FastAPI",
        ):
            assert hasattr(loaded, name), f"{module}.{name}"


def test_star_imports_bring_everything_that_is_listed() -> None:
    for module in ("rollout_collection", "cli", "config_types", "server_utils", "train_data_utils", "global_config"):
        names: dict[str, Any] = {}
        exec(f"from nemo_gym.{module} import *", names)
        listed = importlib.import_module(f"nemo_gym.{module}").__all__
        assert [name for name in listed if name not in names] == []
    assert "RunHelper" in importlib.import_module("nemo_gym.cli").__all__
    assert "RolloutAggregationHelper" in importlib.import_module("nemo_gym.rollout_collection").__all__
