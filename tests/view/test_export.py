import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.view import export
from nemo_gym.view.export import PageError, bundled, choose
from nemo_gym.view.table import RunTable
from tests.view.files import failure, rollout, said, write_run

main = command_named("view")


SCRIPT = "</script><script>window.pwned=1</script><!-- \u2028"


def exported(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    target = folder / "report.html"
    main.run([f"+path={folder}", f"+export={target}", *options])
    page = target.read_text()
    (data,) = re.findall(r'<script type="application/json" id="export-data">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(data)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def many(folder: Path, name: str = "rollouts") -> RolloutPaths:
    records = [
        rollout(task, repeat, task / 100, said(SCRIPT), level=SCRIPT) for task in range(100) for repeat in range(3)
    ]
    return write_run(folder, records, [failure(200 + task, 0) for task in range(80)], name)


def test_one_file_holds_answers_of_the_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many(tmp_path)
    page, data = exported(tmp_path)
    assert capsys.readouterr().out == f"200 rollouts of 1 run are in {tmp_path / 'report.html'}\n"

    (run,) = data["runs"]["runs"]
    assert (data["version"], data["runs"]["exported"], data["where"], data["limit"]) == (1, True, "", 200)
    rows = data["rollouts"][run["id"]]["rows"]
    assert len(rows) == len(data["rollout"]) == 200
    assert {row["outcome"] for row in rows} == {"scored", "failed"}
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    assert rewards.count(0.99) == rewards.count(0.0) == 3
    assert sum(row["outcome"] == "failed" for row in rows) >= 50
    assert rows[0]["fields"] == {"level": SCRIPT}
    assert data["stats"][run["id"]]["matching"] == 380
    assert sum(len(task["cells"]) for task in data["grid"][run["id"]]["tasks"]) == 200
    shown = data["rollout"][f"{run['id']}/{rows[0]['id']}"]
    assert shown["record"]["response"]["output"][0]["content"][0]["text"] == SCRIPT
    assert data["run"][run["id"]]["files"]
    assert any(field["name"] == "level" for field in data["fields"][run["id"]]["fields"])
    assert "pwned=1</script>" not in page
    assert "\u2028" not in page


def test_a_policy_allows_what_is_inside_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path, [rollout(0, 0)])
    page, _ = exported(tmp_path)

    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(r'(?:src|href)="(?!data:|#)', page.replace(script, ""))
    assert page.index("http-equiv") < page.index("<style>")
    assert page.index("export-data") < page.index('<script type="module">')
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_a_condition_and_a_limit_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many(tmp_path)
    write_run(tmp_path, [rollout(0, 0, 0.5)], name="other")
    _, data = exported(tmp_path, "+where=reward >= 0.5 and level != null", "+limit=20", "+json=true")
    assert json.loads(capsys.readouterr().out) == {"export": str(tmp_path / "report.html"), "rollouts": 20, "runs": 2}
    rewards = [row["reward"] for answer in data["rollouts"].values() for row in answer["rows"]]
    assert (len(rewards), min(rewards), max(rewards)) == (20, 0.5, 0.99)
    _, data = exported(tmp_path, "+limit=11")
    assert sorted(len(answer["rows"]) for answer in data["rollouts"].values()) == [1, 10]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 50, 379, 380, 500])
def test_never_more_than_the_limit(tmp_path: Path, limit: int) -> None:
    table = RunTable(many(tmp_path), None)
    table.refresh()
    rows = choose(table, table.matching(None), limit).tolist()
    assert len(rows) == len(set(rows)) == min(limit, 380)


def test_modules_that_cannot_be_put_into_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGES", tmp_path)
    (tmp_path / "a.js").write_text('import { b,\n  c } from "./b.js";\nconst a = b;\n')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";\nexport const b = 1;\nexport async function c() {}\n')
    assert bundled("a.js") == "const b = 1;\nasync function c() {}\n\nconst a = b;\n"
    for line in ('import * as x from "./b.js";', "export default 1;", 'await import("./b.js");', "export { b };"):
        (tmp_path / "a.js").write_text(f"{line}\n")
        with pytest.raises(PageError, match="cannot be put into one file"):
            bundled("a.js")
