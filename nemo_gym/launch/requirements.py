"""What a server folder asks to have installed, and whether the running environment already has it.

Read from its requirements.txt or pyproject.toml. Lines that mean nemo-gym itself, in whatever form, are dropped: a
server always runs with the installation that starts it. Local paths are made absolute, so that what is left can be
installed from anywhere.

When the running environment has everything, the server needs no environment of its own, and starting it needs no
installer and no network. What a child process must have on its PYTHONPATH to find this nemo-gym is told here, too.
"""

import json
import os
import platform
import re
import site
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, requires
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from nemo_gym.errors import ServerFolderError
from nemo_gym.paths import OWN_NAME, PARENT_DIR

REQUIREMENTS_FILE = "requirements.txt"
OVERRIDES_FILE = "overrides.txt"
PROJECT_FILE = "pyproject.toml"
PROJECT_FILES = (PROJECT_FILE, "setup.py", "setup.cfg")
"""Any of these makes a folder something that can be installed."""
Kind = Literal["package", "path", "url", "constraints", "option"]
_COMMENT = re.compile(r"(^|\s)#.*")
_OPTION_WITH_PATH = re.compile(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s+|=)(\S.*)")
_LINE_OPTIONS = re.compile(r"\s--\S.*")
_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.\-]*+)\s*+(?P<extras>\[[^\]]*\])?+\s*+(?:@\s*+(?P<target>[^\s;]++))?+(?P<rest>.*)"
)
_SCHEME = re.compile(r"[A-Za-z][\w+.\-]*://")
_PATH_WITH_EXTRAS = re.compile(r"(?P<path>[^\[]*)(?P<extras>\[[^\]]*\])?")
_OUR_REPOSITORY = re.compile(r"/nvidia-nemo/gym(\.git)?([@#?/]|$)", re.IGNORECASE)
COMPAT_EXTRA = "compat"
_NEWEST_RELEASE = 999
"""Higher than the last part of any Python version."""


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
    overrides: Path | None = None
    """A file whose lines replace what anybody asks for, be it the server or one of its packages."""
    expected: tuple[str, ...] = ()
    """Packages that an environment built for the server gets, too: it may use them without listing them."""

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
        return _overridden(_read_project(files[0]), folder)
    return _overridden(Requirements(files[0], tuple(_lines_of_file(files[0], folder, ()))), folder)


def package_name(line: str) -> str | None:
    """The package that a requirement line asks for, in its normal spelling; None when it names none."""
    named = _NAMED.fullmatch(_LINE_OPTIONS.sub("", line))
    return canonical(named["name"]) if named else None


def _overridden(requirements: Requirements, folder: Path) -> Requirements:
    """With the lines of `overrides.txt`, if the folder has one, in place of its own for the same packages."""
    file = folder / OVERRIDES_FILE
    if not file.is_file():
        return requirements
    overrides = {package_name(line.text): line for line in _lines_of_file(file, folder, ()) if line.kind == "package"}
    lines = tuple(
        overrides.get(package_name(line.text), line) if line.kind == "package" else line for line in requirements.lines
    )
    return replace(requirements, lines=lines, overrides=file)


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
    where, semicolon, condition = given.partition(";")
    where = where.rstrip()
    if where.startswith("file:"):
        where = unquote(urlsplit(where).path)
    parts = _PATH_WITH_EXTRAS.fullmatch(where)
    location, extras = (parts["path"], parts["extras"] or "") if parts else (where, "")
    path = (base / Path(location.strip()).expanduser()).resolve()
    if _path_means_us(path, server_folder):
        return None
    marker = f" ;{condition}" if semicolon else ""
    if editable:
        extras = extras or "".join(re.findall(r"\[[^\[\]]*\]", prefix))
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
    try:
        name = _read_toml(file).get("project", {}).get("name")
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
    try:
        content = _read_toml(file)
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


def _read_toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


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


def unmet(requirements: Requirements) -> list[str]:
    """What is missing here, one phrase each; empty when the running environment will do."""
    missing = [phrase for line in requirements.lines for phrase in _unmet_line(line)]
    return missing + list(_violated_constraints(requirements.overrides) if requirements.overrides else ())


def compat_packages() -> list[str]:
    """The packages of the extra `compat`: what servers of the original find installed without listing it."""
    try:
        lines = [Requirement(text) for text in requires(OWN_NAME) or ()]
    except PackageNotFoundError:
        return []
    return [canonical(line.name) for line in lines if line.marker and _is_of_extra(line.marker, COMPAT_EXTRA)]


def with_compat(requirements: Requirements, python_version: str | None = None) -> Requirements:
    """`requirements`, with the packages of `compat` that they do not name and that are not installed here.

    With another Python than the running one nothing that is installed here counts.
    """
    named = {package_name(line.text) for line in requirements.lines}
    is_here = is_running_python(python_version)
    wanted = [name for name in compat_packages() if name not in named and not (is_here and not unmet_package(name))]
    return replace(requirements, expected=tuple(wanted))


