"""What is made of runs: `ng_reward_profile` (how hard tasks are), `ng_export` (data for training), `ng_recordings`.

The last looks after recorded model calls: what is there, whether it is sound, and dropping what is of no use.
"""

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nemo_gym.errors import ConfigError
from nemo_gym.paths import require_possible_folder
from nemo_gym.recording.files import call_files
from nemo_gym.recording.upkeep import Inventory, calls_of_rollout, prune, take_inventory
from nemo_gym.runs.files import Kind, refuse_to_replace
from nemo_gym.runs.sockets import run_id
from nemo_gym.schemas.cli_config import ExportConfig, RecordingsConfig, RewardProfileConfig
from nemo_gym.terminal import harmless_json, new_table, print_table, shown

if TYPE_CHECKING:
    from nemo_gym.runs.profile import ProfileSummary

logger = logging.getLogger(__name__)

_CHOOSING = ("where", "filter", "min_reward")
_MOST = 1000
"""Rollouts on a page of rollouts; a few MB."""


def reward_profile(config: RewardProfileConfig) -> None:
    """`ng_reward_profile`."""
    from nemo_gym.runs.profile import page_of, profile_run  # with numpy, which recordings do without

    page, rollouts = config.rollouts_page, Path(config.rollouts_jsonl_fpath).expanduser()
    if page is None:
        summary = profile_run(config)
    elif is_address(page):
        summary = profile_run(config, _links(rollouts, page.partition("#")[0].partition("?")[0]))
    else:
        target = Path(page).expanduser()
        _check_target(target, page_of(rollouts))
        seen_from = os.path.relpath(target.absolute(), rollouts.absolute().parent)
        summary = profile_run(config, _links(rollouts, quote(seen_from)))
        _write_rollouts(rollouts, summary, target)
    if config.json_format:
        print(json.dumps(summary.as_json() | ({} if page is None else {"rollouts_page": page})))
    else:
        _print_summary(summary, page)


def is_address(text: str) -> bool:
    """Whether this is where a server is, and no file."""
    return text.startswith(("http://", "https://"))


def _links(rollouts: Path, page: str) -> Callable[[Any], str]:
    """Where on a page of the viewer the rollouts of a task are. The token in its address is nobody else's business."""
    run = run_id(rollouts)
    return lambda task: f"{page}#/runs/{run}?where={quote(f'task == {json.dumps(task)}', safe='')}"


def _check_target(target: Path, page_of_profile: Path) -> None:
    refuse_to_replace(target, "rollouts_page", Kind.PAGE)
    require_possible_folder(target.parent)
    if target.absolute() == page_of_profile.absolute():
        raise ConfigError(f"+rollouts_page={target} is where the profile itself goes; name another file")


def _write_rollouts(rollouts: Path, summary: "ProfileSummary", target: Path) -> None:
    """A page with the rollouts of the tasks that a profile lists."""
    from nemo_gym.view.export import export_run  # seldom wanted

    listed = ", ".join(json.dumps(task.index) for task in summary.tasks)
    export_run(rollouts, f"task in [{listed}]" if listed else None, _MOST, target)


def _print_summary(summary: "ProfileSummary", rollouts_page: str | None) -> None:
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


def export(config: ExportConfig) -> None:
    """`ng_export`."""
    from nemo_gym.runs.export import export_rollouts  # with numpy, too

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


def recordings(config: RecordingsConfig) -> int:
    """`ng_recordings`."""
    folder = Path(config.folder).expanduser()
    _refuse_contradictions(config)
    if config.rollout is not None:
        return _show_rollout(folder, config)
    pruned = _prune(folder, config) if config.prune else None
    inventory = take_inventory(folder, config.server, verify=config.check) if _is_left(folder, config) else None
    if config.json_format:
        listed = {} if inventory is None else inventory.as_json()
        print(json.dumps(listed if pruned is None else {**listed, "pruned": pruned}))
    elif inventory is not None:
        _print_inventory(inventory, is_checked=config.check)
    return 1 if inventory is not None and inventory.damage else 0


def _is_left(folder: Path, config: RecordingsConfig) -> bool:
    return not config.prune or bool(call_files(folder, config.server))


def _refuse_contradictions(config: RecordingsConfig) -> None:
    only_with_prune = {"older_than_days": config.older_than_days, "max_bytes": config.max_bytes}
    given = [f"+{name}" for name, value in only_with_prune.items() if value is not None]
    if given and not config.prune:
        raise ConfigError(f"{given[0]} says what to drop, which only +prune=true does: add it, or leave this out")
    if config.rollout is not None and (config.prune or config.check):
        raise ConfigError("+rollout lists calls; leave it out, or +check and +prune")


def _prune(folder: Path, config: RecordingsConfig) -> dict[str, object]:
    done = prune(folder, config.server, older_than_days=config.older_than_days, max_bytes=config.max_bytes)
    if not config.json_format:
        print(f"Dropped {done.dropped} calls ({done.freed_bytes:,} bytes), kept {done.kept}")
        for path in done.in_use:
            print(f"{path} is being written, so it was left as it is")
    return {**done._asdict(), "in_use": [str(path) for path in done.in_use]}


def _print_inventory(inventory: Inventory, *, is_checked: bool) -> None:
    table = new_table("server", "model", "calls", "superseded", "rollouts", "files", "bytes", "last call")
    for server in inventory.servers:
        table.add_row(
            server.server,
            server.model or "-",
            f"{server.calls:,}",
            f"{server.superseded:,}",
            f"{server.rollouts:,}",
            str(server.files),
            f"{server.bytes:,}",
            datetime.fromtimestamp(server.last_ns / 1e9, UTC).isoformat(timespec="seconds"),
        )
    print_table(table)
    if inventory.torn_bytes:
        print(f"{inventory.torn_bytes:,} bytes are of calls that were in flight when servers were killed; harmless")
    for place in inventory.damage:
        print(f"DAMAGED {place}")
    if is_checked and not inventory.damage:
        print(f"All {sum(server.calls for server in inventory.servers):,} calls are as they were written")


def _show_rollout(folder: Path, config: RecordingsConfig) -> int:
    assert config.rollout is not None
    for number, call in enumerate(calls_of_rollout(folder, config.rollout, config.server), 1):
        about = call.about
        if config.json_format:
            answer = json.loads(call.response)
            print(harmless_json(json.dumps({**about, "response": answer, "superseded": call.is_superseded})))
            continue
        again = ", recorded again later" if call.is_superseded else ""
        name = (about.get("model_ref") or {}).get("name")
        latency_ms = (about["ended_ns"] - about["started_ns"]) / 1e6
        print(f"{number}. {name} {about['dialect']}, {latency_ms:.0f} ms{again}")
        print(f"   {shown(call.response.decode(errors='replace'), 400)}")
    return 0
