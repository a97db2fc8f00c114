"""Whether the running environment already has what a server asks for.

When it has, the server needs no environment of its own, and starting it needs no installer
and no network.
"""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from nemo_gym.cli.requirements import Line, Requirements


def unmet(requirements: Requirements) -> list[str]:
    """What is missing here, one phrase each; empty when the running environment will do."""
    return [phrase for line in requirements.lines for phrase in _unmet_line(line)]


def is_python_allowed(requires_python: str | None, version: str | None = None) -> bool:
    """Whether `requires-python` of a project allows a Python, the running one by default."""
    if requires_python is None:
        return True
    try:
        return SpecifierSet(requires_python).contains(version or platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        return True


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


def _unmet_extra(found: Distribution, extra: str, seen: set[str]) -> Iterator[str]:
    """What the extra of an installed package adds to its plain requirements."""
    for text in found.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
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
