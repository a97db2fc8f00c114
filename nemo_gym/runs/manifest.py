"""The run manifest: what was run, with what, and how it ended; and whether a run that goes on is still the same.

It lies beside the rollouts as `<stem>_manifest.json` and holds no secret. More or fewer rows or repeats, or other rows
of the same input, change what is asked of a run. Anything else that would shape its rows differently mixes two
experiments in one file, and is refused unless the user insists.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from nemo_gym._version import __version__
from nemo_gym.config.secrets import is_secret_key, mask_tree, mask_url_passwords
from nemo_gym.errors import ConfigError
from nemo_gym.keys import MASK
from nemo_gym.paths import resolve_for_reading, write_aside
from nemo_gym.row_files import is_plain, iter_row_lines
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options import RolloutCollectionConfig, repeats_of
from nemo_gym.runs.options.choosing import selection_in, selection_text
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.read import keys_in
from nemo_gym.runs.record import KeySet, utc_text

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_ONLY_IF_ANY = ("adaptive", "not_needed")
_ROW_OPTIONS = ("agent_name", "responses_create_params", "num_repeats_add_seed", "skills")


def masked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `options` (plain data) with `****` for every secret."""
    shown: dict[str, Any] = mask_tree(dict(options))
    return shown


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line with `****` for the values of secret options and for passwords in URLs."""
    shown = []
    for argument in arguments:
        option, separator, _ = argument.partition("=")
        hide = bool(separator) and is_secret_key(option.rpartition(".")[2])
        shown.append(f"{option}={MASK}" if hide else mask_url_passwords(argument))
    return shown


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
    rows: int | None = None
    """How many rows it has; only of files whose bytes do not tell whether rows were added at their end."""
    rows_sha256: str | None = None
    """Of the rows one after the other; likewise."""

    def __eq__(self, other: object) -> bool:
        """Whether both have the same content, whatever they are called."""
        return isinstance(other, FileFingerprint) and self.sha256 == other.sha256

    def __str__(self) -> str:
        return f"{self.path} ({self.size_bytes:,} bytes)"


def tell_files_apart(one: FileFingerprint | None, other: FileFingerprint | None) -> tuple[str, str]:
    """Return what to call two files that differ: paths and sizes, and `other content` where these are equal."""
    texts = tuple("not set" if file is None else str(file) for file in (one, other))
    return texts[0], f"{texts[1]} with other content" if texts[0] == texts[1] else texts[1]


class FilesNow(NamedTuple):
    """The files that shape the rows of a run, as they are now; None for those that are not there, or not asked for."""

    input: FileFingerprint | None
    prompt: FileFingerprint | None = None
    of: FileFingerprint | None = None
    """The earlier run that `+only` speaks of, failures included."""

    @classmethod
    def of_run(cls, config: RolloutCollectionConfig) -> "FilesNow":
        """Those of the run that `config` describes."""
        path = input_path(config)
        prompt = resolve_for_reading(config.prompt_config, Path.is_file) if config.prompt_config else None
        of = None if config.of is None else RolloutPaths(Path(config.of).expanduser())
        return cls(
            input=None if path is None else fingerprint(path),
            prompt=fingerprint(prompt) if prompt is not None and prompt.is_file() else None,
            of=fingerprint_of_all([of.rollouts, of.failures]) if of is not None and of.rollouts.is_file() else None,
        )


class Asked(BaseModel):
    """What was asked of a run at one time."""

    at: str | None = None
    selection: dict[str, Any] = Field(default_factory=dict)
    limit: int | None = None
    num_repeats: int | dict[str, int] = 1
    input_sha256: str | None = None
    input_rows: int | None = None
    """How many rows of the input were used."""
    rollouts: int = 0
    added: int = 0
    """How many of them had not been asked for just before."""
    dropped: int = 0
    """How many that had been asked for just before no longer were."""

    def is_same(self, other: "Asked") -> bool:
        """Whether both ask for the same."""
        changing = {"at": None, "added": 0, "dropped": 0}
        return self.model_copy(update=changing) == other.model_copy(update=changing)


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
    of: FileFingerprint | None = None
    """The earlier run that `+only` speaks of."""
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
    history: list[Asked] = Field(default_factory=list)
    """What was asked of the run, from the start until now."""
    is_narrowed: bool = False
    """Whether something was once asked for that no longer is: then the rollouts file may hold more than that."""
    steered: list[dict[str, Any]] = Field(default_factory=list)
    """What people changed while the run went on: `at`, `did`, and `value` if there is one."""
    reverified: FileFingerprint | None = None
    """The rollouts that were scored again, where the run did that."""
    delta: dict[str, Any] | None = None
    """What their new verdicts come to, against those from before."""
    adaptive: dict[str, Any] | None = None
    """By agent, what became of a cap that adapts; absent where none does."""
    not_needed: dict[str, Any] | None = None
    """By agent and task, how many repeats were not made because the task was decided; absent where none was."""

    @property
    def expected_rollouts(self) -> int:
        """How many lines the materialized inputs have."""
        return sum(expected.rollouts for expected in self.agents.values())

    def describe_rows(
        self,
        config: RolloutCollectionConfig,
        expected: dict[str, Expected],
        input_rows: int | None,
        *,
        added: int = 0,
        dropped: int = 0,
    ) -> None:
        """Record where the rows came from and how many there are; `input_rows` is None when nobody can tell.

        `added` and `dropped` are how many rollouts were not asked for before, and how many no longer are.
        """
        self.input, self.prompt, self.of = FilesNow.of_run(config)
        self.input_rows, self.agents = input_rows, expected
        self.note_asked(shown_options(config), at=now_text(), added=added, dropped=dropped)

    def note_asked(self, options: Mapping[str, Any], *, at: str | None, added: int = 0, dropped: int = 0) -> None:
        """Add what the rows, which are described already, come from to the history, if that is anything new."""
        asked = Asked(
            at=at,
            selection=selection_in(options),
            limit=options.get("limit"),
            num_repeats=options.get("num_repeats", 1),
            input_sha256=None if self.input is None else self.input.sha256,
            input_rows=self.input_rows,
            rollouts=self.expected_rollouts,
            added=added,
            dropped=dropped,
        )
        if not (self.history and self.history[-1].is_same(asked)):
            self.history.append(asked)

    @property
    def needed_rollouts(self) -> int:
        """How many of them are needed, as far as that is known: some tasks may be decided without the rest."""
        tasks = [entry for of_agent in (self.not_needed or {}).values() for entry in of_agent.values()]
        return self.expected_rollouts - sum(len(entry["not_made"]) for entry in tasks)

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


def input_path(config: RolloutCollectionConfig) -> Path | None:
    """The input file, if it exists."""
    path = resolve_for_reading(config.input_jsonl_fpath)
    return path if path.is_file() else None


def fingerprint(path: Path) -> FileFingerprint:
    """What tells the content of a file from any other."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = FileFingerprint(path=str(path), sha256=digest, size_bytes=file.tell())
    if not is_plain(path):
        found.rows, found.rows_sha256 = _digest_of_rows(path)
    return found


