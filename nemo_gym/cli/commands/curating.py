"""Tasks and examples chosen from runs: `ng_reward_profile` (how hard tasks are), `ng_export` (data for training)."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nemo_gym.errors import ConfigError
from nemo_gym.paths import require_possible_folder
from nemo_gym.runs.export import export_rollouts
from nemo_gym.runs.files import Kind, refuse_to_replace
from nemo_gym.runs.profile import ProfileSummary, page_of, profile_run
from nemo_gym.runs.sockets import run_id
from nemo_gym.schemas.cli_config import ExportConfig, RewardProfileConfig

_MOST = 1000
"""Rollouts on a page of rollouts; a few MB."""


def reward_profile(config: RewardProfileConfig) -> None:
    """`ng_reward_profile`."""
    page = config.rollouts_page
    if page is None:
        summary = profile_run(config)
    elif is_address(page):
        summary = profile_run(config, _links(config, page.partition("#")[0].partition("?")[0]))
    else:
        summary = _profile_with_rollouts(config, Path(page).expanduser())
    if config.json_format:
        print(json.dumps(summary.as_json() | ({} if page is None else {"rollouts_page": page})))
    else:
        _print_summary(summary, page)


def is_address(text: str) -> bool:
    """Whether this is where a server is, and no file."""
    return text.startswith(("http://", "https://"))


def _links(config: RewardProfileConfig, page: str) -> Callable[[Any], str]:
    """Where on a page of the viewer the rollouts of a task are. The token in its address is nobody else's business."""
    run = run_id(Path(config.rollouts_jsonl_fpath).expanduser())
    return lambda task: f"{page}#/runs/{run}?where={quote(f'task == {json.dumps(task)}', safe='')}"


def _profile_with_rollouts(config: RewardProfileConfig, target: Path) -> ProfileSummary:
    """The profile, and a page with the rollouts of the tasks that it lists."""
    from nemo_gym.view.export import export_run  # seldom wanted

    refuse_to_replace(target, "rollouts_page", Kind.PAGE)
    require_possible_folder(target.parent)
    rollouts = Path(config.rollouts_jsonl_fpath).expanduser()
    if target.absolute() == page_of(rollouts).absolute():
        raise ConfigError(f"+rollouts_page={target} is where the profile itself goes; name another file")
    seen_from = os.path.relpath(target.absolute(), rollouts.absolute().parent)
    summary = profile_run(config, _links(config, quote(seen_from)))
    listed = ", ".join(json.dumps(task.index) for task in summary.tasks)
    export_run(rollouts, f"task in [{listed}]" if listed else None, _MOST, target)
    return summary


def _print_summary(summary: ProfileSummary, rollouts_page: str | None) -> None:
    counts = summary.completion
    print(
        f"Rollouts: {counts['completed_rollout_rows']} of {counts['expected_rollout_rows']} "
        f"({counts['reward_profile_completion_pct']:.2f} %)"
    )
    print(
        f"Input rows: {counts['total_input_rows']}, of them {counts['complete_input_rows']} complete, "
        f"{counts['partial_input_rows']} partial, {counts['missing_input_rows']} dropped"
    )
    print(f"Profile of each task: {summary.groups_path}")
    print(f"Metrics of each agent: {summary.agents_path}")
    print(f"Page: {summary.page_path}")
    if rollouts_page is not None:
        print(f"Rollouts of its tasks: {rollouts_page}")
    if summary.selected_path is not None:
        print(f"Selected: {summary.selected} tasks, in {summary.selected_path}")


logger = logging.getLogger(__name__)
_CHOOSING = ("where", "filter", "min_reward")


def export(config: ExportConfig) -> None:
    """`ng_export`."""
    summary = export_rollouts(config)
    if config.push_to_hub is not None:
        from nemo_gym.data.hub import Hub, push_file  # with OmegaConf

        summary.pushed_to = push_file(Hub(token=config.hf_token), config.push_to_hub, summary.path, config.hub_split)
    if not summary.examples:
        asked = {f"+{name}={getattr(config, name)}" for name in _CHOOSING if getattr(config, name) is not None}
        why = f"nothing passed {' and '.join(sorted(asked))}" if asked else "there was nothing to export"
        logger.warning("%s: %s is empty", why, summary.path)
    if config.json_format:
        print(json.dumps(summary.as_json()))
        return
    if config.format == "dataset":
        print(f"{summary.tasks} tasks are in {summary.path}")
    else:
        print(f"{summary.examples} examples of {summary.tasks} tasks are in {summary.path}")
    for reason, count in summary.left_out.most_common():
        print(f"Left out: {count} rollouts ({reason})")
    for note, count in summary.notes.most_common():
        print(f"Changed: {count} rollouts ({note})")
    if summary.pushed_to is not None:
        print(f"Uploaded: {summary.pushed_to}")
