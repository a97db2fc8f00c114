"""Workloads with a manifest: does it say what the config does, does the verifier keep its word, is it fit for others.

A manifest repeats a part of the config beside it, for catalogs; here the two are held against each other, and rows and
the verifier are tried. Nothing is started, and nothing leaves this machine.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from nemo_gym.cli.catalog import (
    ManifestDataset,
    ManifestError,
    Profile,
    Workload,
    WorkloadManifest,
    catalog,
    find_workload,
    load_manifest,
)
from nemo_gym.cli.config import whole_config
from nemo_gym.cli.workloads import TestWorkloadConfig, ValidateWorkloadConfig, WorkloadConfig
from nemo_gym.config.instances import find_instances
from nemo_gym.config.references import plain_tree
from nemo_gym.errors import ConfigError, listed
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from nemo_gym.keys import AGENTS_TYPE, RESOURCES_TYPE, STAND_IN
from nemo_gym.launch.plan import find_server_folder, is_bundled
from nemo_gym.launch.server_checks import server_problems
from nemo_gym.launch.server_tests import ModulePythons, ServerModule
from nemo_gym.paths import resolve_for_reading, write_aside
from nemo_gym.prompt import apply_prompt_to_row, load_prompt_or_explain
from nemo_gym.row_files import read_rows
from nemo_gym.schemas.run_requests import BaseRunRequest
from nemo_gym.schemas.server_config import ServerInstanceConfig

PLACEHOLDER = "TODO"
"""What a new workload has where its author has something to say."""
_SYNCHRONIZED = ("resources_server", "agent_server", "model_server", "datasets", "rollout_driver", "grading_mode")
_ROUTES = {"resources_server": "/verify", "agent_server": "/run", "model_server": "/v1/responses"}
_EXTERNAL = ("resolve_model_base_url", "base_url_for_run", "create_subprocess_exec", "AsyncSandbox", "Sandbox")
_DECIDING = ("full_reward", "zero_reward", "malformed")
_CASES_WITHIN_S = 600.0


@dataclass(frozen=True)
class Composition:
    """What a config puts together."""

    agent: ServerInstanceConfig
    resources: ServerInstanceConfig
    model: ServerInstanceConfig | None
    model_name: str | None
    rollout_driver: str | None

    def facts(self) -> dict[str, Any]:
        """What a manifest must repeat."""
        fields = ManifestDataset.model_fields
        declared = [
            {key: value for key, value in plain_tree(each).items() if key in fields and value is not None}
            for each in self.agent.get_inner_run_server_config_dict().get("datasets") or ()
        ]
        return {
            "resources_server": self.resources.name,
            "agent_server": self.agent.name,
            "model_server": self.model_name,
            "datasets": declared,
            "rollout_driver": self.rollout_driver,
            "grading_mode": self.resources.get_inner_run_server_config_dict().get("grading_mode"),
        }

    def components(self) -> list[dict[str, Any]]:
        """Its servers, and through which route each takes part."""
        parts = {"resources_server": self.resources, "agent_server": self.agent, "model_server": self.model}
        return [
            {
                "role": role,
                "name": server.name,
                "implementation": _implementation(server),
                "boundary": _ROUTES[role],
                "entrypoint": server.get_inner_run_server_config().entrypoint,
            }
            for role, server in parts.items()
            if server is not None
        ]


def _implementation(server: ServerInstanceConfig) -> str | None:
    """The folder of a server; none of a model that whoever runs the workload chooses."""
    return None if server.implementation == STAND_IN else f"{server.SERVER_TYPE}/{server.implementation}"


def composition_of(workload: Workload, agent_name: str | None, *, checks_servers: bool = False) -> Composition:
    """The servers of a workload's config, which is read on its own, with a stand-in for the model.

    With `checks_servers`, every block is held against its server's class, too.

    Raises:
        ConfigError: it cannot be read, or does not say which agent and environment are meant.
    """
    path = workload.config_path
    if not path.is_file():
        raise ManifestError(f"{workload.manifest_path}: there is no config.yaml beside it")
    own = {"config_paths": [str(path)]}
    base = OmegaConf.merge(GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT, own)
    assert isinstance(base, DictConfig)
    settings = GlobalConfigDictParserConfig(
        initial_global_config_dict=base,
        skip_load_from_cli=True,
        skip_load_from_dotenv=True,
        offline=True,
        further_checks=server_problems if checks_servers else None,
    )
    config = GlobalConfigDictParser().parse(settings)
    instances = {instance.name: instance for instance in find_instances(config)[0]}
    agent = _agent_of(instances, path, agent_name)
    block = agent.get_inner_run_server_config_dict()
    resources, model = (str((block.get(key) or {}).get("name") or "") for key in ("resources_server", "model_server"))
    if resources not in instances:
        raise ManifestError(f"{path}: the agent {agent.name} names no resources_server")
    driver = config.get("rollout_collection_driver")
    return Composition(agent, instances[resources], instances.get(model), model or None, driver)


def _agent_of(instances: Mapping[str, ServerInstanceConfig], path: Path, named: str | None) -> ServerInstanceConfig:
    agents = {name: each for name, each in instances.items() if each.SERVER_TYPE == AGENTS_TYPE and each.datasets}
    if named in agents:
        return agents[named]
    written = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    own = [each for name, each in agents.items() if name in written] or list(agents.values())
    if len(own) != 1:
        names = listed(each.name for each in own) if own else "none"
        raise ManifestError(f"{path}: one agent with data sets is wanted, there is {names}; say agent_server")
    return own[0]


def validate(workload: Workload, *, sync: bool = False) -> dict[str, Any]:
    """Hold a manifest against its config and rows; with `sync`, write what the config says into it first.

    Raises:
        ConfigError: they do not go together; every difference is named.
    """
    said = _raw(workload.manifest_path)
    composition = composition_of(workload, said.get("agent_server"), checks_servers=True)
    changed = _synchronized(workload.manifest_path, said, composition.facts()) if sync else []
    manifest = load_manifest(workload.manifest_path, workload.kind, workload.name)
    differing = list(_differences(manifest, composition.facts()))
    if differing:
        raise ManifestError(
            f"{workload.manifest_path} does not say what {workload.config_path.name} does: {'; '.join(differing)}. "
            "Correct one of them, or add --sync to have the manifest written"
        )
    inferred, evidence = inferred_profile(composition)
    warnings = []
    if inferred != manifest.integration_profile:
        warnings.append(f"integration_profile is {manifest.integration_profile}, but {evidence}: {inferred}?")
    return {
        "name": manifest.name,
        "version": manifest.version,
        "kind": manifest.kind,
        "declared_profile": manifest.integration_profile,
        "inferred_profile": inferred,
        "profile_evidence": evidence,
        "manifest_path": str(workload.manifest_path),
        "config_path": str(workload.config_path),
        "components": composition.components(),
        "datasets": [_dataset_report(each, warnings) for each in manifest.datasets],
        "rollout_driver": manifest.rollout_driver,
        "grading_mode": manifest.grading_mode,
        "synchronized_fields": changed,
        "warnings": warnings,
    }


def _raw(path: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(said, dict):
        raise ManifestError(f"{path} is no mapping")
    return said


def _differences(manifest: WorkloadManifest, facts: Mapping[str, Any]) -> Iterator[str]:
    for field in _SYNCHRONIZED:
        said, does = getattr(manifest, field), facts[field]
        if field == "datasets":
            said = [each.model_dump() for each in said]
            does = [ManifestDataset.model_construct(**each).model_dump() for each in does]
        if said != does:
            yield f"{field} is {json.dumps(said)} there and {json.dumps(does)} in the config"


def _synchronized(path: Path, said: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Write the facts that are said otherwise, leaving every other line as it is; the fields that were written."""
    changed = [field for field in _SYNCHRONIZED if said.get(field) != facts[field]]
    text = path.read_text(encoding="utf-8")
    for field in changed:
        block = re.compile(rf"^{field}:.*\n(?:(?:[ \t-].*)?\n)*", re.MULTILINE)
        written = "" if facts[field] is None else yaml.safe_dump({field: facts[field]}, sort_keys=False)
        text = text.rstrip("\n") + "\n"
        found = block.search(text)
        text = text + written if found is None else text[: found.start()] + written + text[found.end() :]
    if changed:
        with write_aside(path) as file:
            file.write(text.encode())
    return changed


