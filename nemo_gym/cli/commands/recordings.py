"""`ng_recordings`: what is in a recording of model calls, whether it is sound, and dropping what is of no use."""

import json
from datetime import UTC, datetime
from pathlib import Path

from nemo_gym.errors import ConfigError
from nemo_gym.recording.files import call_files
from nemo_gym.recording.upkeep import Inventory, calls_of_rollout, prune, take_inventory
from nemo_gym.schemas.cli_config import RecordingsConfig
from nemo_gym.terminal import harmless_json, new_table, print_table, shown


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