def fingerprint_of_all(paths: Sequence[Path]) -> FileFingerprint:
    """What tells the content of several files, as far as they exist, from any other; it is called by the first."""
    found = [fingerprint(path) for path in paths if path.exists()]
    digest = hashlib.sha256("".join(each.sha256 for each in found).encode()).hexdigest()
    return FileFingerprint(path=str(paths[0]), sha256=digest, size_bytes=sum(each.size_bytes for each in found))


def only_grew(was: FileFingerprint, now: FileFingerprint) -> bool:
    """Whether a file of rows begins with all the rows that it had, and has more."""
    path = Path(now.path)
    if was.rows is not None:
        return (now.rows or 0) > was.rows and _digest_of_rows(path, was.rows) == (was.rows, was.rows_sha256)
    if not (is_plain(path) and 0 < was.size_bytes < now.size_bytes):
        return False
    with path.open("rb") as file:
        digest, left, last = hashlib.sha256(), was.size_bytes, b""
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left, last = left - len(chunk), chunk[-1:]
        ends_with_row = last == b"\n" or file.read(2)[:1] in (b"\n", b"\r")
    return ends_with_row and digest.hexdigest() == was.sha256


def _digest_of_rows(path: Path, first: int | None = None) -> tuple[int, str]:
    """How many rows there are, up to `first`, and a digest of them."""
    digest, rows = hashlib.sha256(), 0
    for line in islice(iter_row_lines(path), first):
        digest.update(line.content + b"\n")
        rows += 1
    return rows, digest.hexdigest()


def write_manifest(manifest: RunManifest, path: Path) -> None:
    """Replace the manifest at `path` in one step."""
    content = manifest.model_dump(mode="json")
    shown = {name: value for name, value in content.items() if value is not None or name not in _ONLY_IF_ANY}
    with write_aside(path) as file:
        file.write(json.dumps(shown, indent=2, ensure_ascii=False, default=str).encode())
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


def asked_keys(paths: RolloutPaths) -> KeySet | None:
    """The rollouts that a run is asked for; None where its rollouts file holds no others, as far as is known."""
    manifest = read_manifest(paths.manifest)
    if manifest is None or not manifest.is_narrowed or not paths.materialized_inputs.exists():
        return None
    return keys_in(paths.materialized_inputs)


class Effect(Enum):
    """What a change does to the rows of a run."""

    EXTENDS = "extends"
    """The rows so far stay as they are; more are added."""
    NARROWS = "narrows"
    """Some of the rows so far are no longer asked for; those that are stay as they are, and others may be added."""
    ALTERS = "alters"


class Change(NamedTuple):
    """One thing that is not as it was."""

    name: str
    was: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.name}: was {_shown(self.was)}, now {_shown(self.now)}"


class RunChangedError(ConfigError):
    """A run cannot be resumed because it would no longer be the same run."""


