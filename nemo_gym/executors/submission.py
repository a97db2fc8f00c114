"""`gym eval submit`: a file that names machines, services and benchmarks becomes one Slurm job, and is handed in.

The job starts the services (vLLM, or a Ray cluster, in containers) on its node pools, waits until they answer, runs the
benchmarks one after another against them, each resumed if the job is handed in again, and stops the services however
it ends. Keys that the file must not have are errors: a misspelt one would cost a night.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.config.files import load_yaml
from nemo_gym.config.secrets import is_secret_key
from nemo_gym.errors import ConfigError, GymError, did_you_mean

_HANDED_IN_WITHIN_S = 120.0
_NAME = r"^[A-Za-z]\w*$"
Name = Annotated[str, Field(pattern=_NAME)]
Text = Annotated[str, Field(min_length=1)]


class SubmissionError(GymError, RuntimeError):
    """Slurm did not take the job."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodePool(_Strict):
    """Nodes of one kind."""

    partition: Text
    nodes: int = Field(default=1, ge=1)
    ntasks_per_node: int = Field(default=1, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=1)
    extra_args: list[str] = Field(default_factory=list)
    """Further options of sbatch for these nodes, such as --exclusive."""


class SlurmCompute(_Strict):
    """Where the job runs."""

    type: Literal["slurm"]
    account: Text
    hostname: str | None = None
    """The host to hand it in from, over ssh; this one unless set."""
    walltime: str | None = None
    node_pools: dict[Name, NodePool] = Field(min_length=1)
    extra_args: list[str] = Field(default_factory=list)


class HealthCheck(_Strict):
    """How one knows that a service is up."""

    path: str = "/health"
    timeout_s: int = Field(default=1800, ge=1)
    interval_s: int = Field(default=5, ge=1)


class Service(_Strict):
    """Something the benchmarks need, in a container on a node pool."""

    type: Literal["vllm", "ray"]
    container: Text
    """Its image, as srun --container-image takes it."""
    node_pool: str | None = None
    """The first one unless set."""
    model: str | None = None
    """What vLLM serves."""
    port: int = Field(default=8000, ge=1, le=65_535)
    """The service's: of vLLM, or of the dashboard of Ray."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    env: dict[str, str | None] = Field(default_factory=dict)
    """Variables; one without a value is taken from whoever hands the job in."""
    mounts: list[str] = Field(default_factory=list)
    """<host path>:<container path>."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of `vllm serve` or `ray start`."""
    health_check: HealthCheck = Field(default_factory=HealthCheck)

    @model_validator(mode="after")
    def _complete(self) -> "Service":
        if (self.type == "vllm") != (self.model is not None):
            raise ValueError("a service of type vllm needs a model, and one of type ray has none")
        secret = [name for name, value in self.env.items() if value is not None and is_secret_key(name)]
        if secret:
            raise ValueError(
                f"env.{secret[0]} is a secret, which does not belong into a script that others may read; leave its "
                f"value out (`{secret[0]}:`), and it is taken from the environment of whoever hands the job in"
            )
        return self


class BenchmarkRun(_Strict):
    """One run of `gym eval run`."""

    benchmark: str | None = None
    environment: str | None = None
    """One of the two."""
    service: str | None = None
    """The vLLM service that is asked."""
    model_type: str = "vllm_model"
    output: Text
    """The file of rollouts."""
    overrides: list[str] = Field(default_factory=list)
    """Further arguments, such as --num-repeats=4 or +limit=100."""

    @field_validator("overrides")
    @classmethod
    def _no_secrets(cls, value: list[str]) -> list[str]:
        for each in value:
            key = each.lstrip("+-").partition("=")[0].replace("-", "_")
            if is_secret_key(key.rpartition(".")[2]):
                raise ValueError(f"{each.partition('=')[0]} is a secret: put it into env.yaml where the job runs")
        return value

    @model_validator(mode="after")
    def _one_thing(self) -> "BenchmarkRun":
        if (self.benchmark is None) == (self.environment is None):
            raise ValueError("name either a benchmark or an environment")
        return self


