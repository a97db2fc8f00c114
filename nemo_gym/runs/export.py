"""From collected rollouts to a data set for supervised or preference training.

The file is read twice: once for where each rollout is and what it scored, then only the chosen rollouts. Memory grows
with the number of rollouts, not with what they say. An example holds chat messages in the columns that trainers expect,
reasoning as `<think>` blocks in the text of the assistant, and says which rollouts it was made of: `provenance` has
file, line and rollout key. A data set appears when it is complete, or not at all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import orjson

from nemo_gym.dialects.base import UnusableRequestError
from nemo_gym.dialects.to_chat import to_chat_messages, to_chat_request
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.jsonl import Line
from nemo_gym.keys import (
    ATTEMPT_INDEX_KEY_NAME,
    RESPONSE_KEY_NAME,
    RESPONSES_CREATE_PARAMS_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.metrics.columns import RolloutTable, SortedRollouts
from nemo_gym.metrics.profile import task_profiles
from nemo_gym.paths import refuse_long_names, refuse_odd_file
from nemo_gym.row_files import open_data_set
from nemo_gym.runs.facts import RolloutFilter, bare_name, parse_for_tasks, select_tasks
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.index import RecordIndex, RecordReader
from nemo_gym.runs.kinds import RECORDS, kind_of, require_rollouts
from nemo_gym.runs.read import records
from nemo_gym.runs.record import REWARD_KEY, Outcome, RolloutKey, agent_name_of, is_finite_number, outcome_of
from nemo_gym.runs.select import field_of
from nemo_gym.schemas.cli_config import ExportConfig

Example: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[dict[str, Any]]
_OF_ONE_ROLLOUT = frozenset({ROLLOUT_INDEX_KEY_NAME, ATTEMPT_INDEX_KEY_NAME, ROLLOUT_ID_KEY_NAME})
_PROMPT_FIELDS = ("input", "instructions", "tools")
_FILTER = "+filter"
_NOT_CHOSEN = "not chosen by +where"


class NotExportableError(ValueError):
    """A rollout that cannot be put as chat messages; the text says why."""


class Entry(NamedTuple):
    """One rollout of a file."""

    key: RolloutKey
    reward: float
    line: int
    number: int
    """In the index of its file."""


@dataclass
class UsableRollouts:
    """The usable rollouts of a file by task, and how many are not usable, by reason."""

    index: RecordIndex
    by_task: dict[int, list[Entry]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    _seen: set[RolloutKey] = field(default_factory=set)
    _table: RolloutTable | None = None
    _rows: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """What `select` needs of the row of each task."""

    @classmethod
    def of(cls, path: Path, expression: str | None, where: RolloutFilter | None = None) -> "UsableRollouts":
        """Read a file once, what `where` leaves of it; with an expression, what `select` needs for it is kept.

        Raises:
            ConfigError: a line is not a JSON object, or the expression is none.
        """
        names = [] if expression is None else [bare_name(name) for name in parse_for_tasks(expression, _FILTER).names()]
        usable = cls(RecordIndex([path]), _table=None if expression is None else RolloutTable())
        for key, line, record in records(path, "raise", may_lack_key=True):
            entry = usable._entry(key, line, record) if where is None or where.holds(record) else _NOT_CHOSEN
            if isinstance(entry, str):
                usable.left_out[entry] += 1
                continue
            usable.by_task.setdefault(entry.key.task_index, []).append(entry)
            if usable._table is not None:
                usable._table.add(record)
                if entry.key.task_index not in usable._rows:
                    usable._rows[entry.key.task_index] = {name: field_of(record, name) for name in names}
        if where is not None:
            where.require_met()
        for entries in usable.by_task.values():
            entries.sort()
        return usable

    def select(self, expression: str) -> None:
        """Keep only the tasks for which the expression holds.

        Raises:
            SelectError: it is not an expression, or uses a name that no task has.
        """
        assert self._table is not None
        profiles = list(task_profiles(SortedRollouts(self._table)))
        rows = [self._rows.get(profile[TASK_INDEX_KEY_NAME], {}) for profile in profiles]
        positions = select_tasks(expression, profiles, rows, _FILTER)
        tasks = {profiles[position][TASK_INDEX_KEY_NAME] for position in positions}
        self.by_task = {task: entries for task, entries in self.by_task.items() if task in tasks}

    def tasks(self) -> list[list[Entry]]:
        """The rollouts of each task, tasks and rollouts in order."""
        return [self.by_task[task] for task in sorted(self.by_task)]

    def _entry(self, key: RolloutKey | None, line: Line, record: dict[str, Any]) -> Entry | str:
        """The entry for a record, or why there is none."""
        if key is None or type(key.task_index) is not int or type(key.rollout_index) is not int:
            return f"no {TASK_INDEX_KEY_NAME} and {ROLLOUT_INDEX_KEY_NAME}"
        if outcome_of(record) is not Outcome.SUCCESS:
            return "failed"
        reward = record.get(REWARD_KEY)
        if not is_finite_number(reward):
            return "no reward"
        if key in self._seen:
            return "repeats a rollout key"
        self._seen.add(key)
        self.index.add(key, line, record)
        return Entry(key, float(reward), line.number, len(self.index) - 1)


Choice = tuple[Entry, ...]
"""The rollouts one example is made of: one, or a better and a worse one."""


@dataclass
class ExportSummary:
    """What an export wrote, and what it left out."""

    path: Path
    examples: int = 0
    tasks: int = 0
    """Tasks that have an example."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that cannot be used, by reason."""
    notes: Counter[str] = field(default_factory=Counter)
    """Rollouts that were changed so that chat templates can show them, by what was changed."""
    pushed_to: str | None = None
    """Where on the hub it is, if it was uploaded."""

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "output_fpath": str(self.path),
            "examples": self.examples,
            "tasks": self.tasks,
            "left_out": dict(self.left_out),
            **({"notes": dict(self.notes)} if self.notes else {}),
            **({} if self.pushed_to is None else {"pushed_to": self.pushed_to}),
        }


