"""The run manifest: what was run, with what, and how it ended.

It lies beside the rollouts as `<stem>_manifest.json`, holds no secret, and is what a resumed run is
compared with.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from nemo_gym._version import __version__
from nemo_gym.jsonl import write_aside
from nemo_gym.rollouts.config import RolloutCollectionConfig
from nemo_gym.rollouts.masked import masked_command, masked_options
from nemo_gym.rollouts.record import utc_text
from nemo_gym.rollouts.sharding import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What only the caller knows about a run; all of it goes into the manifest, masked."""

    command: Sequence[str] = ()
    """The command line, empty when the run was started from Python."""
    config: Mapping[str, Any] | None = None
    """The configuration of the servers, plain data."""
    models: Sequence[str] = ()
    """The names of the models that answer."""


class Expected(BaseModel):
    """How much a run asks of one agent."""

    tasks: int = 0
    rollouts: int = 0


class FileFingerprint(BaseModel):
    """Which file it was, whatever it is called now."""

    path: str
    sha256: str
    size_bytes: int = 0


class RunManifest(BaseModel):
    """The content of `<stem>_manifest.json`."""

    manifest_version: int = 1
    command: list[str] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)
    """The arguments of the command, defaults included."""
    input: FileFingerprint | None = None
    input_rows: int | None = None
    """How many rows of the input are used."""
    prompt: FileFingerprint | None = None
    shard: Shard | None = None
    """Which part of the run this is; None for a whole run."""
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: str | None = None
    resumed_at: list[str] = Field(default_factory=list)
    ended_at: str | None = None
    """None while the run goes on, and for ever if it was killed."""
    agents: dict[str, Expected] = Field(default_factory=dict)
    models: list[str] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    """Rollouts by outcome."""
    config: dict[str, Any] | None = None

    @property
    def expected_rollouts(self) -> int:
        """How many lines the materialized inputs have."""
        return sum(expected.rollouts for expected in self.agents.values())

    def describe(self, config: RolloutCollectionConfig, facts: RunFacts) -> None:
        """Record the circumstances of this start; those of an earlier one are replaced as far as these are known."""
        self.command = masked_command(facts.command)
        self.options = shown_options(config)
        self.shard = config.chosen_shard
        self.models = list(facts.models) or self.models
        self.config = self.config if facts.config is None else masked_options(facts.config)
        self.versions = {"nemo_gym": __version__, "python": platform.python_version()}
        self.ended_at = None


def shown_options(config: RolloutCollectionConfig) -> dict[str, Any]:
    """The options of a run as the manifest holds them."""
    return masked_options(config.model_dump(mode="json"))


def now_text() -> str:
    """The present moment as manifests write it."""
    return utc_text(datetime.now(UTC))


def fingerprint(path: Path) -> FileFingerprint:
    """What tells the content of a file from any other."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFingerprint(path=str(path), sha256=digest, size_bytes=file.tell())


def write_manifest(manifest: RunManifest, path: Path) -> None:
    """Replace the manifest at `path` in one step."""
    with write_aside(path) as file:
        file.write(json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False, default=str).encode())
        file.write(b"\n")


def read_manifest(path: Path) -> RunManifest | None:
    """The manifest at `path`; None when there is none, or, with a warning, when it cannot be read."""
    try:
        return RunManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        logger.warning("%s cannot be read: %s", path, error.errors()[0]["msg"])
        return None
