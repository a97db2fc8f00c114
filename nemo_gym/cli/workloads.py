"""What the commands without an `ng_` spelling are: their arguments, and the words of their help pages.

Lists and searches, workloads with manifests, environments built ahead, jobs handed in. As with those in `cli.pages`,
their work is loaded when they are run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from nemo_gym.cli.command import Command
from nemo_gym.cli.pages import NO_CONFIG, OFFLINE
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig, RunConfig
from nemo_gym.schemas.path_text import PathText

_MANIFESTS = "nemo_gym.cli.manifests"
Kind = Literal["environment", "benchmark"]


class NotOfferedConfig(BaseNeMoGymCLIConfig):
    """Arguments of commands that are not offered."""


class WorkloadConfig(BaseNeMoGymCLIConfig):
    """Arguments of every command about one workload with a manifest."""

    component_name: str | None = None
    """The workload, by the path of its folder below environments or benchmarks."""
    kind: Kind | None = None
    """Which of the two a name is of; needed where both have it."""
    json_format: bool = Field(default=False, alias="json")
    """Print the report as JSON."""


class ValidateWorkloadConfig(WorkloadConfig):
    """Arguments of `gym env validate NAME`."""

    manifest_path: PathText | None = None
    """The workload's manifest, in place of its name."""
    sync: bool = False
    """Write into the manifest what the config says otherwise."""


class TestWorkloadConfig(WorkloadConfig):
    """Arguments of `gym env test NAME`."""

    __test__ = False
    update_expected: bool = False
    """Write what the verifier says now as what is expected of it."""


class InitWorkloadConfig(BaseNeMoGymCLIConfig):
    """Arguments of `gym env init --environment` and `--benchmark`."""

    scaffold_kind: Kind
    """Which of the two to make."""
    scaffold_name: str = Field(min_length=1)
    """Its name, which is its path below environments or benchmarks."""
    profile: Literal[
        "custom-gym-verifier", "custom-gym-agent-loop", "external-agent-loop", "external-rollout-driver"
    ] = "custom-gym-verifier"
    """How it is played: by an agent that is there, by one of its own, by another program, by a function."""
    reuse_verifier: str | None = None
    """A resources server that is there already, in place of a new one."""
    reward_range: tuple[float, float] | None = None
    """The lowest and the highest reward."""
    higher_is_better: bool | None = None
    """Whether the highest is the best."""

    @field_validator("reward_range")
    @classmethod
    def _in_order(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and given[0] >= given[1]:
            raise ValueError("write the lowest reward first: --reward-range 0 1")
        return given


class SubmitConfig(BaseNeMoGymCLIConfig):
    """Arguments of `gym eval submit`."""

    submission: PathText = Field(min_length=1)
    """The file that says what to run where."""
    dry_run: bool = False
    """Print the job instead of handing it in."""
    changes: list[str] = Field(default_factory=list)
    """Keys of the file to be set otherwise."""


class CatalogConfig(BaseNeMoGymCLIConfig):
    """Arguments of `gym list` and `gym search`."""

    catalog: Literal["benchmarks", "environments", "agents", "models", "resources-servers"] = "environments"
    """Which components to list."""
    component_name: str | None = None
    """Show all that is known about this one."""
    query: str | None = None
    """Only what is like this by name, domain or description."""
    catalog_kind: Kind | None = None
    """Only environments, or only benchmarks."""
    domain: str | None = None
    """Only those of this domain."""
    modality: str | None = None
    """Only those whose manifest says this modality."""
    licensing: str | None = None
    """Only those whose manifest says this licence."""
    status: Literal["experimental", "no-manifest"] | None = None
    """Only those with a manifest (experimental), or without one."""
    lifecycle: Literal["active", "deprecated"] | None = None
    """Only those whose manifest says so."""
    json_format: bool = Field(default=False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON list instead of a table; of one component, an object."""


list_components = Command(
    "nemo_gym.cli.catalog:list_components",
    CatalogConfig,
    "gym list",
    NO_CONFIG,
    """
    List components of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    With a NAME, all that is known about one, and how it is used.
    """,
)
prefetch = Command(
    "nemo_gym.cli.commands.servers:prefetch",
    RunConfig,
    "gym env prefetch",
    OFFLINE,
    """
    Build the environments that the configured servers need, so that a start finds them; nothing is started.

    An environment is built once for all servers with the same requirements; servers that can run in this one need none.
    """,
)
no_gitlab = Command(
    "nemo_gym.cli.commands.data:no_gitlab",
    NotOfferedConfig,
    "gym dataset",
    NO_CONFIG,
    """
    Transfers to and from GitLab are not offered here: those with the Hugging Face hub are.
    """,
)
init_workload = Command(
    "nemo_gym.cli.scaffolds:init_workload",
    InitWorkloadConfig,
    "gym env init",
    NO_CONFIG,
    """
    Write a small environment or benchmark that works, with its manifest; then `gym env validate` and `test` it.
    """,
)
validate_workload = Command(
    f"{_MANIFESTS}:validate_workload",
    ValidateWorkloadConfig,
    "gym env validate",
    OFFLINE,
    """
    Hold the manifest of a workload against its config and its rows; nothing is started.
    """,
)
check_verifier = Command(
    f"{_MANIFESTS}:check_verifier",
    TestWorkloadConfig,
    "gym env test",
    OFFLINE,
    """
    Ask the verifier of a workload about the cases of its VERIFIER_FIXTURE; the server is not started.
    """,
)
publish_workload = Command(
    f"{_MANIFESTS}:publish_workload",
    WorkloadConfig,
    "gym env publish",
    OFFLINE,
    """
    Make sure that a workload is fit for others: valid, tested, nothing left to fill in, in the catalog.

    Nothing is uploaded.
    """,
)


class _Submit(Command[SubmitConfig]):
    """Its file is no configuration of servers, so it is read here."""

    def _load_config(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        given = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments[:2])
        own = [key for key in ("submission", "dry_run") if key in given]
        changes = [argument.lstrip("+") for argument in arguments[len(own) :]]
        return {key: given[key] for key in own} | {"changes": changes}


submit = _Submit(
    "nemo_gym.cli.commands.collecting:submit",
    SubmitConfig,
    "gym eval submit",
    NO_CONFIG,
    """
    Make one Slurm job of a file that names machines, services and benchmarks, and hand it in.

    The job starts the services, waits for them, runs the benchmarks and stops. `key.inner=value` sets a key of the file
    otherwise. A run in shards, without services, is what `gym eval slurm` writes.
    """,
)