def export_rollouts(config: ExportConfig) -> ExportSummary:
    """Write the data set that `config` asks for.

    Raises:
        ConfigError: the rollouts are missing or malformed, the filter is not an expression, or the output is there
            already.
    """
    source, target = Path(config.rollouts_jsonl_fpath).expanduser(), Path(config.output_fpath).expanduser()
    _check_paths(source, target, config)
    where = None if config.where is None else RolloutFilter(config.where)
    usable = UsableRollouts.of(source, config.filter, where)
    summary = ExportSummary(target, left_out=usable.left_out)
    if config.filter is not None:
        usable.select(config.filter)
    if config.format == "dataset":
        summary.examples = summary.tasks = _write_tasks(rows_of(config), usable, target)
        return summary
    tasks = set()
    with RecordReader(usable.index) as reader, open_data_set(target) as write:
        for choice in _choices(usable, config):
            notes: Counter[str] = Counter()
            try:
                example = _example(choice, config, reader, source, notes)
            except NotExportableError as error:
                summary.left_out[str(error)] += 1
                continue
            write(example)
            summary.notes += notes
            summary.examples += 1
            tasks.add(choice[0].key.task_index)
    summary.tasks = len(tasks)
    return summary


def rows_of(config: ExportConfig) -> Path:
    """The rows that were rolled out, for `format=dataset`.

    Raises:
        ConfigError: they are not there.
    """
    given = config.materialized_inputs_jsonl_fpath
    path = RolloutPaths(Path(config.rollouts_jsonl_fpath).expanduser()).materialized_inputs
    path = path if given is None else Path(given).expanduser()
    if not path.is_file():
        raise ConfigPathNotFoundError(
            f"{path} does not exist (looked in {Path.cwd()}): +format=dataset takes the rows of tasks from there; name "
            "their file with +materialized_inputs_jsonl_fpath"
        )
    return path


def _write_tasks(rows: Path, usable: UsableRollouts, target: Path) -> int:
    """The row of every task that is left, once, with how it went; how many there are."""
    written: set[Any] = set()
    with open_data_set(target) as write:
        for key, _, row in records(rows, "raise"):
            entries = usable.by_task.get(key.task_index)
            if entries is None or key.task_index in written:
                continue
            written.add(key.task_index)
            rewards = [entry.reward for entry in entries]
            plain = {name: value for name, value in row.items() if name not in _OF_ONE_ROLLOUT}
            write({**plain, **solve_rates(rewards)})
        if len(written) < len(usable.by_task):  # then the file does not appear
            raise ConfigError(
                f"{len(usable.by_task) - len(written)} of the {len(usable.by_task)} tasks have no row in {rows}: name "
                "the rows of this run with +materialized_inputs_jsonl_fpath"
            )
    return len(written)


def solve_rates(rewards: Sequence[float]) -> dict[str, Any]:
    """How the rollouts of a task went, in the fields that a data set has."""
    return {
        "solve_rate": sum(reward >= 1 for reward in rewards) / len(rewards),
        "mean_reward": sum(rewards) / len(rewards),
        "num_rollouts": len(rewards),
    }


def _check_paths(source: Path, target: Path, config: ExportConfig) -> None:
    refuse_long_names("output_fpath", target)
    if not source.is_file():
        raise ConfigPathNotFoundError(f"+rollouts_jsonl_fpath={source} does not exist (looked in {Path.cwd()})")
    require_rollouts(source, "rollouts_jsonl_fpath")
    refuse_odd_file(target, "output_fpath")
    if not target.exists():
        return
    if any(file.exists() and target.samefile(file) for file in RolloutPaths(source).of_one_run):
        raise ConfigError(f"+output_fpath={target} belongs to the run that is to be exported; name another file")
    if not config.overwrite:
        raise ConfigError(f"+output_fpath={target} exists; name another file, or replace it with +overwrite=true")
    if kind_of(target) in RECORDS:
        raise ConfigError(
            f"+output_fpath={target} is {kind_of(target).value}; results are never replaced, so name another file"
        )


