import subprocess
import sys

import pytest

import nemo_gym.openai_utils
from nemo_gym.http import model_endpoint
from nemo_gym.openai_utils import RATE_LIMIT_ERROR_CODES, RETRY_ERROR_CODES, NeMoGymAsyncOpenAI


def test_the_facade_offers_what_it_lists() -> None:
    assert [name for name in nemo_gym.openai_utils.__all__ if not hasattr(nemo_gym.openai_utils, name)] == []


def test_the_client_and_its_constants_are_part_of_the_facade() -> None:
    assert NeMoGymAsyncOpenAI is model_endpoint.NeMoGymAsyncOpenAI
    assert RATE_LIMIT_ERROR_CODES == [429, 502, 503, 504, 520]
    assert {*RETRY_ERROR_CODES} == {*RATE_LIMIT_ERROR_CODES, 500}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NeMoGymNothing"):
        nemo_gym.openai_utils.NeMoGymNothing  # noqa: B018


def test_importing_the_types_builds_no_validator_and_loads_neither_sdk_nor_client() -> None:
    probe = (
        "import sys, nemo_gym.openai_utils as types\n"
        "loaded = [name for name in ('openai', 'aiohttp', 'fastapi') if name in sys.modules]\n"
        "models = [value for name, value in vars(types).items() if name.startswith('NeMoGym')]\n"
        "print(loaded, [model for model in models if getattr(model, '__pydantic_complete__', False)])"
    )

    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "[] []"
