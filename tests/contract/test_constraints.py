"""`constraints.txt` is what a fresh install gets, so it has to name, and fit, everything that is asked for."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def _required() -> list[Requirement]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


@pytest.mark.parametrize("required", _required(), ids=str)
def test_every_requirement_is_pinned_to_a_version_it_admits(required: Requirement) -> None:
    name = canonicalize_name(required.name)
    versions = [next(iter(pin.specifier)).version for pin in PINS if canonicalize_name(pin.name) == name]
    assert versions, f"{name} is not in constraints.txt: run `make constraints`"
    assert all(version in required.specifier for version in versions)


def test_pins_are_exact_and_name_no_place_to_get_them_from() -> None:
    assert len(PINS) > len({canonicalize_name(required.name) for required in _required()})
    for pin in PINS:
        assert pin.url is None
        assert [specifier.operator for specifier in pin.specifier] == ["=="]


def test_every_installation_of_the_makefile_uses_them() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    has_versions_of_its_own = ("$(PEER_", "$(VERL_TOOLS)")
    installs = [
        line for line in lines if "pip install -" in line and not any(it in line for it in has_versions_of_its_own)
    ]
    assert len(installs) == 5
    assert all("$(PINNED)" in line for line in installs)
