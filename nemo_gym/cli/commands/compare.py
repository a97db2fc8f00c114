"""`ng_compare`: whether one run is better than another, with a gate for CI."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.compare.options import CompareConfig
from nemo_gym.terminal import print_line

if TYPE_CHECKING:
    from nemo_gym.compare.comparison import Comparison
    from nemo_gym.compare.gate import Verdict


@command(CompareConfig, reads_config=False)
def main(config: CompareConfig) -> None:
    """Compare runs task by task: by how much a run is better than the first, and how sure that is.

    Tasks are matched by what was asked. Failed rollouts are left out, and counted as 0 besides. With fail_if the exit
    code is 1 if the condition applies, 0 if it does not, and 3 if this much data cannot decide it.

    Examples:
        ng_compare '+runs=[results/base.jsonl,results/new.jsonl]'
        ng_compare '+runs={base: results/base.jsonl, new: results/new/*.jsonl}' '+where=level == "hard"' +by=topic
        ng_compare '+runs=[a.jsonl,b.jsonl]' '+fail_if=delta < -0.01' +junit=gate.xml +output=compare.md
    """
    from nemo_gym.compare.comparison import compare
    from nemo_gym.compare.gate import exit_code, judge, parse_condition

    conditions = [] if config.fail_if is None else [parse_condition(config.fail_if)]
    comparison = compare(config)
    verdicts = judge(comparison, conditions)
    _write_files(config, comparison, verdicts)
    if config.json_format:
        from nemo_gym.compare.report import to_json_text

        print(to_json_text(comparison, verdicts))
    else:
        _print(config, comparison, verdicts)
    code = exit_code(verdicts, config.on_undecided)
    if code:
        sys.exit(code)


def _write_files(config: CompareConfig, comparison: "Comparison", verdicts: "list[Verdict]") -> None:
    from nemo_gym.compare.report import as_csv, as_junit, as_markdown, render_page, to_json_text
    from nemo_gym.paths import write_aside

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


def _print(config: CompareConfig, comparison: "Comparison", verdicts: "list[Verdict]") -> None:
    from nemo_gym.compare.report import headlines, notes, sections
    from nemo_gym.terminal import print_table

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
