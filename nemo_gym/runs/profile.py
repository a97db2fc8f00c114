"""A finished run, profiled: its files in, statistics per task, a page and a selection of tasks out.

Of a result only its numbers are kept, of the rows of a task only one in full, so a profile needs far less
memory than the files it reads.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.jsonl import to_line
from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSE_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.profile import RewardProfiler
from nemo_gym.metrics.report import Failures, TaskNumbers, numbers_of, render_page
from nemo_gym.paths import make_folder, refuse_long_names, write_aside
from nemo_gym.runs.facts import RolloutFilter, select_tasks
from nemo_gym.runs.files import MATERIALIZED_SUFFIX, RolloutPaths
from nemo_gym.runs.index import RecordIndex, RecordReader, stripped
from nemo_gym.runs.kinds import Kind, kind_of, refuse_to_replace, require_rollouts
from nemo_gym.runs.manifest import asked_keys
from nemo_gym.runs.read import records
from nemo_gym.runs.record import NG_FAILURE_CLASS_KEY, KeySet, Result, RolloutKey, Row
from nemo_gym.runs.run import refuse_files_of_others
from nemo_gym.schemas.cli_config import RewardProfileConfig
from nemo_gym.terminal import shown

_CLASS_LENGTH = 60
_NO_CLASS = "(none)"
_PAGE = "_reward_profile.html"


@dataclass
class ProfileSummary:
    """What a profile came to."""

    completion: dict[str, Any]
    """As `RewardProfiler.profile_completion_summary` has it."""
    groups_path: Path
    agents_path: Path
    page_path: Path
    agents: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[TaskNumbers] = field(default_factory=list)
    """Those that the page lists."""
    selected: int | None = None
    """Tasks that were selected; None when nobody asked."""
    selected_path: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs: one object."""
        return {
            **self.completion,
            "reward_profiling_jsonl_fpath": str(self.groups_path),
            "agent_metrics_fpath": str(self.agents_path),
            "reward_profile_html_fpath": str(self.page_path),
            "selected_tasks": self.selected,
            "selected_jsonl_fpath": None if self.selected_path is None else str(self.selected_path),
            "agent_metrics": self.agents,
        }


@dataclass
class _Results:
    results: list[Result] = field(default_factory=list)
    output_items: list[int] = field(default_factory=list)
    first_of_task: dict[Any, int] = field(default_factory=dict)
    """The lowest rollout index of each task."""
    keys: KeySet = field(default_factory=KeySet)
    """The rollouts there are, where only some of them are wanted."""
    unwanted: KeySet = field(default_factory=KeySet)
    """Those among them that are left out."""


def profile_run(config: RewardProfileConfig, task_link: Callable[[Any], str] | None = None) -> ProfileSummary:
    """Profile the files that `config` names and write the results beside the rollouts.

    `task_link` says where a reader of the page finds the rollouts of a task, given its index.

    Raises:
        ConfigError: a file is missing or malformed, rows and results do not belong together, or the selection is
            not an expression.
    """
    inputs = _existing(config.materialized_inputs_jsonl_fpath, "materialized_inputs_jsonl_fpath")
    rollouts = _existing(config.rollouts_jsonl_fpath, "rollouts_jsonl_fpath")
    _refuse_swapped(inputs, rollouts)
    paths = RolloutPaths(rollouts)
    refuse_files_of_others(paths, "rollouts_jsonl_fpath")
    refuse_long_names("rollouts_jsonl_fpath", *paths.of_one_run)
    _check_outputs(config, rollouts)
    where = None if config.where is None else RolloutFilter(config.where)
    read = _read_results(rollouts, inputs, where)
    rows = _read_rows(inputs, read, where)
    profiler = RewardProfiler()
    try:
        groups, agents = profiler.profile_from_data(rows, read.results, config.allow_partial_rollouts)
        completion = profiler.profile_completion_summary(rows, read.results)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{rollouts} and {inputs}: {error.args[0]}") from error
    selected = None if config.select is None else select_tasks(config.select, groups)
    groups_path, agents_path = profiler.write_to_disk(groups, agents, rollouts)
    page_path = page_of(rollouts)
    failures = _failures(paths.failures)
    subtitle = f"{completion['completed_rollout_rows']:,} of {completion['expected_rollout_rows']:,} rollouts"
    numbers = numbers_of(groups, read.output_items, failures)
    with write_aside(page_path) as file:
        page = render_page(
            rollouts.name,
            f"Reward profile, {subtitle}",
            numbers,
            shlex.join(["ng_view", f"+path={rollouts}"]),
            task_link,
        )
        file.write(page.encode(errors="replace"))
    summary = ProfileSummary(completion, groups_path, agents_path, page_path, agents, numbers.tasks)
    if selected is not None:
        summary.selected, summary.selected_path = len(selected), _selection_path(config, rollouts)
        _write_selection(summary.selected_path, [groups[position] for position in selected])
    return summary


def page_of(rollouts: Path) -> Path:
    """Where the page about these rollouts goes."""
    return rollouts.with_name(f"{rollouts.stem}{_PAGE}")


