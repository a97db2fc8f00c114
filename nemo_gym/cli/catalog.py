"""`gym list` and `gym search`: what there is, of every search root, as tables and in the JSON that programs expect.

The same components as in `cli.gallery`, which the `ng_list_...` commands show; here environments and benchmarks are one
catalog of two kinds, and each entry says what its manifest says, if it has one.

`manifest.yaml` lies beside the `config.yaml` of an environment or benchmark. The config says how a workload runs; the
manifest says who made it, for what, and under which terms. Unknown keys are errors, so that a misspelt one is not taken
for a fact that is missing.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.benchmarks import matches
from nemo_gym.cli.gallery import components_in, read_tree
from nemo_gym.cli.workloads import CatalogConfig, Kind
from nemo_gym.config.components import (
    BENCHMARKS_FOLDER,
    ENVIRONMENTS_FOLDER,
    MANIFEST_NAME,
    benchmark_configs,
    environment_configs,
    server_configs,
)
from nemo_gym.config.files import load_yaml
from nemo_gym.config.trees import leaves
from nemo_gym.errors import ConfigError, similar_names
from nemo_gym.keys import AGENTS_TYPE, MISSING, MODELS_TYPE, POLICY_MODEL_KEY_NAME, RESOURCES_TYPE
from nemo_gym.paths import component_search_roots, resolve_for_reading
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table

logger = logging.getLogger(__name__)

FOLDERS = {"environment": ENVIRONMENTS_FOLDER, "benchmark": BENCHMARKS_FOLDER}
_NO_MANIFEST = "no-manifest"
_FILTERS = ("domain", "modality", "licensing", "status", "lifecycle")
Text = Annotated[str, Field(min_length=1)]
Profile = Literal["custom-gym-verifier", "custom-gym-agent-loop", "external-agent-loop", "external-rollout-driver"]
_DRIVEN: Profile = "external-rollout-driver"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RewardFacts(_Strict):
    """What rewards mean."""

    range: tuple[float, float]
    """The lowest and the highest there are."""
    higher_is_better: bool

    @field_validator("range")
    @classmethod
    def _in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] >= value[1]:
            raise ValueError("write the lowest reward first, such as [0, 1]")
        return value


class ManifestDataset(_Strict):
    """A data set of the workload."""

    name: Text
    type: Literal["train", "validation", "example", "benchmark"]
    jsonl_fpath: Text
    prepare_script: str | None = None
    prompt_config: str | None = None
    num_repeats: int = Field(default=1, ge=1)


class Adoption(_Strict):
    """Where a workload was taken from."""

    source: Text
    ref: str | None = None
    reconciled: bool | str | None = None


class WorkloadManifest(_Strict):
    """All that a manifest says."""

    name: Text
    """Its path below the folder `environments` or `benchmarks`."""
    version: Text
    kind: Literal["environment", "benchmark"]
    integration_profile: Profile
    domain: Text
    description: Text
    modality: Text
    authors: list[Text] = Field(min_length=1)
    reward: RewardFacts
    resources_server: Text
    agent_server: Text
    datasets: list[ManifestDataset] = Field(min_length=1)
    licensing: Text = "unknown"
    determinism: Literal["seeded", "stochastic", "unknown"] = "unknown"
    model_server: str | None = None
    rollout_driver: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    grading_mode: str | None = None
    session_model: Literal["episode", "step"] | None = None
    state: Literal["none", "per_session"] | None = None
    sandbox: Any = None
    canonical_split: str | None = None
    standard_prompt_config: str | None = None
    adopted_from: Adoption | None = None
    lifecycle: Literal["active", "deprecated"] = "active"

    @field_validator("version", mode="before")
    @classmethod
    def _numbers_are_versions(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "WorkloadManifest":
        if len(set(self.authors)) < len(self.authors):
            raise ValueError("authors names somebody twice")
        if (self.rollout_driver is not None) != (self.integration_profile == _DRIVEN):
            raise ValueError(f"rollout_driver belongs to integration_profile {_DRIVEN}, and to no other")
        if self.integration_profile.startswith("custom-gym") and not self.model_server:
            raise ValueError(f"integration_profile {self.integration_profile} needs a model_server")
        if self.kind == "benchmark" and not (self.canonical_split and self.standard_prompt_config):
            raise ValueError("a benchmark needs canonical_split and standard_prompt_config")
        lacking = [each.name for each in self.datasets if each.type == "benchmark" and not each.prepare_script]
        if lacking:
            raise ValueError(f"data sets of type benchmark need a prepare_script: {', '.join(lacking)}")
        return self


class ManifestError(ConfigError, ValueError):
    """A manifest that cannot be used."""


@dataclass(frozen=True)
class Entry:
    """One environment or benchmark."""

    name: str
    kind: Kind
    status: str
    domain: str | None
    description: str | None
    version: str | None = None
    integration_profile: str | None = None
    modality: str | None = None
    licensing: str | None = None
    lifecycle: str | None = None


def list_components(config: CatalogConfig) -> None:
    """`gym list` and `gym search`."""
    if config.component_name is not None:
        _inspect(config, config.component_name)
    elif config.catalog in ("environments", "benchmarks"):
        _list_entries(config)
    else:
        _list_servers(config)


def _list_entries(config: CatalogConfig) -> None:
    kind = "benchmark" if config.catalog == "benchmarks" else config.catalog_kind
    entries = [entry for entry, _ in catalog() if kind in (None, entry.kind)]
    for name in _FILTERS:
        wanted = getattr(config, name)
        if wanted is None:
            continue
        silent = sum(getattr(entry, name) is None for entry in entries)
        if silent:
            logger.warning("%d of %d entries do not say their %s, and are left out", silent, len(entries), name)
        entries = [entry for entry in entries if str(getattr(entry, name)).lower() == wanted.lower()]
    entries = [entry for entry in entries if _is_like(config.query, entry.name, entry.domain, entry.description)]
    with_manifest = sum(entry.status != _NO_MANIFEST for entry in entries)
    _print(
        config,
        [asdict(entry) for entry in entries],
        {"Name": "name", "Kind": "kind", "Status": "status", "Lifecycle": "lifecycle", "Domain": "domain"},
        f"manifests {with_manifest}/{len(entries)}",
    )


def _list_servers(config: CatalogConfig) -> None:
    rows, columns = _SERVERS[config.catalog]
    found = [row for row in rows() if _is_like(config.query, *_texts(row))]
    _print(config, found, columns)


def _texts(row: Mapping[str, Any]) -> list[str]:
    values = [value if isinstance(value, list) else [value] for value in row.values()]
    return [text for texts in values for text in texts if isinstance(text, str)]


def _is_like(query: str | None, *texts: str | None) -> bool:
    if not query:
        return True
    return matches(query, (text or "" for text in texts))


def _print(config: CatalogConfig, rows: list[dict[str, Any]], columns: Mapping[str, str], note: str = "") -> None:
    if config.json_format:
        print(harmless_json(json.dumps(rows, indent=2)))
        return
    what = config.catalog.replace("-", " ")
    if not rows:
        print_line(f"No {what} match {config.query!r}." if config.query else f"No {what} found.")
        return
    print_line(f"{what.capitalize()} ({', '.join(filter(None, [str(len(rows)), note]))})")
    shown = {**columns, "Description": "description"} if "description" in rows[0] else dict(columns)
    table = new_table(*shown)
    for row in rows:
        table.add_row(*(_in_words(row[field]) for field in shown.values()))
    print_table(table, described_by="Description" if "Description" in shown else None)


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def catalog() -> list[tuple[Entry, str]]:
    """Every environment and benchmark, by name, each with the path of its config."""
    found: dict[tuple[str, str], tuple[Entry, str]] = {}
    for kind, configs in (("environment", environment_configs()), ("benchmark", benchmark_configs())):
        for each in components_in(configs, RESOURCES_TYPE):
            if not each.agents or not each.tasks:
                continue
            is_servers = each.config_path.startswith(f"{RESOURCES_TYPE}/")
            own_kind: Kind = "benchmark" if kind == "benchmark" or "benchmark" in each.tasks else "environment"
            name = f"{RESOURCES_TYPE}/{each.name}" if is_servers else each.name
            entry = None if is_servers else described(each.config_path, own_kind)
            entry = entry or Entry(name, own_kind, _NO_MANIFEST, each.domain or None, each.description or None)
            found.setdefault((own_kind, entry.name), (entry, each.config_path))
    for workload in _workloads():
        if not workload.config_path.is_file():
            logger.warning("%s: there is no config.yaml beside it; it is not listed", workload.manifest_path)
    named = {key for key in found if not key[1].startswith(f"{RESOURCES_TYPE}/")}
    kept = [pair for key, pair in found.items() if (key[0], key[1].rpartition("/")[2]) not in named or key in named]
    return sorted(kept, key=lambda pair: (pair[0].name.casefold(), pair[0].name, pair[0].kind))


def described(config_path: str, kind: Kind) -> Entry | None:
    """What the manifest beside a `config.yaml` says; None without one, or with a warning if it is of no use."""
    path = resolve_for_reading(config_path, Path.is_file).with_name(MANIFEST_NAME)
    if Path(config_path).name != "config.yaml" or not path.is_file():
        return None
    try:
        manifest = load_manifest(path, kind, Path(*Path(config_path).parts[1:-1]).as_posix())
    except ManifestError as error:
        logger.warning("%s; it is listed without its manifest", error)
        return None
    fields = manifest.model_dump(include={each.name for each in fields_of(Entry)})
    return Entry(status="experimental", **fields)


@dataclass(frozen=True)
class Workload:
    """An environment or benchmark with a manifest."""

    kind: str
    name: str
    manifest_path: Path

    @property
    def config_path(self) -> Path:
        """The config beside the manifest."""
        return self.manifest_path.with_name("config.yaml")


def find_workload(name: str | None, kind: str | None, manifest_path: str | None) -> Workload:
    """The workload that was named, by its name or by the path of its manifest.

    Raises:
        ConfigError: there is none, or there are two and no kind was said.
    """
    if manifest_path is not None:
        return _at(Path(manifest_path).expanduser().absolute(), name, kind)
    every = list(_workloads())
    found = {each.kind: each for each in reversed(every) if each.name == name and kind in (None, each.kind)}
    if len(found) > 1:
        raise ConfigError(f"{name} is both an environment and a benchmark: add --kind environment or --kind benchmark")
    if found:
        return next(iter(found.values()))
    other = next((each.kind for each in every if each.name == name), None)
    if other is not None:
        raise ConfigError(f"{name} is {'an' if other == 'environment' else 'a'} {other}: --kind {other}, or no --kind")
    if name in environment_configs() or name in benchmark_configs():
        flag = "--environment" if name in environment_configs() else "--benchmark"
        raise ConfigError(
            f"{name} has no {MANIFEST_NAME}: gym env validate {flag} {name} checks its config, and gym env test "
            "--resources-server NAME runs the tests of its server"
        )
    close = similar_names(str(name), [each.name for each in every])
    meant = f" Did you mean `{close[0]}`?" if close else ""
    what = kind or "environment or benchmark"
    raise ConfigError(
        f"there is no {what} {name!r} with a {MANIFEST_NAME}.{meant} gym list environments --status experimental lists "
        "those that have one, and gym env init --environment NAME begins one"
    )


def _workloads() -> Iterator[Workload]:
    for root in component_search_roots():
        for kind, folder in FOLDERS.items():
            for path in sorted((root / folder).rglob(MANIFEST_NAME)):
                yield Workload(kind, path.parent.relative_to(root / folder).as_posix(), path)


def _at(path: Path, name: str | None, kind: str | None) -> Workload:
    if not path.is_file():
        raise ConfigError(f"--manifest {path}: there is no such file")
    for root in component_search_roots():
        for own, folder in FOLDERS.items():
            if path.name == MANIFEST_NAME and path.is_relative_to(root / folder):
                found = Workload(own, path.parent.relative_to(root / folder).as_posix(), path)
                if name not in (None, found.name) or kind not in (None, own):
                    raise ConfigError(
                        f"--manifest {path} is that of the {own} {found.name}, not of {kind or ''} {name}"
                    )
                return found
    raise ConfigError(
        f"--manifest {path}: a manifest is environments/<name>/{MANIFEST_NAME} or benchmarks/<name>/{MANIFEST_NAME} in "
        "the current folder or another search root (--search-dir)"
    )


def load_manifest(path: Path, kind: str, name: str) -> "WorkloadManifest":
    """The manifest at `path`, which is that of the workload of this kind and name.

    Raises:
        ManifestError: it cannot be read, is not complete, or is about something else; all problems are named.
    """
    try:
        manifest = WorkloadManifest.model_validate(load_yaml(path))
    except ValidationError as error:
        found = [f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg']}" for item in error.errors()]
        raise ManifestError(f"{path}: {'; '.join(text.replace('Value error, ', '') for text in found)}") from error
    except ConfigError as error:
        raise ManifestError(str(error)) from error
    if (manifest.kind, manifest.name) != (kind, name):
        said = f"the {manifest.kind} {manifest.name!r}"
        raise ManifestError(f"{path} says that it is of {said}, but its folder is that of the {kind} {name!r}")
    return manifest


def _agents() -> list[dict[str, Any]]:
    by_folder: dict[str, dict[str, Any]] = {}
    for each in components_in(server_configs(AGENTS_TYPE), AGENTS_TYPE):
        name = Path(each.config_path).parent.parent.name
        blocks = [block.get(AGENTS_TYPE, {}).get(name) or {} for block in read_tree(each.config_path).values()]
        is_alone = not any("resources_server" in block for block in blocks)
        row = by_folder.setdefault(
            name,
            {
                "name": name,
                "pattern": "B (self-contained)" if is_alone else "A (composable)",
                "self_contained": is_alone,
                "variants": [],
                "description": each.description or None,
            },
        )
        row["variants"].append(Path(each.config_path).stem)
    return list(by_folder.values())


def _models() -> list[dict[str, Any]]:

    named = server_configs(MODELS_TYPE)
    return [{"name": name, "model": name, "model_group": Path(path).parts[1]} for name, path in named.items()]


def _resources_servers() -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for each in components_in(server_configs(RESOURCES_TYPE), RESOURCES_TYPE):
        name = Path(each.config_path).parent.parent.relative_to(RESOURCES_TYPE).as_posix()
        row = {"name": name, "domain": each.domain or None, "description": each.description or None}
        if name not in rows or each.name == name:
            rows[name] = row
    return list(rows.values())


_SERVERS: Mapping[str, tuple[Callable[[], list[dict[str, Any]]], Mapping[str, str]]] = {
    "agents": (_agents, {"Name": "name", "Pattern": "pattern", "Variants": "variants"}),
    "models": (_models, {"Name": "name", "Group": "model_group"}),
    "resources-servers": (_resources_servers, {"Name": "name", "Domain": "domain"}),
}
_USAGE = {
    "benchmark": "gym eval run --benchmark {name}",
    "environment": "gym eval run --environment {name}",
    "agents": "gym env start --config {config} --config <environment.yaml>",
    "models": "gym eval run --benchmark <benchmark> --model-type {name} -m <model>",
    "resources-servers": "gym env start --resources-server {name}",
}


def _usage(kind: str, name: str, config: str) -> str:
    """How a component is used: with a model, unless it is or brings one, and with what its config leaves open."""
    tree = read_tree(config)
    given = [] if kind == "models" or POLICY_MODEL_KEY_NAME in tree else ["--model-type openai_model -m <model>"]
    given += [f"+{path}=<{path.rpartition('.')[2]}>" for path, value in leaves(tree) if value == MISSING]
    return " ".join([_USAGE[kind].format(name=name, config=config), *given])


def _usage_of_server(catalog: str, name: str, variants: list[str]) -> str:
    """The same of a folder of servers, by the config that is called like it, or else by the first."""
    if catalog == "agents":
        return _usage(catalog, name, f"{AGENTS_TYPE}/{name}/configs/{variants[0]}.yaml")
    named = server_configs(MODELS_TYPE if catalog == "models" else RESOURCES_TYPE)
    flavor = name if name in named else next(each for each in named if each.startswith(f"{name}/"))
    return _usage(catalog, flavor, named[flavor])


def _inspect(config: CatalogConfig, name: str) -> None:
    if config.catalog in ("environments", "benchmarks"):
        shown = _entry_named(config, name)
    else:
        rows = {row["name"]: row for row in _SERVERS[config.catalog][0]()}
        if name not in rows:
            raise _unknown(config.catalog.removesuffix("s"), name, list(rows), "")
        row = rows[name]
        details = {key: value for key, value in row.items() if key not in ("name", "domain", "description")}
        usage = _usage_of_server(config.catalog, name, row.get("variants", []))
        shown = _shown(name, config.catalog.removesuffix("s"), row, details, usage)
    if config.json_format:
        print(harmless_json(json.dumps(shown, indent=2)))
        return
    print_line(f"{shown['name']} ({shown['type']})")
    for label, value in {"Domain": shown["domain"], "Description": shown["description"], **shown["details"]}.items():
        if value not in (None, "", []):
            print_line(f"  {label}: {_in_words(value)}")
    print_line(f"  Use it: {shown['usage_example']}")


def _entry_named(config: CatalogConfig, name: str) -> dict[str, Any]:
    wanted = "benchmark" if config.catalog == "benchmarks" else config.catalog_kind
    every = catalog()
    named = [(entry, path) for entry, path in every if name in (entry.name, entry.name.partition("/")[2])]
    for entry, path in named:
        if wanted in (None, entry.kind):
            details = {key: value for key, value in asdict(entry).items() if key not in ("name", "domain")}
            details = {"config": path, **{key: value for key, value in details.items() if key != "description"}}
            return _shown(entry.name, entry.kind, asdict(entry), details, _usage(entry.kind, entry.name, path))
    if named:
        kind = named[0][0].kind
        raise ConfigError(f"{name!r} is {'an' if kind == 'environment' else 'a'} {kind}: see gym list {kind}s {name}")
    raise _unknown(wanted or "environment", name, [entry.name for entry, _ in every], "s")


def _shown(name: str, kind: str, row: Mapping[str, Any], details: dict[str, Any], usage: str) -> dict[str, Any]:
    facts = {"domain": row.get("domain"), "description": row.get("description")}
    return {"name": name, "type": kind, **facts, "details": details, "usage_example": usage}


def _unknown(kind: str, name: str, names: list[str], plural: str) -> ConfigError:
    close = get_close_matches(name, [*names, *(each.rpartition("/")[2] for each in names)], n=1, cutoff=0.6)
    meant = f" Did you mean `{close[0]}`?" if close else ""
    return ConfigError(f"Unknown {kind} '{name}'.{meant} gym list {kind}{plural or 's'} lists them")