class Submission(_Strict):
    """All that a file says."""

    compute: dict[Name, SlurmCompute] = Field(min_length=1)
    """The first one is used."""
    services: dict[Name, Service] = Field(default_factory=dict)
    benchmarks: dict[Name, BenchmarkRun] = Field(min_length=1)
    setup: str = ""
    """Shell lines that come first in the job, such as `source /shared/venv/bin/activate`; without them the `gym` of the
    environment that hands it in is used, which the nodes must see."""
    folder: str | None = None
    """Where the job runs; the current folder unless set."""

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> "Submission":
        pools = next(iter(self.compute.values())).node_pools
        for name, service in self.services.items():
            if service.node_pool is not None and service.node_pool not in pools:
                close = did_you_mean(service.node_pool, pools)
                raise ValueError(f"services.{name}.node_pool {service.node_pool}: there is no such pool{close}")
        for name, run in self.benchmarks.items():
            models = [each for each, service in self.services.items() if service.type == "vllm"]
            if run.service is not None and run.service not in models:
                close = did_you_mean(run.service, models)
                raise ValueError(f"benchmarks.{name}.service {run.service}: there is no such vllm service{close}")
        return self


def read_submission(path: Path, changes: Sequence[str] = ()) -> Submission:
    """The file at `path`, with `key.inner=value` on top.

    Raises:
        ConfigError: it cannot be read, or says something that is not understood; everything is named.
    """
    if not path.is_file():
        raise ConfigError(f"--config {path}: there is no such file")
    try:
        merged = OmegaConf.merge(OmegaConf.create(load_yaml(path)), OmegaConf.from_dotlist(list(changes)))
        return Submission.model_validate(OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        found = [f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(text.replace('Value error, ', '') for text in found)}") from error


def sbatch_script(submission: Submission, name: str) -> str:
    """The job."""
    compute = next(iter(submission.compute.values()))
    pools = list(compute.node_pools)
    folder = submission.folder or str(Path.cwd())
    lines = ["#!/bin/bash", f"#SBATCH --job-name={name}", f"#SBATCH --account={compute.account}"]
    lines += [f"#SBATCH --chdir={folder}", "#SBATCH --output=%x-%j.log"]
    lines += [f"#SBATCH --time={compute.walltime}"] if compute.walltime else []
    lines += [f"#SBATCH {each}" for each in compute.extra_args]
    for number, pool in enumerate(compute.node_pools.values()):
        lines += ["#SBATCH hetjob"] if number else []
        lines += _pool_lines(pool)
    lines += ["set -euo pipefail", *submission.setup.splitlines()]
    if submission.services:
        lines += ["trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", ""]
    for service_name, service in submission.services.items():
        group = pools.index(service.node_pool) if service.node_pool else 0
        lines += _service_lines(service_name, service, group, is_het=len(pools) > 1)
    for service_name, service in submission.services.items():
        lines += _wait_lines(service_name, service)
    for run_name, run in submission.benchmarks.items():
        lines += ["", f"echo {shlex.quote(f'{run_name} ...')}", _run_line(run, submission)]
    return "\n".join([*lines, ""])


def _pool_lines(pool: NodePool) -> list[str]:
    options = [f"--partition={pool.partition}", f"--nodes={pool.nodes}", f"--ntasks-per-node={pool.ntasks_per_node}"]
    options += [f"--gpus-per-node={pool.gpus_per_node}"] if pool.gpus_per_node else []
    return [f"#SBATCH {option}" for option in [*options, *pool.extra_args]]


def _service_lines(name: str, service: Service, group: int, *, is_het: bool) -> list[str]:
    nodes = f"SLURM_JOB_NODELIST_HET_GROUP_{group}" if is_het else "SLURM_JOB_NODELIST"
    host = _host(name)
    options = [f"--het-group={group}"] if is_het else []
    options += [f"--container-image={service.container}"]
    options += [f"--container-mounts={','.join(service.mounts)}"] if service.mounts else []
    exported = [f"{key}={value}" for key, value in service.env.items() if value is not None]
    options += [f"--export={','.join(['ALL', *exported])}"]
    if service.type == "vllm":
        served = ["vllm", "serve", str(service.model), f"--port={service.port}", *_sizes(service), *service.extra_args]
        ran = shlex.join(["srun", "--nodes=1", "--ntasks=1", *options, *served])
    else:
        more = "".join(f" {shlex.quote(each)}" for each in service.extra_args)
        head = f"ray start --head --block --dashboard-host=0.0.0.0 --dashboard-port={service.port}{more}"
        worker = f'ray start --block --address="${host}:6379"{more}'
        chosen = f'if [ "$SLURM_PROCID" = 0 ]; then {head}; else {worker}; fi'
        ran = shlex.join(["srun", "--ntasks-per-node=1", *options, "bash", "-c", chosen])
    return [
        f'read -r {host} < <(scontrol show hostnames "${nodes}")',
        f"export {host}",
        f"{ran} > {name}.log 2>&1 &",
        f"{host}_pid=$!",
    ]


def _sizes(service: Service) -> list[str]:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = {each: getattr(service, each) for each in names}
    return [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items() if size > 1]


def _host(name: str) -> str:
    return f"{name.upper()}_HOST"


def _wait_lines(name: str, service: Service) -> list[str]:
    check, host = service.health_check, _host(name)
    path = check.path if service.type == "vllm" or check.path != "/health" else "/api/version"
    return [
        f'until curl --silent --fail --max-time 5 --output /dev/null "http://${host}:{service.port}{path}"; do',
        f'  if ! kill -0 "${{{host}_pid}}" 2>/dev/null; then echo "{name} has ended: see {name}.log" >&2; exit 1; fi',
        f'  if [ "$SECONDS" -gt {check.timeout_s} ]; then echo "{name} is not up: see {name}.log" >&2; exit 1; fi',
        f"  sleep {check.interval_s}",
        "done",
    ]


def _run_line(run: BenchmarkRun, submission: Submission) -> str:
    what = ["--benchmark", run.benchmark] if run.benchmark else ["--environment", str(run.environment)]
    gym = "gym" if submission.setup else str(Path(sys.executable).absolute().with_name("gym"))
    line = shlex.join([gym, "eval", "run", *what, "--model-type", run.model_type, "-o", run.output, "--resume"])
    if run.service is not None:
        service = submission.services[run.service]
        url = f'"http://${_host(run.service)}:{service.port}/v1"'
        line += f" -m {shlex.quote(str(service.model))} --model-url {url} +policy_api_key=EMPTY"
    return " ".join([line, *map(shlex.quote, run.overrides)])


def hand_in(submission: Submission, script: str) -> str:
    """Give the job to Slurm; its number.

    Raises:
        ConfigError: there is no sbatch here.
        SubmissionError: Slurm does not take it.
    """
    host = next(iter(submission.compute.values())).hostname
    remote = ["ssh", "-o", "BatchMode=yes", "--", str(host), "sbatch --parsable"]
    asked = ["sbatch", "--parsable"] if host is None else remote
    if shutil.which(asked[0]) is None:
        raise ConfigError(
            f"{asked[0]} is not installed here; name a host that has it as compute.<name>.hostname, or print the job "
            "with --dry-run and hand it in there"
        )
    try:
        done = subprocess.run(
            asked, input=script, capture_output=True, text=True, timeout=_HANDED_IN_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SubmissionError(f"{asked[0]} did not answer within {_HANDED_IN_WITHIN_S:.0f} s") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SubmissionError(f"{asked[0]} did not take the job: {words}")
    return done.stdout.strip().partition(";")[0]
