"""`ng_init_resources_server`: a new environment from templates: small, complete, and with tests that pass at once."""

import keyword
import os
from collections.abc import Mapping
from pathlib import Path

from nemo_gym.cli.command import command
from nemo_gym.errors import ConfigError
from nemo_gym.keys import RESOURCES_TYPE
from nemo_gym.paths import PARENT_DIR, ROOT_DIR
from nemo_gym.schemas.cli_config import InitResourcesServerConfig

_TEMPLATES = ROOT_DIR / "scaffold" / "resources_server"
_ENDING = ".template"


def create_resources_server(entrypoint: str) -> Path | None:
    """Write an environment to `entrypoint`, relative to the current folder; None when that folder is there already.

    Raises:
        ConfigError: the path is not `resources_servers/<name>`, or the name cannot be that of a Python module.
    """
    folder = Path(entrypoint).absolute()
    _check(entrypoint, folder)
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
    files = {folder / target: filled(_TEMPLATES / template, values) for template, target in targets.items()}
    return files | {folder / "requirements.txt": requirement(folder) + "\n"}


def filled(template: Path, values: Mapping[str, str]) -> str:
    """A template with these values for its marks."""
    text = template.with_name(f"{template.name}{_ENDING}").read_text(encoding="utf-8")
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def _check(entrypoint: str, folder: Path) -> None:
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


@command(InitResourcesServerConfig, reads_config=False)
def main(config: InitResourcesServerConfig) -> None:
    """Write a small environment that works: server, config, example rows, tests and a README to make your own.

    Examples:
        ng_init_resources_server +entrypoint=resources_servers/my_env
    """
    folder = create_resources_server(config.entrypoint)
    if folder is None:
        raise ConfigError(
            f"+entrypoint={config.entrypoint}: Folder already exists, and nothing was written; choose another name"
        )
    print(f"Wrote {config.entrypoint}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}")
    print(f"Its tests: ng_test +entrypoint={config.entrypoint}")
