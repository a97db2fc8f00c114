"""Pictures of the three main pages, light and dark, for docs/viewing.md: `make screenshots`.

They show a run of a bundled environment with the scripted model, which is collected for them.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from nemo_gym.paths import PARENT_DIR
from tests.view.demo import Demo, overloaded, servers, viewer

TARGET = PARENT_DIR / "docs" / "images"
LARGEST = 150_000
WIDTH = 1200
HEIGHTS = {"runs": 440, "run": 800, "rollout": 800}
SETTLE_MS = 1_000
FAULTS = [overloaded(probability=0.04)]


def main() -> str | None:
    """Make them all; what went wrong."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return "there is no `chromium` on PATH: install it first"
    from playwright.sync_api import sync_playwright

    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), 0.05, FAULTS) as demo:
        collect(demo)
        with viewer(Path("results"), demo.folder) as url, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                for name, place in places(url).items():
                    size = {"width": WIDTH, "height": HEIGHTS[name]}
                    context = browser.new_context(viewport=size, color_scheme=scheme)
                    save(context, url, place, TARGET / f"view-{name}-{scheme}.png")
            browser.close()
    too_large = [path.name for path in sorted(TARGET.glob("view-*.png")) if path.stat().st_size > LARGEST]
    return f"more than {LARGEST} bytes: {', '.join(too_large)}" if too_large else None


def collect(demo: Demo) -> None:
    for name, tasks, repeats in (("first-look", 10, 2), ("two-repeats", 30, 2), ("synonyms", 60, 8)):
        demo.collect(name, tasks, repeats, "+max_attempts=2").wait()


def places(url: str) -> dict[str, str]:
    """Where the three pages are."""
    run = next(run for run in ask(url, "/api/runs")["runs"] if run["folder"] == "synonyms")
    row = ask(url, f"/api/runs/{run['id']}/rollouts?limit=1&where=reward==1%20and%20tool_calls>3")["rows"][0]
    return {"runs": "#/", "run": f"#/runs/{run['id']}", "rollout": f"#/rollouts/{run['id']}/{row['id']}"}


def ask(url: str, path: str) -> Any:
    root, token = url.split("?token=")
    request = Request(root.rstrip("/") + path.replace(">", "%3E"), headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def save(context: Any, url: str, place: str, path: Path) -> None:
    page = context.new_page()
    page.goto(url)
    page.goto(url.split("?")[0] + place)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    sys.exit(main())
