"""The work of commands without an `ng_` spelling: workloads with manifests, environments built ahead, Slurm jobs."""

import json
from pathlib import Path

from nemo_gym.cli.command import whole_config
from nemo_gym.cli.manifests import find_workload, publish, run_cases, validate
from nemo_gym.cli.scaffolds import Scaffold, create_workload
from nemo_gym.cli.workloads import (
    InitWorkloadConfig,
    NotOfferedConfig,
    SubmitConfig,
    TestWorkloadConfig,
    ValidateWorkloadConfig,
    WorkloadConfig,
)
from nemo_gym.errors import ConfigError
from nemo_gym.executors.submission import hand_in, read_submission, sbatch_script


def no_gitlab(config: NotOfferedConfig) -> None:
    """`gym dataset`."""
    raise ConfigError(
        "data sets are not uploaded to or downloaded from GitLab here; use --storage hf, or fetch the file yourself "
        "and name it as jsonl_fpath (gym dataset rm and gym dataset migrate do speak to a registry)"
    )


def init_workload(config: InitWorkloadConfig) -> None:
    """`gym env init`."""
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


def validate_workload(config: ValidateWorkloadConfig) -> None:
    """`gym env validate`."""
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


def check_verifier(config: TestWorkloadConfig) -> None:
    """`gym env test`."""
    workload = find_workload(config.component_name, config.kind, None)
    report = run_cases(workload, whole_config(), update=config.update_expected)
    if config.json_format:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['name']} ({report['kind']}): the verifier keeps its word in {len(report['cases'])} cases.")
    for case in report["cases"]:
        rewards = ", ".join(map(str, case["observed_rewards"])) or "an error, as expected"
        print(f"  {case['name']} ({case['kind']}): {rewards}")


def publish_workload(config: WorkloadConfig) -> None:
    """`gym env publish`."""
    if config.component_name is None:
        raise ConfigError("gym env publish wants the NAME of a workload; gym list environments shows them")
    report = publish(find_workload(config.component_name, config.kind, None), whole_config())
    if config.json_format:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['name']} {report['version']} ({report['kind']}) is ready; {report['verifier_cases']} cases hold.")


def submit(config: SubmitConfig) -> None:
    """`gym eval submit`."""
    path = Path(config.submission)
    submission = read_submission(path, config.changes)
    script = sbatch_script(submission, path.stem)
    if config.dry_run:
        print(script, end="")
        return
    print(f"Slurm job {hand_in(submission, script)}: {', '.join(submission.benchmarks)}")
