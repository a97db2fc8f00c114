"""Looking at runs: `ng_status` (servers, runs), `ng_attach` (the living line of one), `ng_control` (steering it).

`ng_view` shows runs, rollouts and conversations in a browser, or as one file to send.
"""

import json
import os
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nemo_gym.collect.line import COLLECTING, Snapshot, view_for
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, GymError
from nemo_gym.runs.files import Kind, RolloutPaths, refuse_to_replace, require_rollouts
from nemo_gym.runs.lock import is_being_written
from nemo_gym.runs.manifest import read_manifest
from nemo_gym.runs.sockets import LivingRun, Request, ask, find_run, living_runs
from nemo_gym.schemas.cli_config import AttachConfig, ControlConfig, StatusConfig, ViewConfig
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table, shown

if TYPE_CHECKING:
    from nemo_gym.view.library import Library
    from nemo_gym.view.runs import Run

_ASK_EVERY_S = 0.5
_PATIENCE_S = 60.0
_ANSWERS_WITHIN_S = 60.0
_AGENTS_SHOWN = 3
_DEFAULT_FOLDER = "results"


def status(config: StatusConfig) -> None:
    """`ng_status`."""
    from nemo_gym.server_status import StatusCommand  # with aiohttp, which asking a run does not need

    servers_status = StatusCommand()
    servers = servers_status.discover_servers()
    if config.json_format:
        listed = [server.model_dump(mode="json") for server in servers]
        listing = {"servers": listed, "runs": [run.status for run in living_runs()]} if config.runs else listed
        print(json.dumps(listing, indent=2))
        return
    servers_status.display_status(servers)
    runs = living_runs()
    if runs:
        print_runs(runs)


def attach(config: AttachConfig) -> int:
    """`ng_attach`."""
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
    manifest = read_manifest(paths.manifest)
    counts = {} if manifest is None else manifest.counts
    if "expected" not in counts:
        print(f"The run has ended: {paths.rollouts}")
        return 0
    print(f"The run has ended: {counts['success']} of {counts['expected']} rollouts are in {paths.rollouts}")
    return 1 if counts["missing"] else 0


def control(config: ControlConfig) -> None:
    """`ng_control`."""
    address = find_run(config.run)
    answers = {str(request["do"]): ask(address, request, _ANSWERS_WITHIN_S) for request in _requests(config)}
    if config.json_format:
        print(harmless_json(json.dumps(answers)))
        return
    for what, answer in answers.items():
        _show(what, answer, address)


def _requests(config: ControlConfig) -> Iterator[Request]:
    """What is asked for, in an order in which it makes sense; how the run stands, when it is nothing."""
    asked = False
    for is_wanted, request in (
        (config.values is not None, {"do": "set", "values": config.values}),
        (config.pause, {"do": "pause"}),
        (config.cancel is not None, {"do": "cancel", "rollout": config.cancel}),
        (config.retry is not None, {"do": "retry", "what": config.retry}),
        (config.resume, {"do": "resume"}),
        (config.stop, {"do": "stop"}),
        (config.in_flight, {"do": "in_flight"}),
    ):
        if is_wanted:
            asked = True
            yield request
    if not asked:
        yield {"do": "status"}


def _show(what: str, answer: dict[str, Any], address: Path) -> None:
    if what == "status":
        print_runs([LivingRun(address, answer)])
    elif what == "in_flight":
        _show_in_flight(answer)
    elif what == "set":
        print_line("Set: " + ", ".join(f"{name}={json.dumps(value)}" for name, value in answer["set"].items()))
    elif what in ("pause", "resume"):
        already = "" if answer["changed"] else " already"
        print_line(f"The run is {answer['state']}{already}; {answer['in_flight']} rollouts are in flight")
    elif what == "stop":
        grace = "are let go" if answer["at_once"] else "have ten seconds; a second +stop=true ends it at once"
        print_line(f"The run stops; the {answer['in_flight']} rollouts in flight {grace}")
    elif what == "cancel":
        print_line(f"Cancelled: {', '.join(answer['cancelled'])}")
    else:
        print_line(f"To be tried again: {answer['retried']} rollouts")


def _doing(rollout: dict[str, Any]) -> str:
    """What its agent says: the call under way, and how many came before."""
    call, calls = rollout.get("call"), rollout.get("calls")
    before = "" if not calls else f"after {calls} {'call' if calls == 1 else 'calls'}"
    if not isinstance(call, dict):
        return before
    under_way = f"{shown(str(call.get('server')))}{shown(str(call.get('path')))} for {float(call['for_s']):.0f} s"
    return f"{under_way}, {before}" if before else under_way


def _show_in_flight(answer: dict[str, Any]) -> None:
    table = new_table("rollout", "agent", "attempt", "since", "for", "doing")
    for each in answer["in_flight"]:
        took = f"{each['for_s']:.0f} s"
        table.add_row(each["rollout"], each["agent"], each["attempt"], each["since"], took, _doing(each))
    print_table(table)
    more = f", {answer['left_out']} of them not listed" if answer["left_out"] else ""
    print_line(f"{len(answer['in_flight']) + answer['left_out']} rollouts in flight{more}")


