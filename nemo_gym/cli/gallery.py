"""What there is to choose from: environments, agents and models of all search roots, each on one line.

What a config says is taken as it stands, nothing is resolved and nothing started: a component that needs a key or a
package is listed with that need. `ng_list_environments`, `ng_list_models` and `ng_list_agents` print that;
`ng_list_benchmarks` parses in full and takes tasks and needs from here.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_gym import benchmarks
from nemo_gym.benchmarks import BenchmarkConfig, matches, search_benchmarks
from nemo_gym.cli.shortcuts import shape_of
from nemo_gym.config.components import environment_configs, server_configs
from nemo_gym.config.files import load_config_files
from nemo_gym.config.references import apply_directives, names_used_by_interpolations
from nemo_gym.config.trees import Tree, leaves, merge_trees, walk
from nemo_gym.errors import ConfigError, ServerFolderError, listed
from nemo_gym.keys import (
    AGENTS_TYPE,
    MISSING,
    MODELS_TYPE,
    POLICY_MODEL_KEY_NAME,
    RESOURCES_TYPE,
    SERVER_TYPES,
)
from nemo_gym.launch.requirements import package_name, read_requirements, unmet_package
from nemo_gym.paths import component_search_roots, resolve_for_reading
from nemo_gym.schemas.cli_config import ListConfig
from nemo_gym.schemas.data_config import ListBenchmarksConfig
from nemo_gym.schemas.server_config import is_server_ref
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(?P<name>\w+)\s*\}")
_MOST_BYTES_COUNTED = 64 << 20
_BLOCK_BYTES = 1 << 20
_GPU_PACKAGES = {"torch", "vllm", "sglang", "flash-attn", "deepspeed"}
_SANDBOX_SWITCH = "allow_unsandboxed"


@dataclass(frozen=True)
class Component:
    """One line of a list."""

    name: str
    """What `+environment=` and `+model=` take."""
    description: str
    domain: str
    agents: list[str]
    """Names of the agents it defines, as rows and `+agent_name` call them."""
    tasks: dict[str, int | None]
    """Rows by type of data set; None for what is not there yet."""
    needs: list[str]
    config_path: str


def environments() -> list[Component]:
    """Every environment."""
    return components_in(environment_configs(), RESOURCES_TYPE)


def agents() -> list[Component]:
    """Every agent that can be given an environment; those of environments are listed with these."""
    return components_in(server_configs(AGENTS_TYPE), AGENTS_TYPE)


def models() -> list[Component]:
    """Every model server."""
    return components_in(server_configs(MODELS_TYPE), MODELS_TYPE)


def components_in(configs: Mapping[str, str], server_type: str) -> list[Component]:
    """What these configs say; one that cannot be read is left out with a warning."""
    found = []
    for name, path in configs.items():
        try:
            found.append(_component(name, path, server_type))
        except ConfigError as error:
            logger.warning("%s is left out: %s", name, error)
    return found


def _component(name: str, path: str, server_type: str) -> Component:
    tree = read_tree(path)
    described = [block for kind, _, _, block in _servers(tree) if kind == server_type]
    own_words = next((str(block["description"]) for block in described if block.get("description")), "")
    domain = next((str(block["domain"]) for block in described if block.get("domain")), "")
    remark = _first_comment(resolve_for_reading(path, Path.is_file))
    is_variant = Path(path).stem not in ("config", Path(path).parts[-3])
    description = (remark or own_words) if server_type != RESOURCES_TYPE or is_variant else (own_words or remark)
    agents = [server for kind, server, _, _ in _servers(tree) if kind == AGENTS_TYPE]
    return Component(name, description, domain, agents, tasks_of(tree), needs_of(tree), path)


def read_tree(path: str) -> Tree:
    """What a config and all it includes say, directives carried out.

    Raises:
        ConfigError: one of them cannot be read.
    """
    files = load_config_files([path])
    if files.problems:
        raise files.problems[0]
    return apply_directives(merge_trees([file.tree for file in files.files]))


def _servers(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Type, name, implementation and settings of every server of a config."""
    for name, block in tree.items():
        for server_type in SERVER_TYPES:
            inner = block.get(server_type) if isinstance(block, Mapping) else None
            for implementation, settings in inner.items() if isinstance(inner, Mapping) else ():
                if isinstance(settings, Mapping):
                    yield server_type, str(name), str(implementation), settings


