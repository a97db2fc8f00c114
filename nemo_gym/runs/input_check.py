"""The first pass over an input file: how a row becomes one that can be sent, if it can, and which indices are taken.

It touches nothing and remembers a few bytes per row, whatever the rows hold. Everything wrong with the file is one
error that names the lines. The rules (prompt, agent, parameters) are resolved once per run and applied twice to
every row, here and by the pass that writes it, so what the second pass does has been checked by the first.
"""

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nemo_gym import prompt as prompts
from nemo_gym.data.row_shapes import ChatRowError, RowShapes, params_from_chat
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, listed
from nemo_gym.jsonl import Line, json_type, malformation, parse, refusal_by_servers
from nemo_gym.keys import (
    AGENT_REF_KEY_NAME,
    ATTEMPT_INDEX_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    SKILLS_REF_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.paths import candidates, near_files, resolve_for_reading
from nemo_gym.prompt import conflict_message
from nemo_gym.row_files import ROW_FILE_ENDINGS, iter_row_lines
from nemo_gym.runs.options import DEFAULT_ENTRY, RolloutCollectionConfig, repeats_of
from nemo_gym.runs.options.choosing import ChoosingOptions
from nemo_gym.runs.options.sharding import Shard
from nemo_gym.runs.record import IndexSet, IntSet, Row, SeenFilter
from nemo_gym.skills import load_skill_directory

if TYPE_CHECKING:
    from nemo_gym.runs.chosen import Chosen

logger = logging.getLogger(__name__)

ROWS = "{rows}"
"""Stands for the numbers of the lines that have a problem."""
NO_AGENT = (
    f"No agent specified for rows {ROWS}: pass +agent_name=<agent>, or give each row an agent_ref with the agent's name"
)
BAD_AGENT = f'rows {ROWS}: agent_ref must be an object with the agent\'s name, such as {{"name": "my_agent"}}'
NO_PARAMS = (
    f"rows {ROWS} have no {RESPONSES_CREATE_PARAMS_KEY_NAME}: add it, with the messages as its `input`; or give them "
    "`messages` or a `prompt`; or have it made from other fields by +prompt_config=<file>"
)
BAD_PARAMS = f"rows {ROWS}: {RESPONSES_CREATE_PARAMS_KEY_NAME} must be an object"
BAD_TASK_INDEX = f"rows {ROWS}: {TASK_INDEX_KEY_NAME} must be a number"
BAD_METADATA = f"rows {ROWS}: a seed cannot be added, metadata must be an object"
BAD_EXTRA_BODY = f"rows {ROWS}: a seed cannot be added, metadata.extra_body must be text that holds a JSON object"
OWN_INPUT = "own input"
_RESERVED = "_ng_"
_IDENTITY = frozenset((TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, ROLLOUT_ID_KEY_NAME, ATTEMPT_INDEX_KEY_NAME))
_TASK_INDEX_BYTES = TASK_INDEX_KEY_NAME.encode()
_HASH_BITS = 2**63 - 1
_SAMPLE_BYTES = 1 << 18
_LISTED_LINES = 100
_LISTED_PROBLEMS = 20
_MOST_PROBLEMS = 1_000
"""With so many different ones it is the wrong file; there is no point in reading on."""


@dataclass(frozen=True)
class RowRules:
    """The options of a run that shape its rows."""

    path: Path
    limit: int | None
    agent_name: str | None
    overrides: Row
    prompt: prompts.PromptConfig | None
    num_repeats: int | Mapping[str, int]
    add_seed: bool
    shard: Shard | None = None
    """The part of the rows that this run has; the others are checked and numbered all the same."""
    choosing: ChoosingOptions | None = None
    """What chooses some of the rows; None when all are meant."""
    skills_path: str | None = None
    """The folder of the skills that rows are to name."""

    @classmethod
    def of(cls, config: RolloutCollectionConfig) -> "RowRules":
        """The rules for `config`: overrides resolved, prompt loaded, input file found."""
        return cls(
            overrides=resolve_overrides(config.responses_create_params),
            prompt=prompts.load_prompt_or_explain(config.prompt_config) if config.prompt_config else None,
            path=locate_input(config.input_jsonl_fpath),
            limit=config.limit,
            agent_name=config.agent_name or None,
            num_repeats=config.num_repeats,
            add_seed=config.num_repeats_add_seed,
            shard=config.chosen_shard,
            choosing=_choosing(config),
            skills_path=config.skills.path if config.skills else None,
        )

    @cached_property
    def skills_ref(self) -> dict[str, Any]:
        """What rows say about the skills; read when it is needed, which a run that goes on with its rows does not."""
        return load_skill_directory(self.skills_path or "").model_dump()

    def repeats_of(self, agent: str) -> int | None:
        """How often a row of `agent` is rolled out; None when that is not said."""
        return repeats_of(self.num_repeats, agent)

    def repeats_of_row(self, row: Row) -> int:
        """How often a row is rolled out that need not be complete; 0 when it is of no use."""
        reference = row.get(AGENT_REF_KEY_NAME)
        name = reference.get("name") if isinstance(reference, dict) else None
        agent = name if isinstance(name, str) and name else self.agent_name
        return 0 if agent is None else self.repeats_of(agent) or 0

    def complete(self, row: Row, problems: list[str]) -> str:
        """Give `row` everything but its indices, in place, and return its agent.

        What stands in the way is added to `problems`; the row is then of no use.
        """
        if self.prompt is not None:
            self._fill_prompt(row, self.prompt, problems)
        if self.skills_path is not None:
            row[SKILLS_REF_KEY_NAME] = self.skills_ref
        agent = self._fill_agent(row, problems)
        params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
        if params is None and self.prompt is None:
            params = _params_from_chat(row, problems)
        if isinstance(params, dict):
            params.update(self.overrides)
            if self.add_seed:
                _check_seedable(params, problems)
        elif params is None:
            problems.append(NO_PARAMS)
        else:
            problems.append(BAD_PARAMS)
        if isinstance(row.get(TASK_INDEX_KEY_NAME), list | dict):
            problems.append(BAD_TASK_INDEX)
        return agent

    def _fill_prompt(self, row: Row, prompt: prompts.PromptConfig, problems: list[str]) -> None:
        if prompts.has_own_input(row):
            problems.append(OWN_INPUT)
            return
        try:
            row.update(prompts.apply_prompt_to_row(row, prompt))
        except (prompts.PromptFieldError, prompts.PromptAttributeError, prompts.PromptTemplateError) as error:
            problems.append(f"rows {ROWS}: {error}")
            row.setdefault(RESPONSES_CREATE_PARAMS_KEY_NAME, {})

    def _fill_agent(self, row: Row, problems: list[str]) -> str:
        reference = row.get(AGENT_REF_KEY_NAME)
        if isinstance(reference, dict):
            name = reference.get("name")
            if isinstance(name, str) and name:
                return name
        if reference is not None and (not isinstance(reference, dict) or name not in (None, "")):
            problems.append(BAD_AGENT)
        elif self.agent_name is None:
            problems.append(NO_AGENT)
        else:
            row[AGENT_REF_KEY_NAME] = {**(reference or {}), "name": self.agent_name}
            return self.agent_name
        return ""


def _choosing(config: RolloutCollectionConfig) -> ChoosingOptions | None:
    if config.of is not None:
        own = {Path(config.output_jsonl_fpath).resolve(), config.paths.rollouts.resolve()}
        if Path(config.of).expanduser().resolve() in own:
            raise ConfigError(
                f"+of={config.of} is the output of this run; what is missing in it is collected by "
                "+resume_from_cache=true alone, with +retry_exhausted=true also what was given up"
            )
    return config if config.selection else None


def drop_reserved(row: Row) -> list[str]:
    """Take the keys out of a row that only results may have, and return them: copied to its result they would hide it.

    Those that say which rollout it is stay.
    """
    reserved = [key for key in row if key.startswith(_RESERVED) and key not in _IDENTITY]
    for key in reserved:
        del row[key]
    return reserved


def _params_from_chat(row: Row, problems: list[str]) -> Row | None:
    """Give a row that brings `messages` or a `prompt` its parameters, and return them."""
    try:
        params = params_from_chat(row)
    except ChatRowError as error:
        problems.append(f"rows {ROWS}: {error}")
        return {}
    if params is not None:
        row[RESPONSES_CREATE_PARAMS_KEY_NAME] = params
    return params


def resolve_overrides(overrides: Mapping[str, Any]) -> Row:
    """The overrides as plain JSON data, `${...}` resolved within the block itself."""
    if not overrides:
        return {}
    import omegaconf

    try:
        block = omegaconf.OmegaConf.create(dict(overrides))
        resolved = omegaconf.OmegaConf.to_container(block, resolve=True)
        plain: Row = orjson.loads(orjson.dumps(resolved, option=orjson.OPT_NON_STR_KEYS))
    except (omegaconf.errors.OmegaConfBaseException, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"+{RESPONSES_CREATE_PARAMS_KEY_NAME}={overrides!r} cannot be used: {reason}") from error
    return plain


def locate_input(given: str) -> Path:
    """The input file that `given` means."""
    path = resolve_for_reading(given)
    if not path.exists():
        near = near_files(given)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        looked = ", ".join(map(str, candidates(given)))
        raise ConfigPathNotFoundError(f"+input_jsonl_fpath={given}: there is no such file{hint} (looked for {looked})")
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.suffix in ROW_FILE_ENDINGS)
        raise ConfigError(
            f"+input_jsonl_fpath={given} is a folder; "
            + (f"name a file in it: {listed((Path(given, name) for name in files), 5)}" if files else "name a file")
        )
    if not path.is_file():
        raise ConfigError(f"+input_jsonl_fpath={given}: it is read twice, so it must be a regular file")
    return path