def inferred_profile(composition: Composition) -> tuple[Profile, str]:
    """How a workload is played, as far as its agent's source tells, and what tells it."""
    if composition.rollout_driver:
        return "external-rollout-driver", f"rollout_collection_driver is {composition.rollout_driver}"
    agent = composition.agent
    folder = find_server_folder(AGENTS_TYPE, agent.implementation)
    if is_bundled(AGENTS_TYPE, folder) and agent.implementation != "function_agent":
        return "custom-gym-verifier", f"its agent is {agent.implementation}, which is everybody's"
    source = folder / agent.get_inner_run_server_config().entrypoint
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (OSError, SyntaxError, ValueError) as error:
        raise ManifestError(f"{source} cannot be read: {error}") from error
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    outside = [name for name in _EXTERNAL if name in names]
    if outside or composition.model_name is None:
        return "external-agent-loop", f"{source} uses {outside[0]}" if outside else "its agent has no model_server"
    return "custom-gym-agent-loop", f"{source} asks the model itself"


def _dataset_report(dataset: ManifestDataset, warnings: list[str]) -> dict[str, Any]:
    if dataset.prepare_script is not None:
        _require_prepare(dataset.prepare_script)
    path = resolve_for_reading(dataset.jsonl_fpath, Path.is_file)
    rows = None
    if path.is_file():
        rows = _count_valid(dataset, path)
    elif dataset.type == "example":
        raise ManifestError(f"the data set {dataset.name!r} is not there: {dataset.jsonl_fpath}")
    else:
        warnings.append(f"the rows of {dataset.name!r} are not there yet ({dataset.jsonl_fpath}), and were not checked")
    return {
        "name": dataset.name,
        "type": dataset.type,
        "path": dataset.jsonl_fpath,
        "rows": rows,
        "prompt_config": dataset.prompt_config,
    }


