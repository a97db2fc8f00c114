"""Commands without an `ng_` spelling: workloads with manifests, environments built ahead, jobs handed in."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nemo_gym.cli.command import Command, command, whole_config
from nemo_gym.cli.pages import Loading
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig, RunConfig

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

    manifest_path: str | None = None
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


class SubmitConfig(BaseNeMoGymCLIConfig):
    """Arguments of `gym eval submit`."""

    submission: str = Field(min_length=1)
    """The file that says what to run where."""
    dry_run: bool = False
    """Print the job instead of handing it in."""
    changes: list[str] = Field(default_factory=list)
    """Keys of the file to be set otherwise."""


@command(RunConfig, name="gym env prefetch", needs_model=False, offline=True)
def prefetch(config: RunConfig) -> None:
    """Build the environments that the configured servers need, so that a start finds them; nothing is started.

    An environment is built once for all servers with the same requirements; servers that can run in this one need none.
    """
    from nemo_gym.config.instances import find_instances
    from nemo_gym.launch.plan import PlanSettings, Pythons, environments_folder, plan_servers
    from nemo_gym.launch.server_checks import STAND_IN
    from nemo_gym.launch.warden import Warden

    whole = whole_config()
    instances = [each for each in find_instances(whole)[0] if each.implementation != STAND_IN]
    if not instances:
        raise ConfigError("no server is configured, so there is nothing to build; name one, such as --environment mcqa")
    planned = plan_servers(instances, PlanSettings.of(config))
    with closing(Warden()) as warden:
        Pythons(whole, config, warden, lambda: False).prepare(planned)
    built = [server.name for server in planned if server.isolation == "venv" and server.present_python is None]
    where = f" in {environments_folder(whole, config)}" if built else ""
    print(f"{len(planned)} servers are ready to start; {len(built)} of them have an environment of their own{where}.")


@command(NotOfferedConfig, name="gym dataset", reads_config=False)
def no_gitlab(config: NotOfferedConfig) -> None:
    """Transfers to and from GitLab are not offered here: those with the Hugging Face hub are."""
    raise ConfigError(
        "data sets are not uploaded to or downloaded from GitLab here; use --storage hf, or fetch the file yourself "
        "and name it as jsonl_fpath (gym dataset rm and gym dataset migrate do speak to a registry)"
    )


@command(InitWorkloadConfig, name="gym env init", reads_config=False)
def init_workload(config: InitWorkloadConfig) -> None:
    """Write a small environment or benchmark that works, with its manifest; then `gym env validate` and `test` it."""
    from nemo_gym.cli.scaffolds import Scaffold, create_workload

    scaffold = Scaffold(
        config.scaffold_kind,
        config.scaffold_name.strip("/"),
        config.profile,
        config.reuse_verifier,
        config.reward_range,
        config.higher_is_better,
    )
    written = create_workload(scaffold)
    print(f"Wrote {scaffold.folder}:")
    for path in written:
        print(f"  {path}")
    print(f"Next: gym env validate {scaffold.name}, gym env test {scaffold.name}; `TODO` marks what you have to say.")


@command(ValidateWorkloadConfig, name="gym env validate", needs_model=False, offline=True)
def validate_workload(config: ValidateWorkloadConfig) -> None:
    """Hold the manifest of a workload against its config and its rows; nothing is started."""
    from nemo_gym.cli.manifests import find_workload, validate

    workload = find_workload(config.component_name, config.kind, config.manifest_path)
    report = validate(workload, sync=config.sync)
    if config.json_format:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['name']} {report['version']} ({report['kind']}): the manifest is valid.")
    if report["synchronized_fields"]:
        print(f"  written from the config: {', '.join(report['synchronized_fields'])}")
    for part in report["components"]:
        print(f"  {part['role']}: {part['name']} ({part['implementation'] or 'chosen by whoever runs it'})")
    for data in report["datasets"]:
        rows = "not there yet" if data["rows"] is None else f"{data['rows']} rows"
        print(f"  data set {data['name']} ({data['type']}): {rows}")
    for warning in report["warnings"]:
        print(f"  warning: {warning}")


@command(TestWorkloadConfig, name="gym env test", needs_model=False, offline=True)
def check_verifier(config: TestWorkloadConfig) -> None:
    """Ask the verifier of a workload about the cases of its VERIFIER_FIXTURE; the server is not started."""
    from nemo_gym.cli.manifests import find_workload, run_cases

    workload = find_workload(config.component_name, config.kind, None)
    report = run_cases(workload, whole_config(), update=config.update_expected)
    if config.json_format:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['name']} ({report['kind']}): the verifier keeps its word in {len(report['cases'])} cases.")
    for case in report["cases"]:
        rewards = ", ".join(map(str, case["observed_rewards"])) or "an error, as expected"
        print(f"  {case['name']} ({case['kind']}): {rewards}")


@command(WorkloadConfig, name="gym env publish", needs_model=False, offline=True)
def publish_workload(config: WorkloadConfig) -> None:
    """Make sure that a workload is fit for others: valid, tested, nothing left to fill in, in the catalog.

    Nothing is uploaded.
    """
    from nemo_gym.cli.manifests import find_workload, publish

    if config.component_name is None:
        raise ConfigError("gym env publish wants the NAME of a workload; gym list environments shows them")
    report = publish(find_workload(config.component_name, config.kind, None), whole_config())
    if config.json_format:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['name']} {report['version']} ({report['kind']}) is ready; {report['verifier_cases']} cases hold.")


class _Submit(Command[SubmitConfig]):
    """Its file is no configuration of servers, so it is read here."""

    def _load_config(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        given = dict(argument.lstrip("+").partition("=")[::2] for argument in arguments[:2])
        own = [key for key in ("submission", "dry_run") if key in given]
        changes = [argument.lstrip("+") for argument in arguments[len(own) :]]
        return {key: given[key] for key in own} | {"changes": changes}


def _submit(config: SubmitConfig) -> None:
    """Make one Slurm job of a file that names machines, services and benchmarks, and hand it in.

    The job starts the services, waits for them, runs the benchmarks and stops. `key.inner=value` sets a key of the file
    otherwise. A run in shards, without services, is what `gym eval slurm` writes.
    """
    from nemo_gym.executors.submission import hand_in, read_submission, sbatch_script

    path = Path(config.submission)
    submission = read_submission(path, config.changes)
    script = sbatch_script(submission, path.stem)
    if config.dry_run:
        print(script, end="")
        return
    print(f"Slurm job {hand_in(submission, script)}: {', '.join(submission.benchmarks)}")


submit = _Submit(_submit, SubmitConfig, "gym eval submit", Loading(reads_config=False))