def _first_comment(path: Path) -> str:
    """The first sentence of the remark at the top of a file."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=[.;])\s", " ".join(lines), maxsplit=1)[0].rstrip(".;")


def tasks_of(tree: Mapping[str, Any]) -> dict[str, int | None]:
    """How many rows the data sets of the agents have, by type."""
    tasks: dict[str, int | None] = {}
    seen: set[str] = set()
    for server_type, _, _, settings in _servers(tree):
        for dataset in (settings.get("datasets") or ()) if server_type == AGENTS_TYPE else ():
            path = str(dataset.get("jsonl_fpath"))
            if path in seen:
                continue
            seen.add(path)
            kind, rows = str(dataset.get("type")), _rows_in(resolve_for_reading(path, Path.is_file))
            tasks[kind] = None if rows is None else (tasks.get(kind) or 0) + rows
    return tasks


def _rows_in(path: Path) -> int | None:
    """The lines of a file; None when it is not there, or would take too long to count."""
    try:
        if path.stat().st_size > _MOST_BYTES_COUNTED or path.suffix != ".jsonl":
            return None
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return None


def needs_of(tree: Mapping[str, Any]) -> list[str]:
    """What must be there beside these configs and a model: keys, variables, values, servers, packages, a sandbox."""
    needs = [name for name in sorted(names_used_by_interpolations(tree)) if name not in tree]
    texts = [value for _, value in leaves(tree) if isinstance(value, str)]
    needs += [f"${match['name']}" for text in texts for match in _VARIABLE.finditer(text)]
    needs += [".".join(path.split(".")[3:]) or path for path, value in leaves(tree) if value == MISSING]
    refs = (is_server_ref(place.value) for place in walk(tree) if isinstance(place.value, Mapping))
    named = [ref.name for ref in refs if ref is not None]
    needs += [name for name in named if name not in (*tree, POLICY_MODEL_KEY_NAME, MISSING)]
    folders = set()
    for server_type, _, implementation, settings in _servers(tree):
        folders.add(f"{server_type}/{implementation}")
        if "judge_model_server" in settings and settings.get("should_use_judge") is not False:
            needs.append("a judge model")
        if settings.get(_SANDBOX_SWITCH) is False:
            needs.append("a sandbox")
    needs += [need for folder in sorted(folders) for need in _packages(folder)]
    return list(dict.fromkeys(needs))


def _packages(folder: str) -> Iterator[str]:
    try:
        lines = read_requirements(resolve_for_reading(folder, Path.is_dir)).lines
    except ServerFolderError:
        return
    wanted = {name: line.text for line in lines if line.kind == "package" and (name := package_name(line.text))}
    if not _GPU_PACKAGES.isdisjoint(wanted):
        yield "a GPU"
    for name, text in wanted.items():
        yield f"package {name}" + (" (not installed)" if unmet_package(text) else "")


def tasks_in_words(tasks: Mapping[str, int | None]) -> str:
    """`5 example, train not there yet`."""
    return ", ".join(f"{kind} not there yet" if rows is None else f"{rows} {kind}" for kind, rows in tasks.items())


def print_list(
    kind: str, find: Callable[[], list[Component]], config: ListConfig, option: Callable[[Component], str]
) -> None:
    """Print what there is of a kind, as `config` says: found by a query, as a table or as JSON.

    `option` is what to type to use one.
    """
    every = find()
    found = [each for each in every if not config.query or _is_meant(config.query, each)]
    if config.json_format:
        print(harmless_json(json.dumps([{**asdict(each), "option": option(each)} for each in found], indent=2)))
    elif found:
        _print_table(kind, found, option)
    elif every:
        print_line(f"No {kind} match {config.query!r}. There are: {listed((each.name for each in every), len(every))}")
    else:
        print_line(f"No {kind} found below {', '.join(map(str, component_search_roots()))}")


def _print_table(kind: str, found: Sequence[Component], option: Callable[[Component], str]) -> None:
    is_by_name = option(found[0]) == f"+{kind.removesuffix('s')}={found[0].name}"
    rows = [
        (
            each.name,
            each.domain,
            each.description,
            tasks_in_words(each.tasks),
            ", ".join(each.needs),
            "" if is_by_name else option(each),
        )
        for each in found
    ]
    use = f"; use one with +{kind.removesuffix('s')}=<name>" if is_by_name else ""
    print_line(f"Available {kind} ({len(rows)}){use}")
    columns = ("Name", "Domain", "Description", "Tasks", "Needs", "Option")
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = new_table(*(columns[index] for index in kept))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    print_table(table, described_by="Description")


def _is_meant(query: str, component: Component) -> bool:
    names = [*component.name.split("/"), component.name, component.domain, *component.agents]
    return matches(query, names) or query.strip().lower() in component.description.lower()


def list_environments(config: ListConfig) -> None:
    """`ng_list_environments`."""
    print_list("environments", environments, config, lambda each: f"+environment={each.name}")


def list_models(config: ListConfig) -> None:
    """`ng_list_models`."""
    print_list("models", models, config, lambda each: f"+model={shape_of(each.name)}")


def list_agents(config: ListConfig) -> None:
    """`ng_list_agents`."""
    print_list("agents", agents, config, lambda each: f"+config_paths=[{each.config_path}]")


def list_benchmarks(config: ListBenchmarksConfig) -> None:
    """`ng_list_benchmarks`."""
    every = benchmarks.list_benchmarks()
    found = search_benchmarks(every, config.query)
    if config.json_format:
        fields = ("agent_name", "domain", "num_repeats", "description")
        rows = [
            {"name": name, **{field: getattr(benchmark, field) for field in fields}, **_tasks_and_needs(benchmark)}
            for name, benchmark in found.items()
        ]
        print(harmless_json(json.dumps([{**row, "option": f"+benchmark={row['name']}"} for row in rows], indent=2)))
    elif found:
        _print_benchmarks(found)
    elif every:
        print(f"No benchmarks match {config.query!r}. There are: {', '.join(every)}")
    else:
        print(f"No benchmarks found below {', '.join(f'{root}/benchmarks' for root in component_search_roots())}")


def _tasks_and_needs(benchmark: BenchmarkConfig) -> dict[str, Any]:
    tree = read_tree(str(benchmark.path))
    tasks = {kind: rows for kind, rows in tasks_of(tree).items() if kind == "benchmark"}
    return {"tasks": tasks, "needs": needs_of(tree), "config_path": str(benchmark.path)}


def _print_benchmarks(found: dict[str, BenchmarkConfig]) -> None:
    print(f"Available benchmarks in NeMo Gym ({len(found)}); use one with +benchmark=<name>")
    table = new_table("Benchmark name", "Domain", "Description", "Agent name", "Num repeats", "Tasks", "Needs")
    for name, benchmark in found.items():
        more = _tasks_and_needs(benchmark)
        table.add_row(
            name,
            benchmark.domain,
            benchmark.description,
            benchmark.agent_name,
            str(benchmark.num_repeats),
            tasks_in_words(more["tasks"]),
            ", ".join(more["needs"]),
        )
    print_table(table, described_by="Description")