def print_runs(runs: Sequence[LivingRun]) -> None:
    """Print a table of runs, and how many there are."""
    table = new_table("run", "id", "state", "done", "in flight", "failed", "rate", "time left", "score", "cost")
    has_cost = any(run.status.get("cost_usd") is not None for run in runs)
    if not has_cost:
        table = new_table(*table.columns[:-1])
    for run in runs:
        table.add_row(*(_cells(run) if has_cost else _cells(run)[:-1]))
    print_table(table)
    print_line(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} going on")


def _cells(run: LivingRun) -> list[object]:
    status = run.status
    total, eta_s, cost = status.get("total"), status.get("eta_s"), status.get("cost_usd")
    return [
        shown(str(run.output)),
        run.id,
        status.get("state"),
        f"{status.get('done')}{'' if total is None else f'/{total}'}",
        status.get("in_flight"),
        status.get("failed"),
        f"{60 * float(status.get('rate_per_s') or 0):.1f}/min",
        "?" if eta_s is None else _duration(float(eta_s)),
        _scores(status.get("scores") or {}),
        "" if cost is None else f"${float(cost):.4g}",
    ]


def _scores(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """The mean of each agent, with its 95 % interval."""
    texts = []
    for agent, score in list(scores.items())[:_AGENTS_SHOWN]:
        if score.get("mean") is None:
            continue
        ends = score.get("ci95")
        interval = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else ""
        name = f"{shown(agent)} " if len(scores) > 1 else ""
        texts.append(f"{name}{score['mean']:.3g}{interval}")
    more = f", {len(scores) - _AGENTS_SHOWN} more" if len(scores) > _AGENTS_SHOWN else ""
    return ", ".join(texts) + more


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def view(config: ViewConfig) -> None:
    """`ng_view`."""
    from nemo_gym.view import export, library  # with numpy and SQLite, which asking a run does not need

    opened = library.Library(_roots(config), _cache_folder())
    try:
        if config.export is not None:
            target, runs = _to_export(config.export, opened)
            count = export.export_page(runs, opened.name, config.where, config.limit, target)
            _tell_export(config, target, count, len(runs))
        elif config.json_format:
            opened.read_all()
            print(json.dumps({"runs": opened.summaries()}))
        else:
            _check_runs(opened)
            _serve(config, opened)
    finally:
        opened.close()


def _roots(config: ViewConfig) -> list[Path]:
    if config.path is None:
        return [Path(_DEFAULT_FOLDER) if Path(_DEFAULT_FOLDER).is_dir() else Path()]
    given = [config.path] if isinstance(config.path, str) else config.path
    roots = [Path(path).expanduser() for path in given]
    for root in roots:
        if not root.exists():
            raise ConfigPathNotFoundError(f"+path={root} does not exist (looked in {Path.cwd()})")
        if root.is_file():
            require_rollouts(root, "path")
    return roots


def _cache_folder() -> Path:
    """Where indexes are kept: `XDG_CACHE_HOME`, else ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given and Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo_gym" / "view"


def _check_runs(library: "Library") -> None:
    if not library.find():
        print(f"There is no run in {library.name} yet; those that begin there will appear.", file=sys.stderr)


def _to_export(path: str, library: "Library") -> "tuple[Path, list[Run]]":
    """Where a page goes, and what is on it."""
    target = Path(path).expanduser()
    refuse_to_replace(target, "export", Kind.PAGE)
    runs = library.read_all()
    if not runs:
        raise ConfigError(f"there is no run in {library.name}; name a rollouts file or a folder with +path")
    return target, runs


def _tell_export(config: ViewConfig, target: Path, rollouts: int, runs: int) -> None:
    if config.json_format:
        print(json.dumps({"export": str(target), "rollouts": rollouts, "runs": runs}))
    else:
        print(f"{rollouts} rollouts of {runs} {'run' if runs == 1 else 'runs'} are in {target}")


def _serve(config: ViewConfig, library: "Library") -> None:
    from nemo_gym.view.api import is_loopback, serve  # with FastAPI, which a page for a file does not need

    def started(address: str) -> None:
        address += fragment
        print(f"Runs in {library.name}: {address}", flush=True)
        if not is_loopback(config.host):
            print("Whoever has this address can read these runs.", file=sys.stderr)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if _is_to_open(config):
            _open(address)

    fragment = _fragment(config.where, library)
    try:
        serve(library, config.host, config.port, started)
    except OSError as error:
        raise ConfigError(f"cannot listen on +host={config.host} +port={config.port}: {error.strerror}") from error


def _fragment(where: str | None, library: "Library") -> str:
    """What leads from the first page to the rollouts that a condition is about.

    Raises:
        ConfigError: it is not an expression, or it is not clear which run is meant.
    """
    if where is None:
        return ""
    runs = library.read_all()
    if len(runs) != 1:
        raise ConfigError(f"+where is about the rollouts of one run, and there are {len(runs)} in {library.name}")
    runs[0].table.understand(where)
    return f"#/runs/{runs[0].id}?where={quote(where, safe='')}"


def _is_to_open(config: ViewConfig) -> bool:
    """Whether a browser is to be opened: by default on a terminal with a display."""
    if config.open is not None:
        return config.open
    has_display = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_display and sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION")


def _open(address: str) -> None:
    if not webbrowser.open(address):
        print("No browser could be opened; open the address yourself.", file=sys.stderr)
