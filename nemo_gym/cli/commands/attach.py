"""`ng_attach`: the living line of a run that goes on elsewhere."""

import sys
import time
from pathlib import Path

from nemo_gym.cli.command import command
from nemo_gym.collect.line import COLLECTING, Snapshot, view_for
from nemo_gym.errors import GymError
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.lock import is_being_written
from nemo_gym.runs.sockets import ask, find_run
from nemo_gym.schemas.cli_config import AttachConfig

_ASK_EVERY_S = 0.5
_PATIENCE_S = 60.0


@command(AttachConfig, reads_config=False)
def main(config: AttachConfig) -> int:
    """Show how a run is doing that goes on in another terminal or in none, as its own terminal would.

    Ctrl-C ends the showing, never the run. Ends with the run: with 0 when every rollout is there, else with 1.

    Examples:
        ng_attach
        ng_attach +run=results/rollouts.jsonl
    """
    address = find_run(config.run)
    output = Path(str(ask(address, {"do": "status"})["output"]))
    try:
        _show_until_gone(address)
        while is_being_written(RolloutPaths(output)):
            time.sleep(_ASK_EVERY_S)
    except KeyboardInterrupt:
        print(f"\nThe run goes on; ng_attach +run={output} shows it again.", file=sys.stderr)
        return 0
    return _tell_end(RolloutPaths(output))


def _show_until_gone(address: Path) -> None:
    """Show the line as long as there is one; a collector that is too busy to answer is asked again."""
    snapshot = _snapshot(address)
    view = view_for(sys.stderr, snapshot)
    began_s = heard_s = shown_s = time.monotonic()
    view.show(snapshot)
    try:
        while True:
            time.sleep(_ASK_EVERY_S)
            now_s = time.monotonic()
            try:
                snapshot = _snapshot(address)
                heard_s = now_s
            except GymError:
                if not address.exists() or now_s - heard_s > _PATIENCE_S:
                    return
                continue
            if now_s - shown_s >= view.pause_s(now_s - began_s):
                view.show(snapshot)
                shown_s = now_s
    finally:
        view.close(snapshot)


def _snapshot(address: Path) -> Snapshot:
    line = ask(address, {"do": "line"})
    return Snapshot(int(line["done"]), line["total"], str(line["tail"]), str(line.get("title", COLLECTING)))


def _tell_end(paths: RolloutPaths) -> int:
    from nemo_gym.runs.manifest import read_manifest  # not for a help page

    manifest = read_manifest(paths.manifest)
    counts = {} if manifest is None else manifest.counts
    if "expected" not in counts:
        print(f"The run has ended: {paths.rollouts}")
        return 0
    print(f"The run has ended: {counts['success']} of {counts['expected']} rollouts are in {paths.rollouts}")
    return 1 if counts["missing"] else 0
