"""`ng_compare`: whether one run is better than another, with a gate for CI."""

import shlex
import sys
from pathlib import Path

from nemo_gym.compare import comparison as comparing
from nemo_gym.compare.comparison import Comparison
from nemo_gym.compare.gate import Verdict, exit_code, judge, parse_condition
from nemo_gym.compare.options import CompareConfig
from nemo_gym.compare.report import as_csv, as_junit, as_markdown, headlines, notes, render_page, sections, to_json_text
from nemo_gym.paths import write_aside
from nemo_gym.terminal import print_line, print_table


def compare(config: CompareConfig) -> None:
    """`ng_compare`."""
    conditions = [] if config.fail_if is None else [parse_condition(config.fail_if)]
    comparison = comparing.compare(config)
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
