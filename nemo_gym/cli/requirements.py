"""What a server folder asks to have installed, read from its requirements.txt or pyproject.toml.

Lines that mean nemo-gym itself, in whatever form, are dropped: a server always runs with the
installation that starts it. Local paths are made absolute, so that what is left can be
installed from anywhere.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from nemo_gym.cli.launch_errors import ServerFolderError
from nemo_gym.paths import PARENT_DIR

OWN_NAME = "nemo-gym"
REQUIREMENTS_FILE = "requirements.txt"
PROJECT_FILE = "pyproject.toml"
PROJECT_FILES = (PROJECT_FILE, "setup.py", "setup.cfg")
"""Any of these makes a folder something that can be installed."""

Kind = Literal["package", "path", "url", "constraints", "option"]

_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTION_WITH_PATH = re.compile(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s+|=)(\S.*)")
_LINE_OPTIONS = re.compile(r"\s--\S.*$")
_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.\-]*)\s*(?P<extras>\[[^\]]*\])?\s*(?:@\s*(?P<target>[^\s;]+))?(?P<rest>.*)"
)
_SCHEME = re.compile(r"[A-Za-z][\w+.\-]*://")
_PATH_WITH_EXTRAS = re.compile(r"(?P<path>[^\[]*)(?P<extras>\[[^\]]*\])?")
_OUR_REPOSITORY = re.compile(r"/nvidia-nemo/gym(\.git)?([@#?/]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Line:
    """One thing to give to the installer."""

    text: str
    """As it goes into a requirements file."""
    kind: Kind
    path: Path | None = None
    """The file or folder meant by a path or a constraints line."""


@dataclass(frozen=True)
class Requirements:
    """Everything a server folder asks for, without nemo-gym itself."""

    file: Path
    lines: tuple[Line, ...]
    requires_python: str | None = None
    """What pyproject.toml says about Python, if anything."""
    project: Path | None = None
    """The server's folder when it is an installable project itself."""

    def for_installer(self) -> str:
        """The lines as the text of a requirements file."""
        return "".join(f"{line.text}\n" for line in self.lines)


def requirements_files(folder: Path) -> list[Path]:
    """Those of the two files that `folder` has."""
    return [path for name in (PROJECT_FILE, REQUIREMENTS_FILE) if (path := folder / name).is_file()]


def read_requirements(folder: Path) -> Requirements:
    """What the server in `folder` needs.

    Raises:
        ServerFolderError: the folder has both files or neither, or one that cannot be read.
    """
    files = requirements_files(folder)
    if not files:
        raise ServerFolderError(
            f"Missing {PROJECT_FILE} or {REQUIREMENTS_FILE} in {folder}; a server that needs nothing has an empty "
            f"{REQUIREMENTS_FILE}"
        )
    if len(files) > 1:
        raise ServerFolderError(f"Found both {PROJECT_FILE} and {REQUIREMENTS_FILE} in {folder}; remove one of them")
    if files[0].name == PROJECT_FILE:
        return _read_project(files[0])
    return Requirements(files[0], tuple(_lines_of_file(files[0], folder, ())))


