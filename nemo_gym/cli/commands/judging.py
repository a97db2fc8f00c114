"""Judging runs, with a gate for CI: `ng_check_rollouts` says what is odd about one, `ng_compare` whether one is better.

Both name examples, with the command that shows them.
"""

import glob
import shlex
import sys
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.collect.health import MEANINGS, Check, Finding, HealthScan, Place
from nemo_gym.compare import CompareConfig
from nemo_gym.compare.comparison import Comparison, compare_runs
from nemo_gym.compare.gate import Number, Verdict, exit_code, judge, judge_numbers, parse_condition
from nemo_gym.compare.report import as_csv, as_junit, as_markdown, headlines, notes, render_page, sections, to_json_text
from nemo_gym.errors import ConfigPathNotFoundError
from nemo_gym.paths import refuse_odd_file, write_aside
from nemo_gym.runs.facts import RolloutFilter
from nemo_gym.runs.files import BESIDE_ROLLOUTS, require_rollouts
from nemo_gym.schemas.cli_config import CheckRolloutsConfig
from nemo_gym.terminal import harmless_json, new_table, print_line, print_table


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


def compare(config: CompareConfig) -> None:
    """`ng_compare`."""
    conditions = [] if config.fail_if is None else [parse_condition(config.fail_if)]
    for option, given in [*(("output", each) for each in config.output), ("junit", config.junit)]:
        if given is not None:
            refuse_odd_file(Path(given), option)
    comparison = compare_runs(config)
    verdicts = judge(comparison, conditions)
    _write_files(config, comparison, verdicts)
    if config.json_format:
        print(to_json_text(comparison, verdicts))
    else:
        _print_comparison(config, comparison, verdicts)
    code = exit_code(verdicts, config.on_undecided)
    if code:
        sys.exit(code)


def _write_files(config: CompareConfig, comparison: Comparison, verdicts: list[Verdict]) -> None:
    texts = {
        ".html": lambda: render_page(comparison, verdicts),
        ".md": lambda: as_markdown(comparison, verdicts),
        ".json": lambda: to_json_text(comparison, verdicts) + "\n",
        ".csv": lambda: as_csv(comparison),
    }
    for given in config.output:
        with write_aside(Path(given)) as file:
            file.write(texts[Path(given).suffix.lower()]().encode("utf-8", "replace"))
    if config.junit is not None:
        with write_aside(Path(config.junit)) as file:
            file.write(as_junit(comparison, verdicts))


def _print_comparison(config: CompareConfig, comparison: Comparison, verdicts: list[Verdict]) -> None:
    for line in headlines(comparison):
        print_line(line)
    for title, table in sections(comparison):
        print_line(f"\n{title}")
        print_table(table)
    if any(comparison.flips.values()):
        paths = ",".join(str(path) for run in comparison.runs for path in run.paths)
        print_line(f"Read them side by side: {shlex.join(['ng_view', f'+path=[{paths}]'])}")
    listed = notes(comparison)
    if listed:
        print_line("")
    for note in listed:
        print_line(f"Note: {note}")
    for verdict in verdicts:
        print_line(f"Gate: {verdict.line}")
    for path in [*config.output, *([config.junit] if config.junit else [])]:
        print_line(f"Written: {path}")