def with_seed(params: Row, seed: int) -> Row:
    """New parameters whose `metadata.extra_body`, a JSON text, carries `seed`."""
    metadata = params.get("metadata") or {}
    extra_body = json.dumps({**_extra_body(metadata), "seed": seed})
    return {**params, "metadata": {**metadata, "extra_body": extra_body}}


def _extra_body(metadata: Row) -> Row:
    """What `extra_body` holds, as an object; ValueError when it is something else."""
    found = metadata.get("extra_body")
    value = json.loads(found) if isinstance(found, str) and found else found
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"extra_body is {json_type(value)}")
    return value


def _check_seedable(params: Row, problems: list[str]) -> None:
    metadata = params.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        problems.append(BAD_METADATA)
        return
    try:
        _extra_body(metadata or {})
    except ValueError:
        problems.append(BAD_EXTRA_BODY)


class InputRowsError(ConfigError, ValueError, KeyError):
    """Rows of an input file that cannot be rolled out, all of them in one message."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class TakenIndices:
    """What has to be known about all rows before the first can be numbered."""

    supplied: IndexSet = field(default_factory=IndexSet)
    """Every task index that the file brings itself, also beyond the limit."""
    supplied_twice: set[Any] = field(default_factory=set)
    repeated_lines: IntSet = field(default_factory=IntSet)
    """Hashes of the lines without an index that occur more than once, and of a few others."""

    def note(self, row: Row, content: bytes, seen: SeenFilter) -> None:
        """Take one row into account."""
        if TASK_INDEX_KEY_NAME in row:
            index = row[TASK_INDEX_KEY_NAME]
            if not self.supplied.add(index):
                self.supplied_twice.add(index)
            return
        hashed = line_hash(content)
        if seen.came_before(hashed):
            self.repeated_lines.add(hashed)


@dataclass
class InputScan(TakenIndices):
    """What the first pass found out."""

    size_and_time: tuple[int, int] = (0, 0)
    """Of the file, to notice when it changes before it is read again."""
    rows: int = 0
    """How many rows are used."""
    chosen: "Chosen | None" = None
    """Which rows are used; None when it is the first ones."""
    rows_of_agent: Counter[str] = field(default_factory=Counter)
    reserved: set[str] = field(default_factory=set)
    """Keys that were taken out of rows."""
    rows_with_reserved: int = 0
    shapes: RowShapes = field(default_factory=RowShapes)
    """Of the rows as they are sent, but for their indices."""


@dataclass
class _Problem:
    count: int = 0
    lines: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def at(self, line: int, position: int) -> None:
        self.count += 1
        if self.count <= _LISTED_LINES:
            self.lines.append(line)
            self.positions.append(position)

    def listed(self) -> str:
        more = self.count - len(self.lines)
        return f"{self.lines}" + (f" and {more:,} more" if more else "")


def scan_input(rules: RowRules) -> InputScan:
    """Read the whole file once.

    Raises:
        InputRowsError: rows are malformed, name no agent, or cannot be rolled out for another reason.
    """
    scan = InputScan(size_and_time=size_and_time(rules.path))
    seen: SeenFilter | None = None
    if rules.choosing is None:
        lines, seen = iter_row_lines(rules.path), SeenFilter(estimated_lines(rules.path))
    else:
        from nemo_gym.runs.chosen import choose

        scan.chosen = choose(rules.path, rules.choosing, rules.limit, scan, rules.repeats_of_row)
        lines = scan.chosen.lines(rules.path)
    problems: dict[str, _Problem] = {}
    for line in _with_progress_bar(lines):
        if seen is not None and rules.limit is not None and scan.rows >= rules.limit:
            _note_index_beyond_limit(line, scan)
            continue
        for problem in _scan_row(line, rules, scan, seen):
            problems.setdefault(problem, _Problem()).at(line.number, scan.rows)
        scan.rows += 1
        if len(problems) >= _MOST_PROBLEMS:
            break
    texts = [_text(problem, found, rules.path) for problem, found in problems.items()]
    texts += _uncovered_agents(rules, scan)
    if texts:
        raise InputRowsError(_consolidated(texts, rules.path))
    _warn_of_unused_agents(rules, scan)
    if scan.reserved:
        logger.warning(
            "%d rows of %s have keys that only results may have (%s): they are left out, as agents may copy them",
            scan.rows_with_reserved,
            rules.path,
            listed(sorted(scan.reserved)),
        )
    return scan


def line_hash(content: bytes) -> int:
    """A hash of a line: the same for equal lines, hardly ever for others."""
    return hash(content) & _HASH_BITS


def estimated_lines(path: Path) -> int:
    """Judged from the beginning of the file; being wrong costs a little time, nothing else."""
    with path.open("rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    return 1 + path.stat().st_size * (1 + sample.count(b"\n")) // (1 + len(sample))


def size_and_time(path: Path) -> tuple[int, int]:
    """Size and time of change of a file: one of them is another when somebody has written to it."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _scan_row(line: Line, rules: RowRules, scan: InputScan, seen: SeenFilter | None) -> list[str]:
    """What stands in the way of a row; without `seen` its index has been noted before."""
    try:
        row = parse(line.content)
    except ValueError as error:
        return [f"line {line.number}: {malformation(line.content, error)}"]
    if not isinstance(row, dict):
        return [f"rows {ROWS}: expected a JSON object, found {json_type(row)}"]
    refusal = refusal_by_servers(line.content)
    if refusal is not None:
        return [f"rows {ROWS}: {refusal}"]
    problems: list[str] = []
    dropped = drop_reserved(row)
    if dropped:
        scan.rows_with_reserved += 1
        scan.reserved.update(dropped)
    agent = rules.complete(row, problems)
    if agent:
        scan.rows_of_agent[agent] += 1
    if problems:
        return problems
    scan.shapes.note(agent, row, line.number)
    if seen is not None:
        scan.note(row, line.content, seen)
    return problems


