"""Looking at rollouts: `ng_view` shows them in a browser, or as one file to send; `ng_check_rollouts` says what is odd.

The latter names examples, with the command that shows them, and has a gate for CI.
"""

import glob
import json
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from nemo_gym.collect.health import MEANINGS, Check, Finding, HealthScan, Place
from nemo_gym.compare.gate import Number, Verdict, exit_code, judge_numbers, parse_condition
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.runs.facts import RolloutFilter
from nemo_gym.runs.files import BESIDE_ROLLOUTS
from nemo_gym.runs.kinds import Kind, refuse_to_replace, require_rollouts
from nemo_gym.schemas.cli_config import CheckRolloutsConfig, ViewConfig
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table
from nemo_gym.view.export import export_page
from nemo_gym.view.library import Library

_DEFAULT_FOLDER = "results"


def view(config: ViewConfig) -> None:
    """`ng_view`."""
    roots = _roots(config)
    library = Library(roots, _cache_folder())
    try:
        if config.export is not None:
            _export(config, library)
        elif config.json_format:
            library.read_all()
            print(json.dumps({"runs": library.summaries()}))
        else:
            _check_runs(library)
            _serve(config, library)
    finally:
        library.close()


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


def _check_runs(library: Library) -> None:
    if not library.find():
        print(f"There is no run in {library.name} yet; those that begin there will appear.", file=sys.stderr)


def _export(config: ViewConfig, library: Library) -> None:
    assert config.export is not None
    target = Path(config.export).expanduser()
    refuse_to_replace(target, "export", Kind.PAGE)
    runs = library.read_all()
    if not runs:
        raise ConfigError(f"there is no run in {library.name}; name a rollouts file or a folder with +path")
    count = export_page(runs, library.name, config.where, config.limit, target)
    if config.json_format:
        print(json.dumps({"export": str(target), "rollouts": count, "runs": len(runs)}))
    else:
        print(f"{count} rollouts of {len(runs)} {'run' if len(runs) == 1 else 'runs'} are in {target}")


def _serve(config: ViewConfig, library: Library) -> None:
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


def _fragment(where: str | None, library: Library) -> str:
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


def check_rollouts(config: CheckRolloutsConfig) -> None:
    """`ng_check_rollouts`."""
    names = ["rollouts", "odd", *(name for check in Check for name in (str(check), f"{check}.share"))]
    conditions = [] if config.fail_if is None else [parse_condition(config.fail_if, names)]
    where = None if config.where is None else RolloutFilter(config.where)
    paths = _files_to_check(config)
    scan = HealthScan(reward_range=config.reward_range, examples=config.examples)
    for path in paths:
        scan.read(path, where)
    if where is not None:
        where.require_met()
    findings = list(scan.findings())
    called = paths[0].stem if len(paths) == 1 else f"{len(paths)} files"
    verdicts = judge_numbers(called, _numbers(scan, findings), conditions)
    if config.json_format:
        _print_json(scan, findings, verdicts)
    else:
        _print_findings(scan, findings, verdicts)
    code = exit_code(verdicts, "fail")
    if code:
        sys.exit(code)


def _files_to_check(config: CheckRolloutsConfig) -> list[Path]:
    found: list[Path] = []
    for given in [config.input] if isinstance(config.input, str) else config.input:
        path = Path(given).expanduser()
        if path.is_file():
            found.append(path)
            continue
        matching = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207
        matching = [each for each in matching if each.is_file() and not each.name.endswith(BESIDE_ROLLOUTS)]
        if not matching:
            raise ConfigPathNotFoundError(f"+input={given} does not exist (looked in {Path.cwd()})")
        found += matching
    for path in found:
        require_rollouts(path, "input")
    return list(dict.fromkeys(found))


def _numbers(scan: HealthScan, findings: list[Finding]) -> dict[str, Number]:
    numbers: dict[str, Number] = {"rollouts": float(scan.counts.rollouts), "odd": float(scan.counts.odd)}
    for finding in findings:
        numbers[finding.check] = float(finding.count)
        numbers[f"{finding.check}.share"] = finding.count / finding.of if finding.of else 0.0
    return numbers


def _as_json(place: Place) -> dict[str, Any]:
    task, repeat = place.key
    return {"file": str(place.path), "line": place.line, "task": task, "repeat": repeat}


def _print_json(scan: HealthScan, findings: list[Finding], verdicts: list[Verdict]) -> None:
    checks = {
        str(finding.check): {
            "count": finding.count,
            "of": finding.of,
            "what": finding.what,
            "examples": [_as_json(place) for place in finding.examples],
        }
        for finding in findings
    }
    gate = [{"condition": each.condition, "outcome": each.outcome.value, "values": each.values} for each in verdicts]
    told = {"rollouts": scan.counts.rollouts, "odd": scan.counts.odd, "checks": checks, "gate": gate}
    print(harmless_json(orjson.dumps(told, option=orjson.OPT_NON_STR_KEYS).decode()))


def _print_findings(scan: HealthScan, findings: list[Finding], verdicts: list[Verdict]) -> None:
    found = sorted((finding for finding in findings if finding.count), key=lambda finding: -finding.count)
    if not found:
        print_line(f"Nothing odd in {scan.counts.rollouts:,} rollouts ({len(findings)} checks)")
    else:
        table = new_table("check", "count", "of", "what it means")
        for finding in found:
            table.add_row(
                finding.check, f"{finding.count:,}", f"{finding.of:,} {finding.what}", MEANINGS[finding.check]
            )
        print_table(table)
    for finding in found:
        for place in finding.examples:
            print_line(f"{finding.check}: {place.path}, line {place.line}: {_command_to_see(place)}")
    for verdict in verdicts:
        print_line(f"Gate: {verdict.line}")


def _command_to_see(place: Place) -> str:
    """The command that shows a rollout."""
    task, repeat = place.key
    task_text = f'"{task}"' if isinstance(task, str) else str(task)
    return shlex.join(["ng_view", f"+path={place.path}", f"+where=task == {task_text} and repeat == {repeat}"])