def _choices(usable: UsableRollouts, config: ExportConfig) -> Iterator[Choice]:
    """What each example is to be made of, in task order."""
    for entries in usable.tasks():
        best_first = sorted(entries, key=lambda entry: (-entry.reward, entry.key))
        if config.format == "dpo":
            yield from _pairs(best_first, config)
        else:
            good = [entry for entry in best_first if _is_good(entry, config)]
            yield from ((entry,) for entry in sorted(good[: config.max_per_task]))


def _pairs(best_first: list[Entry], config: ExportConfig) -> Iterator[Choice]:
    """The best with the worst, the second best with the second worst, and so on while one is better."""
    for chosen, rejected in list(zip(best_first, reversed(best_first), strict=True))[: config.max_per_task or 1]:
        if chosen.reward > rejected.reward and _is_good(chosen, config):
            yield chosen, rejected


def _is_good(entry: Entry, config: ExportConfig) -> bool:
    return config.min_reward is None or entry.reward >= config.min_reward


def _example(
    choice: Choice, config: ExportConfig, reader: RecordReader, source: Path, notes: "Counter[str]"
) -> Example:
    conversations = []
    for entry in choice:
        conversation = Conversation(reader.record(entry.number), entry, source.name)
        notes.update(conversation.adapt(config))
        conversations.append(conversation)
    if config.format == "dpo":
        return as_dpo(*conversations)
    return as_messages(*conversations) if config.format == "messages" else as_sft(*conversations)


class Conversation:
    """One rollout, split into what was asked and what followed."""

    def __init__(self, record: dict[str, Any], entry: Entry, file: str) -> None:
        params = record.get(RESPONSES_CREATE_PARAMS_KEY_NAME) or {}
        asked = {name: params[name] for name in _PROMPT_FIELDS if params.get(name) is not None}
        try:
            request = to_chat_request(asked, with_token_ids=False)
            completion = to_chat_messages(record[RESPONSE_KEY_NAME]["output"], with_token_ids=False)
        except (KeyError, TypeError, UnusableRequestError) as error:
            raise NotExportableError("has no form as chat messages") from error
        self.prompt: Messages = [_plain(message) for message in request["messages"]]
        self.tools: list[dict[str, Any]] | None = request.get("tools")
        self.completion: Messages = [_plain(message) for message in completion]
        self.reward = entry.reward
        self.provenance = {
            "file": file,
            "line": entry.line,
            TASK_INDEX_KEY_NAME: entry.key.task_index,
            ROLLOUT_INDEX_KEY_NAME: entry.key.rollout_index,
            "agent": agent_name_of(record),
        }
        if not self.completion:
            raise NotExportableError("says nothing")

    def adapt(self, config: ExportConfig) -> set[str]:
        """Put the messages as chat templates want them; what had to be changed for it, in words."""
        notes = set[str]()
        for message in (*self.prompt, *self.completion):
            if message["role"] == "developer" and config.developer_role == "system":
                message["role"] = "system"
                notes.add("developer messages became system messages: few chat templates know developers")
            if message.get("tool_calls"):
                calls = [_function_call(call, config.tool_arguments) for call in message["tool_calls"]]
                message["tool_calls"] = calls
                if config.tool_arguments == "object" and any(not _has_object(call) for call in calls):
                    notes.add("arguments of tool calls that are no JSON object stayed text")
        return notes


def as_messages(conversation: Conversation) -> Example:
    """The whole conversation in one list."""
    return {"messages": conversation.prompt + conversation.completion, **_rest(conversation)}


def as_sft(conversation: Conversation) -> Example:
    """Prompt and completion apart, so that only the completion is trained on."""
    return {"prompt": conversation.prompt, "completion": conversation.completion, **_rest(conversation)}


def as_dpo(chosen: Conversation, rejected: Conversation) -> Example:
    """One prompt with a better and a worse completion.

    Raises:
        NotExportableError: the two were asked different things.
    """
    if (chosen.prompt, chosen.tools) != (rejected.prompt, rejected.tools):
        raise NotExportableError("has another prompt than its sibling")
    return {
        "prompt": chosen.prompt,
        "chosen": chosen.completion,
        "rejected": rejected.completion,
        **_tools(chosen),
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
        "provenance": {"chosen": chosen.provenance, "rejected": rejected.provenance},
    }


def _rest(conversation: Conversation) -> Example:
    return {**_tools(conversation), "reward": conversation.reward, "provenance": conversation.provenance}


def _tools(conversation: Conversation) -> Example:
    return {"tools": conversation.tools} if conversation.tools else {}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text as text: parts only where there is something else among them."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


def _function_call(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    """A call with its arguments as an object, or as the text that the model wrote; a custom call in the same form."""
    if "custom" in call:
        custom = call["custom"]
        given = {"input": custom["input"]} if arguments == "object" else custom["input"]
        return {"id": call["id"], "type": call["type"], "function": {"name": custom["name"], "arguments": given}}
    function = call["function"]
    if arguments == "object":
        try:
            read = orjson.loads(function["arguments"] or "{}")
        except (orjson.JSONDecodeError, TypeError):
            return call
        if isinstance(read, dict):
            return {**call, "function": {**function, "arguments": read}}
    return call


def _has_object(call: dict[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], dict)
