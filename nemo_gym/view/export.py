"""One HTML file that shows some rollouts without any server: the same pages, with answers of the API inside.

Style sheets and modules are put inline, and a policy in the file allows these and nothing else, by their hashes. The
data is text of a script element that no browser runs, in which nothing can end the element.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gym._version import __version__
from nemo_gym.errors import GymError
from nemo_gym.jsonl import to_line
from nemo_gym.metrics.charts import STYLE as CHART_STYLE
from nemo_gym.paths import make_folder, write_aside
from nemo_gym.runs.facts import FAILED, SCORED
from nemo_gym.runs.record import utc_text
from nemo_gym.runs.select import SelectError
from nemo_gym.view.answers import MOST_TASKS, fields_of_run, grid_of_rows, stats_of
from nemo_gym.view.library import Library
from nemo_gym.view.record_columns import Numbers, Rows, ranks_of, top_rows
from nemo_gym.view.rollout import rollout_answer
from nemo_gym.view.runs import Run, newest_first, outcome_is, run_details
from nemo_gym.view.table import RunTable

PAGES = Path(__file__).parent / "pages"
CHARTS_FILE = "charts.css"
"""How charts look on every page; no file of the viewer's own."""
DEFAULT_LIMIT = 200
_IMPORT = re.compile(r'^import\s*\{[^}]*\}\s*from\s*"\./([\w-]+\.js)";[ \t]*\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|let|class)\b)", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b|\bimport\s*\(|\bimport\.meta\b", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w-]+\.css)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="/static/([\w-]+\.js)"></script>')
_ESCAPED: dict[int, str] = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


class PageError(GymError):
    """The pages cannot be put into one file."""