def canonical(name: str) -> str:
    """A package's name in its one normal spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines_of_file(file: Path, server_folder: Path, including: tuple[Path, ...]) -> Iterator[Line]:
    if file in including:
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        by = f" (included by {including[-1]})" if including else ""
        raise ServerFolderError(f"cannot read {file}{by}: {error}") from error
    for raw in text.replace("\\\n", " ").splitlines():
        given = _COMMENT.sub("", raw).strip()
        option = _OPTION_WITH_PATH.fullmatch(given)
        if option and option[1] in ("-r", "--requirement"):
            yield from _lines_of_file((file.parent / option[2]).absolute(), server_folder, (*including, file))
        elif given and (line := read_line(given, file.parent, server_folder)) is not None:
            yield line


def read_line(given: str, base: Path, server_folder: Path) -> Line | None:
    """One line of a requirements file, paths relative to `base`; None when it means nemo-gym."""
    option = _OPTION_WITH_PATH.fullmatch(given)
    if option and option[1] in ("-e", "--editable"):
        line = _read_requirement(option[2], base, server_folder, editable=True)
        return (
            None if line is None else replace(line, text=line.text if line.text.startswith("-e") else f"-e {line.text}")
        )
    if option and option[1] in ("-c", "--constraint"):
        path = (base / option[2]).absolute()
        return Line(f"-c {path}", "constraints", path)
    if option and option[1] in ("-f", "--find-links"):
        where = option[2] if _SCHEME.match(option[2]) else str((base / option[2]).absolute())
        return Line(f"--find-links {where}", "option")
    if given.startswith("-"):
        return Line(given, "option")
    return _read_requirement(given, base, server_folder, editable=False)


def _read_requirement(given: str, base: Path, server_folder: Path, *, editable: bool) -> Line | None:
    if _SCHEME.match(given) and not given.startswith("file://"):
        return None if _url_means_us(given) else Line(given, "url")
    if _is_path(given, base):
        return _path_line(given, "", base, server_folder, editable=editable)
    named = _NAMED.fullmatch(_LINE_OPTIONS.sub("", given))
    if named is None:
        return Line(given, "package")
    if canonical(named["name"]) == OWN_NAME:
        return None
    target = named["target"]
    if target is None:
        return Line(given, "package")
    if _SCHEME.match(target) and not target.startswith("file:"):
        return Line(given, "url")
    prefix = f"{named['name']}{named['extras'] or ''} @ "
    return _path_line(target + named["rest"], prefix, base, server_folder, editable=editable)


def _is_path(given: str, base: Path) -> bool:
    if given.startswith((".", "/", "~", "file:")):
        return True
    first = re.split(r"[\s;@\[]", given, maxsplit=1)[0]
    return "/" in first or (first.endswith((".whl", ".tar.gz", ".zip")) and (base / first).exists())


def _path_line(given: str, prefix: str, base: Path, server_folder: Path, *, editable: bool) -> Line | None:
    """A local path; `prefix` is the `name[extras] @ ` that stood in front of it."""
    where, marker = re.match(r"([^;]*?)\s*(;.*)?$", given).groups()  # type: ignore[union-attr]
    if where.startswith("file:"):
        where = unquote(urlsplit(where).path)
    parts = _PATH_WITH_EXTRAS.fullmatch(where)
    location, extras = (parts["path"], parts["extras"] or "") if parts else (where, "")
    path = (base / Path(location.strip()).expanduser()).resolve()
    if _path_means_us(path, server_folder):
        return None
    marker = f" {marker}" if marker else ""
    if editable:
        extras = extras or "".join(re.findall(r"\[[^\]]*\]", prefix))
        return Line(f"-e {path}{extras}{marker}", "path", path)
    text = f"{prefix}{path.as_uri()}{marker}" if prefix else f"{path}{extras}{marker}"
    return Line(text, "path", path)


def _path_means_us(path: Path, server_folder: Path) -> bool:
    is_our_wheel = path.suffix == ".whl" and canonical(path.name.split("-")[0]) == OWN_NAME
    if is_our_wheel or path == PARENT_DIR.resolve():
        return True
    if (path / PROJECT_FILE).is_file():
        return _project_name(path / PROJECT_FILE) == OWN_NAME
    # `../..` in a server that was moved out of its checkout: what it pointed at was nemo-gym.
    return path in server_folder.resolve().parents and not any((path / name).is_file() for name in PROJECT_FILES)


def _project_name(file: Path) -> str | None:
    import tomllib

    try:
        name = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}).get("name")
    except (OSError, ValueError):
        return None
    return canonical(name) if isinstance(name, str) else None


def _url_means_us(url: str) -> bool:
    egg = re.search(r"[#&]egg=([\w.\-]+)", url)
    if egg:
        return canonical(egg[1]) == OWN_NAME
    last = urlsplit(url).path.rstrip("/").rpartition("/")[2].partition("@")[0]
    name = last.split("-")[0] if last.endswith(".whl") else last.removesuffix(".git")
    return canonical(name) == OWN_NAME or bool(_OUR_REPOSITORY.search(url))


def _read_project(file: Path) -> Requirements:
    import tomllib

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerFolderError(f"cannot read {file}: {error}") from error
    project: dict[str, Any] = content.get("project", {})
    installable = file.parent if "build-system" in content else None
    if "dependencies" in project.get("dynamic", ()):
        return Requirements(file, (Line(f"-e {file.parent}", "path", file.parent),), project.get("requires-python"))
    sources: dict[str, Any] = content.get("tool", {}).get("uv", {}).get("sources", {})
    by_name = {canonical(name): source for name, source in sources.items() if isinstance(source, Mapping)}
    lines = _project_lines(project.get("dependencies", ()), by_name, file.parent)
    return Requirements(file, tuple(lines), project.get("requires-python"), installable)


def _project_lines(dependencies: Iterable[str], sources: Mapping[str, Any], folder: Path) -> Iterator[Line]:
    for dependency in dependencies:
        named = _NAMED.fullmatch(dependency)
        source = sources.get(canonical(named["name"])) if named else None
        given = _from_source(named, source) if named and source else dependency
        line = read_line(given, folder, folder)
        if line is not None:
            yield line


def _from_source(named: re.Match[str], source: Mapping[str, Any]) -> str:
    """A dependency with the place that `[tool.uv.sources]` names for it."""
    prefix = f"{named['name']}{named['extras'] or ''} @ "
    if "path" in source:
        return prefix + str(source["path"])
    if "git" in source:
        revision = source.get("rev") or source.get("tag") or source.get("branch")
        return f"{prefix}git+{source['git']}" + (f"@{revision}" if revision else "")
    return prefix + str(source["url"]) if "url" in source else named[0]