def is_python_allowed(requires_python: str | None, version: str | None = None) -> bool:
    """Return whether `requires-python` of a project allows a Python, the running one by default.

    A version without its last part, such as `3.13`, stands for every release of it.
    """
    if requires_python is None:
        return True
    version = version or platform.python_version()
    releases = (version, f"{version}.{_NEWEST_RELEASE}") if version.count(".") == 1 else (version,)
    try:
        allowed = SpecifierSet(requires_python)
    except InvalidSpecifier:
        return True
    return any(allowed.contains(release, prereleases=True) for release in releases)


def unmet_package(text: str) -> list[str]:
    """What of one requirement (`name[extra]>=1; marker`) is missing."""
    try:
        requirement = Requirement(text.partition(" --")[0].strip())
    except InvalidRequirement:
        return [f"{text} (not understood)"]
    return list(_unmet_requirement(requirement, set()))


def _unmet_line(line: Line) -> list[str]:
    if line.kind == "package":
        return unmet_package(line.text)
    if line.kind == "url":
        return [] if _url_is_installed(line.text) else [f"{line.text} is not installed"]
    if line.kind == "path" and line.path is not None:
        return [] if _path_is_installed(line.path) else [f"{line.path} is not installed"]
    if line.kind == "constraints" and line.path is not None:
        return list(_violated_constraints(line.path))
    return []


def _unmet_requirement(requirement: Requirement, seen: set[str]) -> Iterator[str]:
    if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate()):
        return
    seen.add(str(requirement))
    found = _find(requirement.name)
    if found is None:
        yield f"{requirement} is not installed"
    elif requirement.url and not _came_from(found, requirement.url):
        yield f"{requirement} is installed from elsewhere"
    elif not requirement.specifier.contains(found.version, prereleases=True):
        yield f"{requirement} is wanted, {found.version} is installed"
    else:
        for extra in requirement.extras:
            yield from _unmet_extra(found, extra, seen)


def _is_of_extra(marker: Marker, extra: str) -> bool:
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _unmet_extra(found: Distribution, extra: str, seen: set[str]) -> Iterator[str]:
    """What the extra of an installed package adds to its plain requirements."""
    for text in found.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and _is_of_extra(marker, extra):
            requirement.marker = None
            yield from _unmet_requirement(requirement, seen)


def _violated_constraints(file: Path) -> Iterator[str]:
    """A constraint asks for nothing, but what is installed must agree with it."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        yield f"{file} ({error.strerror})"
        return
    for line in lines:
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        if _find(requirement.name) is not None:
            yield from _unmet_requirement(requirement, set())


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _origin(found: Distribution) -> dict[str, object]:
    text = found.read_text("direct_url.json")
    origin: dict[str, object] = json.loads(text) if text else {}
    return origin


def _came_from(found: Distribution, url: str) -> bool:
    """Whether a package was installed from `url`, at its revision if it names one."""
    origin = _origin(found)
    wanted = urlsplit(url.removeprefix("git+"))
    path, _, revision = wanted.path.partition("@")
    plain = wanted._replace(path=path, fragment="").geturl()
    version_control = origin.get("vcs_info")
    known = version_control if isinstance(version_control, dict) else {}
    return origin.get("url") == plain and (
        not revision or revision in (known.get("requested_revision"), known.get("commit_id"))
    )


def _url_is_installed(text: str) -> bool:
    name, at, url = text.removeprefix("-e ").partition(" @ ")
    if not at:
        return any(_came_from(found, name) for found in distributions())
    found = _find(name.partition("[")[0].strip())
    return found is not None and _came_from(found, url.partition(" ;")[0].strip())


def _path_is_installed(path: Path) -> bool:
    return any(_origin(found).get("url") == path.as_uri() for found in distributions())


def running_site_packages() -> list[Path]:
    """The folders of installed packages of this interpreter."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [path for folder in folders if (path := Path(folder)).is_dir()]


def own_root_for_path() -> Path | None:
    """The folder to put on PYTHONPATH so that a child finds this nemo-gym; None when it lies in site-packages.

    There it is found anyway, and on PYTHONPATH it would come before the packages of an environment.
    """
    return None if PARENT_DIR.resolve() in {path.resolve() for path in running_site_packages()} else PARENT_DIR


def is_running_python(version: str | None) -> bool:
    """Whether this interpreter is the one a version such as `3.12` or `3.12.4` asks for."""
    return not version or f"{platform.python_version()}.".startswith(f"{version}.")


def search_path(entries: Sequence[Path | str | None]) -> str:
    """Folders as the value of PATH or PYTHONPATH, without gaps and repetitions."""
    return os.pathsep.join(dict.fromkeys(str(entry) for entry in entries if entry))