def choose(table: RunTable, rows: Rows, limit: int) -> Rows:
    """At most `limit` of these rows that show what there is: the best, the worst, failed ones, some of the others."""
    if len(rows) <= limit:
        return rows
    quarter = max(1, limit // 4)
    scored, failed = rows[outcome_is(table, SCORED)[rows]], rows[outcome_is(table, FAILED)[rows]]
    rewards = table.column("reward")
    chosen: dict[int, None] = {}
    for descending in (True, False):
        if isinstance(rewards, Numbers):
            ranks = [ranks_of(rewards, descending), table.natural_order()]
            chosen |= dict.fromkeys(top_rows(scored, ranks, quarter).tolist())
    chosen |= dict.fromkeys(_spread(failed, quarter).tolist())
    rest = np.setdiff1d(rows, np.array(list(chosen), np.int64), assume_unique=True)
    chosen |= dict.fromkeys(_spread(rest, limit - len(chosen)).tolist())
    return np.array(sorted(list(chosen)[:limit]), np.int64)


def _spread(rows: Rows, count: int) -> Rows:
    """So many of the rows, at equal distances."""
    if count >= len(rows):
        return rows
    return rows[np.linspace(0, len(rows) - 1, max(0, count)).astype(np.int64)]


def export_page(runs: Sequence[Run], root: str, where: str | None, limit: int, target: Path) -> int:
    """Write a page with rollouts of these runs, read to their ends, and return how many it has.

    Raises:
        SelectError: the condition is not understood in any of the runs.
    """
    data, count = export_data(runs, root, where, limit)
    page = one_file(data)
    with write_aside(target) as file:
        file.write(page)
    return count


def export_run(rollouts: Path, where: str | None, limit: int, target: Path) -> int:
    """The same for the one run that is in a file, without an index of it being kept."""
    library = Library([rollouts], cache=None)
    try:
        make_folder(target.parent)
        return export_page(library.read_all(), library.name, where, limit, target)
    finally:
        library.close()


def export_data(runs: Sequence[Run], root: str, where: str | None, limit: int) -> tuple[dict[str, Any], int]:
    """What an exported file holds, and how many rollouts that are."""
    chosen = _chosen(runs, where, limit)
    data: dict[str, Any] = {
        "version": 1,
        "exported_at": utc_text(datetime.now(UTC)),
        "where": where or "",
        "limit": limit,
        "runs": {
            "root": root,
            "version": __version__,
            "exported": True,
            "runs": newest_first([run.summary() for run in runs]),
        },
        **{name: {} for name in ("run", "stats", "fields", "grid", "rollouts", "rollout")},
    }
    for run, rows in zip(runs, chosen, strict=True):
        _add_run(data, run, rows)
    return data, sum(map(len, chosen))


def _chosen(runs: Sequence[Run], where: str | None, limit: int) -> list[Rows]:
    """The rollouts of each run; a condition that some runs do not understand leaves those out."""
    matching, problem = [], None
    for run in runs:
        try:
            matching.append(run.table.matching(run.table.understand(where)))
        except SelectError as error:
            matching.append(np.empty(0, np.int64))
            problem = problem if problem is not None and problem.position > error.position else error
    if problem is not None and not any(map(len, matching)):
        raise problem
    shares = _shares([len(rows) for rows in matching], limit)
    return [choose(run.table, rows, share) for run, rows, share in zip(runs, matching, shares, strict=True)]


def _shares(counts: Sequence[int], limit: int) -> list[int]:
    """How many rollouts each run may have: equally many, and what some do not need goes to the others."""
    shares = [0] * len(counts)
    for number, place in enumerate(sorted(range(len(counts)), key=lambda place: counts[place])):
        shares[place] = min(counts[place], (limit - sum(shares)) // (len(counts) - number))
    return shares


def _add_run(data: dict[str, Any], run: Run, rows: Rows) -> None:
    table = run.table
    ordered = top_rows(rows, [table.natural_order()], len(rows))
    names = table.fields()
    shown = [table.shown(int(row), names) for row in ordered]
    data["run"][run.id] = {**run.summary(), **run_details(run)}
    data["stats"][run.id] = stats_of(run, None)
    data["fields"][run.id] = fields_of_run(table)
    data["grid"][run.id] = grid_of_rows(table, rows, MOST_TASKS, 0)
    data["rollouts"][run.id] = {
        "total": len(table),
        "matching": len(shown),
        "offset": 0,
        "limit": len(shown),
        "rows": shown,
    }
    for row in shown:
        data["rollout"][f"{run.id}/{row['id']}"] = rollout_answer(run, row["id"])


def one_file(data: dict[str, Any]) -> bytes:
    """The pages with this data inside.

    Raises:
        PageError: the pages are not written as docs/viewing.md asks.
    """
    page = (PAGES / "index.html").read_text()
    styles = "".join(
        CHART_STYLE if name == CHARTS_FILE else (PAGES / name).read_text() for name in _STYLE.findall(page)
    )
    scripts = _SCRIPT.findall(page)
    if len(scripts) != 1 or "</head>" not in page:
        raise PageError("index.html has to load one module, and to have a head")
    script = bundled(scripts[0])
    if "</style" in styles.lower() or "</script" in script.lower():
        raise PageError("a style sheet or module contains the end of its element")
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    content = to_line(data).decode().rstrip("\n").translate(_ESCAPED)
    element = f'<script type="application/json" id="export-data">{content}</script>\n'
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    page = _STYLE.sub("", page).replace("</head>", f"<style>{styles}</style>\n</head>", 1)
    page = page.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}', 1)
    before, after = page.split(_SCRIPT.search(page)[0], 1)  # type: ignore[index]
    return f'{before}{element}<script type="module">{script}</script>{after}'.encode()


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundled(entry: str) -> str:
    """A module and all that it imports, in the order in which they need each other."""
    return "\n".join(_modules(entry, []))


def _modules(name: str, done: list[str]) -> Iterator[str]:
    done.append(name)
    text = (PAGES / name).read_text()
    for needed in _IMPORT.findall(text):
        if needed not in done:
            yield from _modules(needed, done)
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    if (left := _LEFT_OVER.search(text)) is not None:
        raise PageError(f"{name}: {text[left.start() :].splitlines()[0]!r} cannot be put into one file")
    yield text
