"""PUBLIC: skills, folders with a `SKILL.md` each that an agent's runtime is given to work with."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nemo_gym.errors import ConfigError
from nemo_gym.paths import resolve_for_reading

__all__ = [
    "SKILL_MD_FILENAME",
    "SkillMetadata",
    "SkillsConfig",
    "SkillsRef",
    "hash_skill_dir",
    "load_skill_directory",
    "parse_skill_md",
    "stage_skills",
]

SKILL_MD_FILENAME = "SKILL.md"
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HASH_DIGITS = 12


class SkillsError(ConfigError, ValueError):
    """A folder of skills is not what it should be."""


class SkillMetadata(BaseModel):
    """What a skill says about itself."""

    model_config = ConfigDict(defer_build=True)

    name: str
    description: str | None = None
    version: str | None = None


class SkillsRef(BaseModel):
    """Skills as rows and results name them."""

    model_config = ConfigDict(defer_build=True)

    path: str
    """As the user wrote it."""
    hash: str
    """Of everything in the folder."""
    skills: list[SkillMetadata]


class SkillsConfig(BaseModel):
    """Which skills a run uses."""

    model_config = ConfigDict(defer_build=True)

    path: str
    """A folder with one folder per skill."""


def hash_skill_dir(root: Path) -> str:
    """Twelve hex digits that change when a file below `root` does: its path or what it holds."""
    digest = hashlib.sha256()
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:_HASH_DIGITS]


def parse_skill_md(skill_md_path: Path) -> SkillMetadata:
    """What the front matter of a `SKILL.md` says.

    Raises:
        ValueError: there is none, it is no YAML mapping, or it has no name.
    """
    import yaml

    text = skill_md_path.read_bytes().decode("utf-8-sig", errors="replace")
    found = _FRONT_MATTER.match(text)
    if found is None:
        raise SkillsError(f"{skill_md_path} must begin with front matter: YAML between two lines of `---`")
    try:
        front: Any = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise SkillsError(f"the front matter of {skill_md_path} is no YAML: {error}") from error
    if not isinstance(front, dict) or not isinstance(front.get("name"), str) or not front["name"]:
        raise SkillsError(f"the front matter of {skill_md_path} must have a `name`")
    details = front.get("metadata")
    version = details.get("version") if isinstance(details, dict) else None
    description = front.get("description")
    return SkillMetadata(
        name=front["name"],
        description=None if description is None else str(description),
        version=None if version is None else str(version),
    )


def load_skill_directory(path: str) -> SkillsRef:
    """The skills below a folder, which is looked for as every relative path is.

    Raises:
        ValueError: there is no such folder, it has no skills, or one of its folders has no `SKILL.md`.
    """
    root = _require_folder(path)
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir())
    if not folders:
        raise SkillsError(f"{root} has no skills: a skill is a folder with a {SKILL_MD_FILENAME}")
    lacking = [folder.name for folder in folders if not (folder / SKILL_MD_FILENAME).is_file()]
    if lacking:
        raise SkillsError(f"these folders in {root} have no {SKILL_MD_FILENAME}: {', '.join(lacking)}")
    skills = [parse_skill_md(folder / SKILL_MD_FILENAME) for folder in folders]
    return SkillsRef(path=path, hash=hash_skill_dir(root), skills=skills)


def stage_skills(path: str, dest_skills_dir: Path) -> None:
    """Copy a folder of skills to where an agent's runtime looks for it, which must not exist yet."""
    root = _require_folder(path)
    shutil.copytree(root, dest_skills_dir)


def _require_folder(path: str) -> Path:
    root = resolve_for_reading(path)
    if not root.is_dir():
        raise SkillsError(f"skills path {path!r} is not a folder (looked for {root})")
    return root
