"""What the tests in a browser do over and over: watch a page, ask the API from it, go to a run."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

WAIT_MS = 60_000
UNNAMED = """
[...document.querySelectorAll('input, select, button, a')]
  .filter((node) => !(node.labels && node.labels.length) && !node.getAttribute('aria-label'))
  .filter((node) => !node.textContent.trim())
  .map((node) => node.outerHTML)
"""
"""Controls that a screen reader has no name for."""


def watched(context: Any) -> Any:
    """A new page that notes its errors and whom it asks."""
    context.set_default_timeout(WAIT_MS)
    opened = context.new_page()
    opened.problems, opened.asked = [], set()
    opened.on("console", lambda message: opened.problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("request", lambda request: opened.asked.add(urlsplit(request.url).netloc or urlsplit(request.url).scheme))
    return opened


def assert_quiet(opened: Any, host: str, *expected: str) -> None:
    problems = [text for text in opened.problems if not any(each in text for each in expected)]
    assert problems == []
    assert opened.asked <= {host, "data", "blob"}


def address(url: str) -> str:
    return f"http://{urlsplit(url).netloc}/"


def ask(page: Any, path: str) -> Any:
    return page.evaluate("(path) => fetch(path).then((answer) => answer.json())", path)


def run_called(page: Any, name: str) -> dict[str, Any]:
    runs: list[dict[str, Any]] = ask(page, "/api/runs")["runs"]
    return next(run for run in runs if run["folder"] == name)


def open_run(page: Any, name: str, **parameters: str) -> dict[str, Any]:
    run = run_called(page, name)
    page.goto(f"{page.url.split('#')[0]}#/runs/{run['id']}?{urlencode(parameters)}")
    page.locator("h1", has_text=f"{name}/rollouts").wait_for()
    return run


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