def _note_index_beyond_limit(line: Line, scan: InputScan) -> None:
    """Rows beyond the limit only reserve their index, so that keys stay the same when the run is extended."""
    if _TASK_INDEX_BYTES not in line.content:
        return
    try:
        row = parse(line.content)
    except ValueError:
        return
    if isinstance(row, dict) and not isinstance(row.get(TASK_INDEX_KEY_NAME, []), list | dict):
        scan.supplied.add(row[TASK_INDEX_KEY_NAME])


def _uncovered_agents(rules: RowRules, scan: InputScan) -> list[str]:
    uncovered = sorted(agent for agent in scan.rows_of_agent if rules.repeats_of(agent) is None)
    if not uncovered:
        return []
    return [
        f"num_repeats says nothing about the agents {uncovered} and has no {DEFAULT_ENTRY!r} for them; "
        f"it lists {_listed_agents(rules)}"
    ]


def _warn_of_unused_agents(rules: RowRules, scan: InputScan) -> None:
    unused = sorted(set(_listed_agents(rules)) - set(scan.rows_of_agent))
    if unused:
        warnings.warn(f"num_repeats names agents that no row uses (a typo?): {unused}", UserWarning, stacklevel=3)


def _listed_agents(rules: RowRules) -> list[str]:
    return [] if isinstance(rules.num_repeats, int) else sorted(set(rules.num_repeats) - {DEFAULT_ENTRY})


def _text(problem: str, found: _Problem, path: Path) -> str:
    if problem == OWN_INPUT:
        return conflict_message(found.positions, f" (lines {found.listed()} of {path})")
    return problem.replace(ROWS, found.listed())


def _consolidated(texts: list[str], path: Path) -> str:
    if len(texts) == 1:
        return f"{path}: {texts[0]}"
    more = len(texts) - _LISTED_PROBLEMS
    listed = [*texts[:_LISTED_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return f"{path} has {len(texts)} problems (rows are given by line number):" + "".join(
        f"\n- {text}" for text in listed
    )


def _with_progress_bar(lines: Iterator[Line]) -> Iterator[Line]:
    """A bar on the terminal when reading takes more than a moment; nothing elsewhere."""
    from tqdm import tqdm

    return iter(tqdm(lines, desc="Reading rows", unit=" rows", delay=1.0, disable=None, leave=False))
