"""A finished run, profiled: its files in, statistics per task, a page and a selection of tasks out.

Of a result only its numbers are kept, of the rows of a task only one in full, so a profile needs far less
memory than the files it reads.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.jsonl import read_objects, to_line, write_aside
from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSE_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics.html_page import render_page
from nemo_gym.metrics.page_data import Failures, numbers_of
from nemo_gym.metrics.profile import RewardProfiler
from nemo_gym.metrics.select import select_tasks
from nemo_gym.rollouts.paths import RolloutPaths
from nemo_gym.rollouts.record import NG_FAILURE_CLASS_KEY, Result, RolloutKey, Row, key_or_none
from nemo_gym.rollouts.sidecar import readable_records
from nemo_gym.rollouts.stored import stripped
from nemo_gym.schemas.reward_profile_config import RewardProfileConfig
from nemo_gym.terminal import shown

_CLASS_LENGTH = 60
_NO_CLASS = "(none)"


@dataclass
class ProfileSummary:
    """What a profile came to."""

    completion: dict[str, Any]
    """As `RewardProfiler.profile_completion_summary` has it."""
    groups_path: Path
    agents_path: Path
    page_path: Path
    agents: list[dict[str, Any]] = field(default_factory=list)
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


def profile_run(config: RewardProfileConfig) -> ProfileSummary:
    """Profile the files that `config` names and write the results beside the rollouts.

    Raises:
        ConfigError: a file is missing or malformed, rows and results do not belong together, or the selection is
            not an expression.
    """
    inputs = _existing(config.materialized_inputs_jsonl_fpath, "materialized_inputs_jsonl_fpath")
    rollouts = _existing(config.rollouts_jsonl_fpath, "rollouts_jsonl_fpath")
    read = _read_results(rollouts)
    rows = _read_rows(inputs, read.first_of_task)
    profiler = RewardProfiler()
    try:
        groups, agents = profiler.profile_from_data(rows, read.results, config.allow_partial_rollouts)
        completion = profiler.profile_completion_summary(rows, read.results)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{rollouts} and {inputs}: {error.args[0]}") from error
    selected = None if config.select is None else select_tasks(config.select, groups)
    groups_path, agents_path = profiler.write_to_disk(groups, agents, rollouts)
    page_path = rollouts.with_name(f"{rollouts.stem}_reward_profile.html")
    failures = _failures(RolloutPaths(rollouts).failures)
    subtitle = f"{completion['completed_rollout_rows']:,} of {completion['expected_rollout_rows']:,} rollouts"
    with write_aside(page_path) as file:
        page = render_page(
            rollouts.name, f"Reward profile, {subtitle}", numbers_of(groups, read.output_items, failures)
        )
        file.write(page.encode(errors="replace"))
    summary = ProfileSummary(completion, groups_path, agents_path, page_path, agents)
    if selected is not None:
        summary.selected, summary.selected_path = len(selected), _selection_path(config, rollouts)
        _write_selection(summary.selected_path, [groups[position] for position in selected])
    return summary


def _existing(path: str, option: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigPathNotFoundError(f"+{option}={path} does not exist (looked in {Path.cwd()})")
    return found


def _read_results(path: Path) -> _Results:
    read = _Results()
    for _, record in read_objects(path, allow_torn=True):
        response = record.get(RESPONSE_KEY_NAME)
        output = response.get("output") if isinstance(response, dict) else None
        if isinstance(output, list):
            read.output_items.append(len(output))
        read.results.append(stripped(record))
        key = key_or_none(record)
        if key is not None and isinstance(key.rollout_index, int):
            first = read.first_of_task.get(key.task_index, key.rollout_index)
            read.first_of_task[key.task_index] = min(first, key.rollout_index)
    return read


def _read_rows(path: Path, first_of_task: dict[Any, int]) -> list[Row]:
    """The rows; only those shown as a task's sample in full."""
    rows = []
    for _, row in read_objects(path, allow_torn=True):
        task, rollout = row.get(TASK_INDEX_KEY_NAME), row.get(ROLLOUT_INDEX_KEY_NAME)
        is_sample = isinstance(task, int) and first_of_task.get(task) == rollout
        rows.append(row if is_sample else _slim(row))
    return rows


def _slim(row: Row) -> Row:
    kept = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, AGENT_REF_KEY_NAME)
    return {key: row[key] for key in kept if key in row}


def _failures(path: Path) -> list[Failures]:
    """The failures in a sidecar, by class; none when there is no sidecar."""
    attempts: dict[str, int] = {}
    rollouts: dict[str, set[RolloutKey]] = {}
    for record in readable_records(path):
        name = shown(record.get(NG_FAILURE_CLASS_KEY) or _NO_CLASS, _CLASS_LENGTH)
        attempts[name] = attempts.get(name, 0) + 1
        key = key_or_none(record)
        if key is not None:
            rollouts.setdefault(name, set()).add(key)
    return [Failures(name, count, len(rollouts.get(name, ()))) for name, count in attempts.items()]


def _selection_path(config: RewardProfileConfig, rollouts: Path) -> Path:
    if config.select_output_jsonl_fpath is None:
        return rollouts.with_name(f"{rollouts.stem}_selected.jsonl")
    return Path(config.select_output_jsonl_fpath).expanduser()


def _write_selection(path: Path, groups: list[dict[str, Any]]) -> None:
    """One input row per task; its task index stays, so that a later run can be compared task by task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_aside(path) as file:
        for group in groups:
            file.write(to_line({**group["sample"], TASK_INDEX_KEY_NAME: group[TASK_INDEX_KEY_NAME]}))