def find_changes(
    manifest: RunManifest, config: RolloutCollectionConfig, files: FilesNow, rows_now: Callable[[], int]
) -> list[Change]:
    """Everything that shapes rows and is not as the manifest says.

    Args:
        manifest: of the earlier run.
        config: of this one.
        files: as they are now.
        rows_now: counts the input rows this run uses; called only when that matters.
    """
    of_rows = [*_changed_input(manifest, config, files.input), *_changed_selection(manifest, config, files.of)]
    changes = [
        *of_rows,
        *_changed_file("prompt_config", manifest.prompt, files.prompt),
        *_changed_options(manifest.options, shown_options(config)),
        *_changed_repeats(manifest, config),
        *_changed_shard(manifest, config),
    ]
    if files.input is not None and manifest.options.get("limit") != config.limit:
        changes += _changed_limit(manifest, config, None if of_rows else rows_now())
    return changes


def refuse_or_report(changes: list[Change], config: RolloutCollectionConfig) -> None:
    """Let extensions pass; other changes only with `allow_changed_config`.

    Raises:
        RunChangedError: listing what changed.
    """
    altering = [change for change in changes if change.effect is Effect.ALTERS]
    if altering and not config.allow_changed_config:
        listed = "".join(f"\n  {change}" for change in altering)
        raise RunChangedError(
            f"{config.paths.rollouts} was collected differently, so it cannot be resumed like this:{listed}\n"
            "Either resume it with the former settings; or start afresh without +resume_from_cache=true, which keeps "
            f"the rollouts so far in {config.paths.previous}; or accept the change with +allow_changed_config=true, "
            "which keeps the finished rollouts and collects the missing ones with the new settings."
        )
    for change in changes:
        if change.effect is Effect.EXTENDS:
            logger.info("Extending the run: %s", change)
        elif change.effect is Effect.NARROWS:
            logger.info("Asking for other rollouts than before: %s", change)
        else:
            logger.warning("Going on although it changed: %s", change)


def _changed_input(
    manifest: RunManifest, config: RolloutCollectionConfig, now: FileFingerprint | None
) -> Iterator[Change]:
    was = manifest.input
    for change in _changed_file("input", was, now):
        if was is not None and now is not None and only_grew(was, now):
            yield change._replace(effect=Effect.NARROWS if config.selection else Effect.EXTENDS)
        else:
            yield change


def _changed_selection(
    manifest: RunManifest, config: RolloutCollectionConfig, of_now: FileFingerprint | None
) -> Iterator[Change]:
    """The earlier run that a selection speaks of is known by its content; if it is gone, by what it was."""
    was, now = selection_in(manifest.options), config.selection
    is_same_of = manifest.of is None or of_now is None or manifest.of == of_now
    if {**was, "of": None} == {**now, "of": None} and is_same_of:
        return
    effect = Effect.NARROWS if now or config.limit is not None else Effect.EXTENDS
    yield Change("selection", selection_text(was), selection_text(now), effect)


def _changed_file(name: str, was: FileFingerprint | None, now: FileFingerprint | None) -> Iterator[Change]:
    if was != now:
        yield Change(name, *tell_files_apart(was, now), Effect.ALTERS)


def _changed_options(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    before = dict(_leaves({name: was.get(name) for name in _ROW_OPTIONS}))
    after = dict(_leaves({name: now.get(name) for name in _ROW_OPTIONS}))
    for name in before | after:
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name), Effect.ALTERS)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _changed_repeats(manifest: RunManifest, config: RolloutCollectionConfig) -> Iterator[Change]:
    was, now = manifest.options.get("num_repeats", 1), config.num_repeats
    if was == now:
        return
    pairs = [(repeats_of(was, agent) or 0, repeats_of(now, agent) or 0) for agent in manifest.agents]
    if any(after < before for before, after in pairs):
        yield Change("num_repeats", was, now, Effect.NARROWS)
    elif any(after > before for before, after in pairs):
        yield Change("num_repeats", was, now, Effect.EXTENDS)


def _changed_shard(manifest: RunManifest, config: RolloutCollectionConfig) -> Iterator[Change]:
    was, now = manifest.shard, config.chosen_shard
    if was != now:
        yield Change("shard", was and str(was), now and str(now), Effect.ALTERS)


def _changed_limit(manifest: RunManifest, config: RolloutCollectionConfig, rows_now: int | None) -> Iterator[Change]:
    """What counts is how many rows are used, not the number given: a limit beyond the end of the file is none.

    `rows_now` is None when something else changes the rows, too; then it is the number given.
    """
    was, now = manifest.options.get("limit"), config.limit
    if manifest.input_rows is None:
        yield Change("limit", was, now, Effect.ALTERS)
    elif rows_now is None:
        is_more = now is None or (was is not None and was < now)
        yield Change("limit", was, now, Effect.EXTENDS if is_more else Effect.NARROWS)
    elif rows_now != manifest.input_rows:
        yield Change("limit", was, now, Effect.EXTENDS if rows_now > manifest.input_rows else Effect.NARROWS)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else repr(value)
