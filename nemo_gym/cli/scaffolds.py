"""`ng_init_resources_server`: a new environment; `gym env init --environment` and `--benchmark`: a new workload.

An environment is a server with config, rows and tests; a workload has its manifest, config, rows and verifier.

Everything is made of templates and works at once, so that an author changes what runs instead of completing what does
not. All files are known before the first is written: one that is there and says something else stops it all.
"""

import json
import keyword
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.cli.catalog import Profile
from nemo_gym.cli.gallery import read_tree
from nemo_gym.cli.workloads import InitWorkloadConfig
from nemo_gym.config.components import MANIFEST_NAME, server_configs
from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.jsonl import iter_lines
from nemo_gym.keys import AGENTS_TYPE, RESOURCES_TYPE
from nemo_gym.paths import PARENT_DIR, ROOT_DIR, resolve_for_reading
from nemo_gym.schemas.cli_config import InitResourcesServerConfig

_TEMPLATES = ROOT_DIR / "scaffold" / "workload"
_SERVER_TEMPLATES = ROOT_DIR / "scaffold" / "resources_server"
_ENDING = ".template"
_FOLDERS = {"environment": "environments", "benchmark": "benchmarks"}
_OWN_AGENT = {"custom-gym-agent-loop": "agent.py", "external-agent-loop": "external_agent.py"}
_DRIVEN = "external-rollout-driver"
_EXAMPLES = 5
_SEGMENT = re.compile(r"[A-Za-z]\w*")
_RESPONSE = {
    "id": "resp_1",
    "created_at": 1.0,
    "model": "m",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


@dataclass(frozen=True)
class Scaffold:
    """What is to be made."""

    kind: str
    name: str
    profile: Profile = "custom-gym-verifier"
    reuse_verifier: str | None = None
    reward_range: tuple[float, float] | None = None
    higher_is_better: bool | None = None

    @property
    def folder(self) -> str:
        """Where it is, below the current folder."""
        return f"{_FOLDERS[self.kind]}/{self.name}"

    @property
    def leaf(self) -> str:
        """The last part of its name, which its servers are called by."""
        return self.name.rpartition("/")[2]

    @property
    def agent(self) -> str:
        """The agent's implementation."""
        return f"{self.leaf}_agent" if self.profile in _OWN_AGENT else "simple_agent"

    def values(self) -> dict[str, str]:
        """What templates are filled with."""
        low, high = self.reward_range or (0, 1)
        return {
            "@@NAME@@": self.name,
            "@@KIND@@": self.kind,
            "@@LEAF@@": self.leaf,
            "@@FOLDER@@": self.folder,
            "@@PROFILE@@": self.profile,
            "@@AGENT@@": self.agent,
            "@@SERVER@@": self.leaf,
            "@@CLASS@@": camel_case(self.leaf),
            "@@LOW@@": f"{low:g}",
            "@@HIGH@@": f"{high:g}",
            "@@HIGHER@@": "false" if self.higher_is_better is False else "true",
            "@@SPLIT@@": "benchmark" if self.kind == "benchmark" else "example",
        }


def create_workload(scaffold: Scaffold) -> list[Path]:
    """Write a workload below the current folder; the files of it, also those that were there already.

    Raises:
        ConfigError: its name or its options do not do, or a file is there that says something else; nothing is written.
    """
    _check(scaffold)
    files = {Path(path): text for path, text in _files(scaffold).items()}
    differing = [str(path) for path, text in files.items() if path.exists() and not _says(path, text)]
    if differing:
        raise ConfigError(f"{', '.join(differing)} is there and says something else; nothing was written")
    for path, text in files.items():
        write_file(path, text)
    return sorted(files)


def _check(scaffold: Scaffold) -> None:
    if not all(_SEGMENT.fullmatch(part) for part in scaffold.name.split("/")):
        raise ConfigError(
            f"--{scaffold.kind} {scaffold.name}: a name is made of letters, digits and underscores and begins with a "
            "letter; parts are joined by /"
        )
    if scaffold.reuse_verifier is None:
        return
    if scaffold.reward_range is None or scaffold.higher_is_better is None:
        raise ConfigError(
            "--reuse-verifier: say what its rewards mean: --reward-range LOW HIGH and --higher-is-better or "
            "--lower-is-better"
        )
    known = server_configs(RESOURCES_TYPE)
    if scaffold.reuse_verifier not in known:
        raise ConfigError(
            f"--reuse-verifier {scaffold.reuse_verifier}: there is no such resources server"
            f"{did_you_mean(scaffold.reuse_verifier, known) or ';'} gym list resources-servers lists them"
        )


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _files(scaffold: Scaffold) -> dict[str, str]:
    values, folder = scaffold.values(), scaffold.folder
    server, rows, config_paths = _verifier(scaffold)
    datasets = _datasets(scaffold)
    files = {f"{folder}/README.md": filled(_TEMPLATES / "README.md", values)}
    files[f"{folder}/config.yaml"] = _config(scaffold, server, config_paths, datasets)
    files[f"{folder}/{MANIFEST_NAME}"] = _manifest(scaffold, server, datasets)
    files[f"{folder}/data/example.jsonl"] = _lines(rows)
    if scaffold.kind == "benchmark":
        files[f"{folder}/prompt.yaml"] = filled(_TEMPLATES / "prompt.yaml", values)
        files[f"{folder}/prepare.py"] = filled(_TEMPLATES / "prepare.py", values)
        own = filled(_TEMPLATES / "source.jsonl", values)
        files[f"{folder}/data/source.jsonl"] = _lines(map(_asked, rows)) if scaffold.reuse_verifier else own
    if scaffold.profile == _DRIVEN:
        files[f"{folder}/rollout_driver.py"] = filled(_TEMPLATES / "rollout_driver.py", values)
    if scaffold.profile in _OWN_AGENT:
        files |= _agent_files(scaffold, values)
    if scaffold.reuse_verifier is None:
        files |= _server_files(scaffold, values)
    return files


def _verifier(scaffold: Scaffold) -> tuple[str, list[dict[str, Any]], list[str]]:
    """The name of the environment's block, rows that it can score, and the configs that define it."""
    if scaffold.reuse_verifier is None:
        text = filled(ROOT_DIR / "scaffold" / "resources_server" / "example.jsonl", {})
        return f"{scaffold.leaf}_resources_server", [json.loads(line) for line in text.splitlines()], []
    config = server_configs(RESOURCES_TYPE)[scaffold.reuse_verifier]
    name, block = next((name, block) for name, block in read_tree(config).items() if RESOURCES_TYPE in (block or {}))
    implementation = next(iter(block[RESOURCES_TYPE]))
    path = resolve_for_reading(f"{RESOURCES_TYPE}/{implementation}/data/example.jsonl", Path.is_file)
    if not path.is_file():
        raise ConfigError(f"--reuse-verifier {scaffold.reuse_verifier}: it has no example rows to begin with ({path})")
    return name, [json.loads(line.content) for line in iter_lines(path)][:_EXAMPLES], [config]


def _lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its question as a field, for a prompt to be made of."""
    given = (row.get("responses_create_params") or {}).get("input")
    texts = (
        [given] if isinstance(given, str) else [each.get("content") for each in given or () if isinstance(each, dict)]
    )
    question = next((text for text in reversed(texts) if isinstance(text, str)), "")
    return {"question": question, **{key: value for key, value in row.items() if key != "responses_create_params"}}


def _datasets(scaffold: Scaffold) -> list[dict[str, Any]]:
    folder = scaffold.folder
    example = {"name": "example", "type": "example", "jsonl_fpath": f"{folder}/data/example.jsonl", "num_repeats": 1}
    if scaffold.kind == "environment":
        return [example]
    benchmark = {
        "name": scaffold.leaf,
        "type": "benchmark",
        "jsonl_fpath": f"{folder}/data/{scaffold.leaf}_benchmark.jsonl",
        "prepare_script": f"{folder}/prepare.py",
        "prompt_config": f"{folder}/prompt.yaml",
        "num_repeats": 1,
    }
    return [benchmark, example]


def _config(scaffold: Scaffold, server: str, config_paths: list[str], datasets: list[dict[str, Any]]) -> str:
    config: dict[str, Any] = {"config_paths": config_paths} if config_paths else {}
    if scaffold.reuse_verifier is None:
        about = {"domain": "other", "verified": False, "description": f"The verifier of {scaffold.name}"}
        config[server] = {RESOURCES_TYPE: {scaffold.leaf: {"entrypoint": "app.py", **about}}}
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": RESOURCES_TYPE, "name": server},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "datasets": datasets,
    }
    config[f"{scaffold.leaf}_workload_agent"] = {AGENTS_TYPE: {scaffold.agent: agent}}
    if scaffold.profile == _DRIVEN:
        config["rollout_collection_driver"] = _driver(scaffold)
    head = f"# How {scaffold.name} runs. Add a config that defines `policy_model`, such as --model-type openai_model.\n"
    return head + yaml.safe_dump(config, sort_keys=False)


def _driver(scaffold: Scaffold) -> str:
    return f"{scaffold.folder.replace('/', '.')}.rollout_driver:collect"


def _manifest(scaffold: Scaffold, server: str, datasets: list[dict[str, Any]]) -> str:
    facts: dict[str, Any] = {
        "resources_server": server,
        "agent_server": f"{scaffold.leaf}_workload_agent",
        "model_server": "policy_model",
        "datasets": datasets,
    }
    if scaffold.profile == _DRIVEN:
        facts["rollout_driver"] = _driver(scaffold)
    if scaffold.kind == "benchmark":
        facts |= {"canonical_split": "benchmark", "standard_prompt_config": f"{scaffold.folder}/prompt.yaml"}
    return filled(_TEMPLATES / MANIFEST_NAME, scaffold.values()) + yaml.safe_dump(facts, sort_keys=False)


def _agent_files(scaffold: Scaffold, values: Mapping[str, str]) -> dict[str, str]:
    folder = f"{AGENTS_TYPE}/{scaffold.agent}"
    files = {
        f"{folder}/app.py": filled(_TEMPLATES / _OWN_AGENT[scaffold.profile], values),
        f"{folder}/README.md": filled(_TEMPLATES / "agent_README.md", values),
        f"{folder}/requirements.txt": requirement(Path(folder).absolute()) + "\n",
    }
    if scaffold.profile == "external-agent-loop":
        files[f"{folder}/harness.py"] = filled(_TEMPLATES / "harness.py", values)
    return files


def _server_files(scaffold: Scaffold, values: Mapping[str, str]) -> dict[str, str]:
    """A new resources server with what `gym env test` asks it."""
    folder = Path(RESOURCES_TYPE) / scaffold.leaf
    made = resources_server_files(folder.absolute())
    files = {str(path.relative_to(Path.cwd())): text for path, text in made.items()}
    app = files[f"{folder}/app.py"]
    app = app.replace(
        "    SimpleResourcesServer,\n)", "    SimpleResourcesServer,\n    VerifierFixture,\n)\n" + _IMPORTS
    )
    app = app.replace(
        "from fastapi import FastAPI\n", "from fastapi import FastAPI\nfrom omegaconf import DictConfig\n"
    )
    main = 'if __name__ == "__main__":'
    files[f"{folder}/app.py"] = app.replace(main, filled(_TEMPLATES / "fixture.py", values) + main)
    files[f"{folder}/tests/verifier_cases.jsonl"] = _lines(_cases(scaffold))
    return files


_IMPORTS = "from nemo_gym.config_types import BaseServerConfig\nfrom nemo_gym.server_utils import ServerClient"


def _cases(scaffold: Scaffold) -> list[dict[str, Any]]:
    asked = {"responses_create_params": {"input": "What is the capital of France?"}, "expected_answer": "Paris"}
    right = {**asked, "response": _said("Paris, of course.")}
    wrong = {**asked, "response": _said("I do not know.")}
    return [
        {"name": "the right answer", "kind": "full_reward", "request": right, "expected_reward": 1.0},
        {"name": "a wrong answer", "kind": "zero_reward", "request": wrong, "expected_reward": 0.0},
        {"name": "no answer at all", "kind": "malformed", "request": asked, "expected_error": "ValidationError"},
        {"name": "the right answer, twice", "kind": "determinism", "request": right, "expected_reward": 1.0},
    ]


def _said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {**_RESPONSE, "output": [message]}


def create_resources_server(entrypoint: str) -> Path | None:
    """Write an environment to `entrypoint`, relative to the current folder; None when that folder is there already.

    Raises:
        ConfigError: the path is not `resources_servers/<name>`, or the name cannot be that of a Python module.
    """
    folder = Path(entrypoint).absolute()
    _check_entrypoint(entrypoint, folder)
    if folder.exists():
        return None
    for path, text in resources_server_files(folder).items():
        write_file(path, text)
    return folder


def resources_server_files(folder: Path) -> dict[Path, str]:
    """What a new environment at `folder` consists of."""
    name = folder.name
    values = {"@@NAME@@": name, "@@CONFIG@@": name.lower(), "@@CLASS@@": camel_case(name)}
    targets = {
        "app.py": "app.py",
        "config.yaml": f"configs/{name.lower()}.yaml",
        "test_app.py": "tests/test_app.py",
        "README.md": "README.md",
        "example.jsonl": "data/example.jsonl",
        "gitignore": "data/.gitignore",
    }
    files = {folder / target: filled(_SERVER_TEMPLATES / template, values) for template, target in targets.items()}
    return files | {folder / "requirements.txt": requirement(folder) + "\n"}


def filled(template: Path, values: Mapping[str, str]) -> str:
    """A template with these values for its marks."""
    text = template.with_name(f"{template.name}{_ENDING}").read_text(encoding="utf-8")
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def _check_entrypoint(entrypoint: str, folder: Path) -> None:
    name = folder.name
    if folder.parent.name != RESOURCES_TYPE:
        raise ConfigError(
            f"+entrypoint={entrypoint}: an environment lives in a folder below {RESOURCES_TYPE}, such as "
            f"{RESOURCES_TYPE}/{name if name.isidentifier() else 'my_env'}"
        )
    if not name.isidentifier() or keyword.iskeyword(name):
        suggestion = "".join(character if character.isalnum() else "_" for character in name).strip("_") or "my_env"
        raise ConfigError(
            f"+entrypoint={entrypoint}: {name!r} must be the name of a Python module: letters, digits and underscores, "
            f"such as {RESOURCES_TYPE}/{suggestion if suggestion.isidentifier() else f'env_{suggestion}'}"
        )


def camel_case(name: str) -> str:
    """The name of a module as that of a class."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def requirement(folder: Path) -> str:
    """This nemo-gym: where it is when the environment is part of the same checkout, else by its name."""
    root = PARENT_DIR.resolve()
    if (root / "pyproject.toml").is_file() and folder.resolve().is_relative_to(root):
        return f"-e nemo-gym[dev] @ {os.path.relpath(root, folder.resolve())}/"
    return "nemo-gym[dev]"


def write_file(path: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def init_resources_server(config: InitResourcesServerConfig) -> None:
    """`ng_init_resources_server`."""
    folder = create_resources_server(config.entrypoint)
    if folder is None:
        raise ConfigError(
            f"+entrypoint={config.entrypoint}: Folder already exists, and nothing was written; choose another name"
        )
    print(f"Wrote {config.entrypoint}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    print(f"Its tests: ng_test +entrypoint={config.entrypoint}")


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
