"""`python -m tests.chaos`: all of it, or a part, from one seed."""

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos import (  # noqa: F401 - each adds its scenarios to the list
    answer_attacks,
    client_attacks,
    clock_faults,
    collector_faults,
    disk_faults,
    endpoint_faults,
    file_damage,
    sandbox_attacks,
    server_attacks,
    server_faults,
    storage_attacks,
)
from tests.chaos.attacks import check_attacks
from tests.chaos.hanging import check_hanging
from tests.chaos.honesty import check_honesty
from tests.chaos.lab import Lab, Shared
from tests.chaos.ledger import Tally
from tests.chaos.load import check_load
from tests.chaos.report import Report, ScenarioRow, write_docs
from tests.chaos.scenario import SCENARIOS, Scenario, SkippedError

AT_ONCE = 4
"""Most of a scenario is waiting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when every promise held."""
    given = _parsed(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a script it is ignored
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    report = Report(seed=seed, is_short=given.short)
    print(f"seed {seed} (CHAOS_SEED={seed} repeats it)", flush=True)
    started_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        _run_all(given, report, folder)
    finally:
        report.took_s = time.monotonic() - started_s
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        report.cpu_s = sum(it.ru_utime + it.ru_stime for it in used)
        if report.is_good:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"what happened is in {folder}", file=sys.stderr)
    print(report.closing_line(), flush=True)
    if given.json:
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(json.dumps(report.as_json(), indent=2) + "\n")
    if given.docs and report.is_good:
        write_docs(report)
    return 0 if report.is_good else 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the part that fits into two minutes")
    parser.add_argument("--seed", type=int, help="repeat what happened with this seed")
    parser.add_argument("--only", help="what has this word in its name")
    parser.add_argument("--json", help="write the measurements to this file")
    parser.add_argument("--docs", action="store_true", help="renew the tables in docs/reliability.md if all went well")
    return parser.parse_args(arguments)


def _run_all(given: argparse.Namespace, report: Report, folder: Path) -> None:
    chosen = [it for it in SCENARIOS if (it.is_short or not given.short) and _is_wanted(given.only, it.name)]
    report.print_head()
    shared = Shared(folder)
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda it: _run_scenario(it, report, folder, shared), chosen))
    finally:
        shared.close()
    if _is_wanted(given.only, "hanging"):
        check_hanging(folder, given.short, report.add)
    if _is_wanted(given.only, "honesty"):
        check_honesty(folder, report.seed, report.add)
    check_attacks(folder, given.short, report.add, lambda name: _is_wanted(given.only, name))
    if _is_wanted(given.only, "load") and not given.short:
        check_load(folder, report.add)


def _is_wanted(only: str | None, name: str) -> bool:
    return only is None or only in name


def _run_scenario(it: Scenario, report: Report, folder: Path, shared: Shared) -> None:
    place = folder / "".join(letter if letter.isalnum() else "_" for letter in it.name)
    lab = Lab(place, random.Random(f"{report.seed}/{it.name}"), shared)
    started_s = time.monotonic()
    row = ScenarioRow(it.name, Tally())
    try:
        row.tally = it.act(lab)
    except SkippedError as reason:
        row.skipped = str(reason)
    except Exception:  # noqa: BLE001 - one broken scenario must not hide the others
        row.tally.problems.append(traceback.format_exc())
    finally:
        lab.close()
    row.took_s = time.monotonic() - started_s
    with _PRINTING:
        report.add(row)


_PRINTING = threading.Lock()