def _count_valid(dataset: ManifestDataset, path: Path) -> int:
    prompt = load_prompt_or_explain(dataset.prompt_config) if dataset.prompt_config else None
    number = 0
    for line, row in read_rows(path):
        number += 1
        try:
            BaseRunRequest.model_validate(row if prompt is None else apply_prompt_to_row(row, prompt))
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise ManifestError(f"{path}, line {line.number}: no run request: {where}: {fault['msg']}") from error
    return number


def _require_prepare(script: str) -> None:
    path = resolve_for_reading(script, Path.is_file)
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ManifestError(f"prepare_script {script} cannot be read: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "prepare" for node in nodes):
        raise ManifestError(f"prepare_script {script} has no function `prepare`")


def run_cases(workload: Workload, global_config: Any, *, update: bool = False) -> dict[str, Any]:
    """Ask the verifier about the cases of its fixture; with `update`, write what it says as what is expected.

    Raises:
        ConfigError: there are no cases, or they cannot be asked.
        ManifestError: the verifier says something else than expected; every such case is named.
    """
    manifest = load_manifest(workload.manifest_path, workload.kind, workload.name)
    resources = composition_of(workload, manifest.agent_server).resources
    module = ServerModule.find(f"{RESOURCES_TYPE}/{resources.implementation}")
    python = ModulePythons.of(global_config, "gym env test").get(module)
    told = _observations(module, python, resources.module_name)
    cases = told["cases"]
    if update:
        _write_expected(Path(told["fixture_path"]), cases)
    wrong = [] if update else [words for case in cases if (words := _wrong(case))]
    wrong += _contradictions(cases, manifest)
    if wrong:
        raise ManifestError("\n  - ".join([f"{told['fixture_path']}: the verifier does not keep its word:", *wrong]))
    return {
        "name": manifest.name,
        "kind": manifest.kind,
        "resources_server": manifest.resources_server,
        "manifest_path": str(workload.manifest_path),
        "fixture_path": told["fixture_path"],
        "cases": [{key: case[key] for key in ("name", "kind", "observed_rewards")} for case in cases],
    }


def _observations(module: ServerModule, python: Path, module_name: str) -> dict[str, Any]:
    asked = json.dumps({"module": module_name}).encode()
    try:
        done = subprocess.run(
            [python, "-P", "-m", "nemo_gym.launch.inspection_process", "cases"],
            cwd=module.folder,
            env=module.environment(),
            input=asked,
            capture_output=True,
            timeout=_CASES_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ManifestError(f"the verifier of {module.entrypoint} took longer than {_CASES_WITHIN_S:.0f} s") from None
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        told = {"error": f"the process that asks its verifier ended with code {done.returncode}: {''.join(last)}"}
    if "error" in told:
        raise ManifestError(f"{module.entrypoint}: {told['error']}")
    return told


def _wrong(case: Mapping[str, Any]) -> str | None:
    name, rewards, error = f"{case['name']} ({case['kind']})", case["observed_rewards"], case["observed_error"]
    wanted_error, wanted = case.get("expected_error"), case.get("expected_reward")
    if wanted_error is not None:
        if error is None:
            return f"{name}: expected {wanted_error}, got the reward {rewards[0]}"
        is_it = wanted_error == error or wanted_error in case["words"]
        return None if is_it else f"{name}: expected {wanted_error}, got {case['words']}"
    if error is not None:
        return f"{name}: {case['words']}"
    if len(set(rewards)) > 1:
        return f"{name}: the same request got {' and then '.join(map(str, rewards))}"
    if wanted is None:
        return f"{name}: say expected_reward or expected_error, or have --update-expected write it"
    return None if rewards[0] == wanted else f"{name}: expected the reward {wanted}, got {rewards[0]}"


def _contradictions(cases: list[dict[str, Any]], manifest: WorkloadManifest) -> list[str]:
    """What no verifier may do, whatever its author expects: every kind is there, and the ends are reached."""
    kinds = {case["kind"] for case in cases}
    unknown = kinds - {*_DECIDING, "determinism"}
    found = [f"there is no case of the kind {kind}" for kind in _DECIDING if kind not in kinds]
    found += [f"{kind!r} is no kind of case: {listed([*_DECIDING, 'determinism'])} are" for kind in sorted(unknown)]
    low, high = manifest.reward.range
    full, zero = (high, low) if manifest.reward.higher_is_better else (low, high)
    for case in cases:
        wanted = {"full_reward": full, "zero_reward": zero}.get(case["kind"])
        if wanted is not None and case["observed_rewards"] and case["observed_rewards"][0] != wanted:
            found.append(
                f"{case['name']} ({case['kind']}): the manifest's end of the range is {wanted}, got "
                f"{case['observed_rewards'][0]}"
            )
    return found


def _write_expected(path: Path, cases: list[dict[str, Any]]) -> None:
    with write_aside(path) as file:
        for case in cases:
            kept = {key: case[key] for key in ("name", "kind", "request")}
            error, rewards = case["observed_error"], case["observed_rewards"]
            expected = {"expected_error": error} if error else {"expected_reward": rewards[0]}
            file.write((json.dumps(kept | expected) + "\n").encode())


def publish(workload: Workload, global_config: Any) -> dict[str, Any]:
    """Make sure that a workload is ready for others; nothing is uploaded.

    Raises:
        ConfigError: it is not; the first thing that is missing is named.
    """
    validated = validate(workload)
    manifest = load_manifest(workload.manifest_path, workload.kind, workload.name)
    unfinished = [
        f"{path.name}, line {number}: {line.strip()}"
        for path in sorted(workload.manifest_path.parent.glob("*.[ymp]*"))
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if PLACEHOLDER in line
    ]
    if unfinished:
        raise ManifestError(f"{workload.name} still has something to be filled in: {'; '.join(unfinished)}")
    if manifest.licensing == "unknown":
        raise ManifestError(f"{workload.manifest_path}: say its licensing: an SPDX identifier, internal or proprietary")
    tested = run_cases(workload, global_config)
    entry = next((each for each, _ in catalog() if (each.kind, each.name) == (workload.kind, workload.name)), None)
    if entry is None:
        raise ManifestError(
            f"{workload.name} is not in the catalog: gym list {workload.kind}s does not find its config"
        )
    return {
        "name": validated["name"],
        "version": validated["version"],
        "kind": validated["kind"],
        "status": entry.status,
        "manifest_path": validated["manifest_path"],
        "verifier_cases": len(tested["cases"]),
    }


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
