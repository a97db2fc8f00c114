"""From the command line of `ng_slurm` to its scripts: which options go to which job."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_gym.cli.options import options_of
from nemo_gym.cli.registry import find_command
from nemo_gym.cli.validation import validate_options
from nemo_gym.config.secrets import is_secret_key
from nemo_gym.distributed.slurm import SlurmPlan
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.jsonl import write_aside
from nemo_gym.keys import HEAD_SERVER_KEY_NAME
from nemo_gym.rollouts.config import RowOptions
from nemo_gym.rollouts.sharding import Shard
from nemo_gym.schemas.slurm_config import SlurmConfig

_OF_SHARDS = ("shard", "shard_index", "num_shards", "resume_from_cache")
_REUSE = "reuse_existing_data_preparation"


def write_scripts(config: SlurmConfig, arguments: Sequence[str]) -> dict[Path, str]:
    """Write the scripts for a run with these arguments; their texts by path, the one that submits them last."""
    _refuse_secrets(arguments)
    collecting = _collecting_config(config)
    output = Path(collecting.output_jsonl_fpath)
    folder = Path(config.script_dirpath or output.with_name(f"{output.stem}_slurm")).absolute()
    plan = _plan(config, collecting, arguments, folder)
    written = {folder / name: text for name, text in plan.scripts().items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in written.items():
        with write_aside(path) as file:
            file.write(text.encode())
    return written


def _plan(config: SlurmConfig, collecting: RowOptions, arguments: Sequence[str], folder: Path) -> SlurmPlan:
    output = Path(collecting.output_jsonl_fpath)
    own = _names(SlurmConfig)
    passed_on = [argument for argument in arguments if _key(argument) not in {*own, *_OF_SHARDS}]
    of_collecting = _names(type(collecting))
    servers = [argument for argument in passed_on if _key(argument) not in of_collecting]
    prepares = config.command == "ng_e2e_collect_rollouts"
    alone = [f"+{_REUSE}=true"] if prepares else []
    if prepares and not any(_key(argument) == HEAD_SERVER_KEY_NAME for argument in arguments):
        alone.append(f"+{HEAD_SERVER_KEY_NAME}.port=0")  # shards may start on one node at the same moment
    passed_on = [argument for argument in passed_on if _key(argument) != _REUSE]
    return SlurmPlan(
        name=output.stem,
        folder=Path.cwd(),
        logs=folder,
        num_shards=config.num_shards,
        collect=[
            *_program(config, config.command),
            *passed_on,
            *alone,
            "+resume_from_cache=true",
            f"+num_shards={config.num_shards}",
        ],
        aggregate=[
            *_program(config, "ng_aggregate_rollouts"),
            *servers,
            *(["+offline=true"] if prepares else []),
            f"+input_glob={Shard(0, config.num_shards).glob(output)}",
            f"+output_jsonl_fpath={output}",
        ],
        prepare=[*_program(config, config.command), *passed_on, "+dry_run=true"] if prepares else (),
        chain=config.chain,
        max_running=config.max_running_shards,
        wall_time=config.wall_time,
        stop_before_s=config.stop_before_s,
        sbatch_options=config.sbatch_options,
        setup=config.setup or "",
    )


def _collecting_config(config: SlurmConfig) -> RowOptions:
    """What the shards will be told, checked now: a mistake in it would show up only when the jobs run."""
    info = find_command(config.command)
    assert info is not None
    module, _, name = info.config.partition(":")
    config_class: type[RowOptions] = getattr(import_module(module), name)
    first_shard = {"shard": None, "shard_index": 0, "num_shards": config.num_shards}
    given = OmegaConf.merge(get_global_config_dict(), first_shard)
    assert isinstance(given, DictConfig)
    return validate_options(config_class, given, config.command)


def _program(config: SlurmConfig, name: str) -> list[str]:
    return [name if config.setup else str(Path(sys.executable).absolute().with_name(name))]


def _names(config_class: type[RowOptions] | type[SlurmConfig]) -> set[str]:
    return {name for option in options_of(config_class) for name in (*option.names, option.field)}


def _key(argument: str) -> str:
    """The top-level key that an argument is about."""
    return argument.lstrip("+~").partition("=")[0].partition(".")[0]


def _refuse_secrets(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key = argument.lstrip("+").partition("=")[0]
        if is_secret_key(key.rpartition(".")[2]) and not argument.startswith("~"):
            raise ConfigError(
                f"+{key} is a secret, which does not belong into a script that others may read; put it into env.yaml "
                "in the folder where the jobs run"
            )
