"""The socket: the choices of `+executor` are what is registered, and only what was chosen is loaded."""

import subprocess
import sys
from typing import get_args

import pytest

from nemo_gym.executors.base import EXECUTORS, JOB_WRITERS, Job, executor_named, job_writer_named
from nemo_gym.runs.options.sharding import ShardOptions


def test_the_choices_of_the_option_are_the_executors_there_are() -> None:
    assert get_args(ShardOptions.model_fields["executor"].annotation) == tuple(EXECUTORS)


@pytest.mark.parametrize("name", [name for name in EXECUTORS if name != "local"])
def test_an_executor_that_is_told_too_little_or_too_much_is_named(name: str) -> None:
    for options in ({}, {"shard": "1/2"}):
        with pytest.raises(ValueError, match=rf"\+executor={name} "):
            ShardOptions.model_validate({"executor": name, **options})


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_can_be_loaded_whatever_is_installed(name: str) -> None:
    executor = executor_named(name)

    assert callable(executor.collect)
    assert callable(executor.collect_prepared)


@pytest.mark.parametrize("name", JOB_WRITERS)
def test_every_job_writer_can_be_loaded(name: str) -> None:
    assert callable(job_writer_named(name).write)


def test_a_run_on_this_machine_loads_no_other_executor() -> None:
    probe = (
        "import sys; from nemo_gym.executors.base import executor_named; executor_named('local')\n"
        "print(sorted(name for name in sys.modules if name.startswith('nemo_gym.executors.')))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)

    assert done.stdout == "['nemo_gym.executors.base']\n", done.stderr


def test_a_job_knows_its_arguments_without_the_program() -> None:
    from omegaconf import OmegaConf

    assert Job(OmegaConf.create({}), ["ng_collect_rollouts", "+limit=3"]).arguments == ["+limit=3"]