def _existing(path: str, option: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigPathNotFoundError(f"+{option}={path} does not exist (looked in {Path.cwd()})")
    return found


def _refuse_swapped(inputs: Path, rollouts: Path) -> None:
    """Tell the two files apart by content; a data set may bring results along, so there the name counts, too."""
    kinds = kind_of(inputs), kind_of(rollouts)
    if kinds == (Kind.ROLLOUTS, Kind.INPUTS):
        raise ConfigError(
            f"the two files are swapped: {rollouts} is {Kind.INPUTS.value}, {inputs} is {Kind.ROLLOUTS.value}; "
            f"write +materialized_inputs_jsonl_fpath={rollouts} +rollouts_jsonl_fpath={inputs}"
        )
    require_rollouts(rollouts, "rollouts_jsonl_fpath")
    is_named_so = inputs.name.endswith(MATERIALIZED_SUFFIX)
    if kinds[0] not in (Kind.INPUTS, Kind.BARE, Kind.EMPTY) and not (kinds[0] is Kind.ROLLOUTS and is_named_so):
        raise ConfigError(
            f"+materialized_inputs_jsonl_fpath={inputs} is {kinds[0].value}, not {Kind.INPUTS.value}; that of these "
            f"rollouts is {RolloutPaths(rollouts).materialized_inputs}"
        )


def _check_outputs(config: RewardProfileConfig, rollouts: Path) -> None:
    """Refuse to write over what is no earlier profile, while nothing has been written yet."""
    beside = {"_reward_profiling.jsonl": Kind.PROFILE, "_agent_metrics.json": Kind.METRICS, _PAGE: Kind.PAGE}
    for ending, kind in beside.items():
        refuse_to_replace(rollouts.with_name(f"{rollouts.stem}{ending}"), "rollouts_jsonl_fpath", kind)
    if config.select is not None:
        refuse_to_replace(_selection_path(config, rollouts), "select_output_jsonl_fpath", Kind.NUMBERED_ROWS)


def _read_results(path: Path, inputs: Path, where: RolloutFilter | None) -> _Results:
    read = _Results()
    if where is not None:
        _find_unwanted(read, path, inputs, where)
    asked = asked_keys(RolloutPaths(path))
    for key, _, record in records(path, "raise", may_lack_key=True):
        if key is not None and (key in read.unwanted or (asked is not None and key not in asked)):
            continue
        response = record.get(RESPONSE_KEY_NAME)
        output = response.get("output") if isinstance(response, dict) else None
        if isinstance(output, list):
            read.output_items.append(len(output))
        read.results.append(stripped(record))
        if key is not None and isinstance(key.rollout_index, int):
            first = read.first_of_task.get(key.task_index, key.rollout_index)
            read.first_of_task[key.task_index] = min(first, key.rollout_index)
    return read


def _find_unwanted(read: _Results, path: Path, inputs: Path, where: RolloutFilter) -> None:
    """Note which rollouts there are, and for which of them, together with their rows, `where` does not hold."""
    rows, number_of = RecordIndex([inputs]), dict[RolloutKey, int]()
    for key, line, row in records(inputs, "raise", may_lack_key=True):
        if key is not None:
            number_of.setdefault(key, len(rows))
            rows.add(key, line, row)
    with RecordReader(rows) as reader:
        for key, _, record in records(path, "raise", may_lack_key=True):
            if key is not None and read.keys.add(key):
                number = number_of.get(key)
                if not where.holds(record, None if number is None else reader.record(number)):
                    read.unwanted.add(key)


def _read_rows(path: Path, read: _Results, where: RolloutFilter | None) -> list[Row]:
    """The rows that are wanted; only those shown as a task's sample in full.

    Of a rollout that is not there, its row decides whether it is wanted.
    """
    rows = []
    for key, _, row in records(path, "raise", may_lack_key=True):
        if where is not None and key is not None:
            is_wanted = key not in read.unwanted if key in read.keys else where.holds(row)
            if not is_wanted:
                continue
        task, rollout = row.get(TASK_INDEX_KEY_NAME), row.get(ROLLOUT_INDEX_KEY_NAME)
        is_sample = isinstance(task, int) and read.first_of_task.get(task) == rollout
        rows.append(row if is_sample else _slim(row))
    if where is not None:
        where.require_met()
    return rows


def _slim(row: Row) -> Row:
    kept = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, AGENT_REF_KEY_NAME)
    return {key: row[key] for key in kept if key in row}


def _failures(path: Path) -> list[Failures]:
    """The failures in a sidecar, by class; none when there is no sidecar."""
    attempts: dict[str, int] = {}
    rollouts: dict[str, set[RolloutKey]] = {}
    for key, _, record in records(path, "skip", may_lack_key=True):
        name = shown(record.get(NG_FAILURE_CLASS_KEY) or _NO_CLASS, _CLASS_LENGTH)
        attempts[name] = attempts.get(name, 0) + 1
        if key is not None:
            rollouts.setdefault(name, set()).add(key)
    return [Failures(name, count, len(rollouts.get(name, ()))) for name, count in attempts.items()]


def _selection_path(config: RewardProfileConfig, rollouts: Path) -> Path:
    if config.select_output_jsonl_fpath is None:
        return rollouts.with_name(f"{rollouts.stem}_selected.jsonl")
    return Path(config.select_output_jsonl_fpath).expanduser()


def _write_selection(path: Path, groups: list[dict[str, Any]]) -> None:
    """One input row per task; its task index stays, so that a later run can be compared task by task."""
    make_folder(path.parent)
    with write_aside(path) as file:
        for group in groups:
            file.write(to_line({**group["sample"], TASK_INDEX_KEY_NAME: group[TASK_INDEX_KEY_NAME]}))
