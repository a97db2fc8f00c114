import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import pytest

from nemo_gym.cli.command import command_named
from nemo_gym.runs.lock import RunLock
from nemo_gym.runs.manifest import Expected, RunManifest, write_manifest
from tests.view.files import failure, lines, rollout, said, write_run

main = command_named("view")


PATIENCE_S = 60
SCRIPT = "</script><script>window.pwned=1</script>"
CALL = {"type": "function_call", "name": "search", "call_id": "1", "arguments": '{"q": "x"}'}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Viewer:
    """A running `ng_view`."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        found = re.search(r"http://([\d.]+):(\d+)/\?token=([\w-]+)(\S*)", address)
        assert found is not None, address
        self.host, self.port, self.token, self.fragment = found[1], int(found[2]), found[3], found[4]

    def connection(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S))

    @property
    def known(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def ask(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> "Answer":
        with self.connection() as connection:
            connection.request(method, path, headers=self.known if headers is None else headers)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())

    def get(self, path: str, status: int = 200, **parameters: Any) -> Any:
        given = urlencode({name: value for name, value in parameters.items() if value is not None})
        response = self.ask(f"{path}?{given}" if given else path)
        assert response.status == status, response.body
        return json.loads(response.body)

    def run_id(self, name: str) -> str:
        (found,) = [run["id"] for run in self.get("/api/runs")["runs"] if run["name"] == name]
        return str(found)

    def events(self, path: str, count: int) -> list[tuple[str, Any]]:
        """So many server-sent events."""
        found: list[tuple[str, Any]] = []
        name = ""
        with self.connection() as connection:
            connection.request("GET", path, headers=self.known)
            with connection.getresponse() as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                while len(found) < count:
                    line = response.readline().decode()
                    assert line, found
                    if line.startswith("event: "):
                        name = line[7:].strip()
                    elif line.startswith("data: "):
                        found.append((name, json.loads(line[6:])))
        return found


_PROGRAM = "from nemo_gym.cli.command import command_named; command_named('view')()"


@contextlib.contextmanager
def viewing(path: Path, cache: Path, *options: str) -> Iterator[Viewer]:
    command = [sys.executable, "-c", _PROGRAM, f"+path={path}", *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "DISPLAY": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield Viewer(process, process.stdout.readline())
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert "Traceback" not in errors, errors
    assert process.returncode in (0, 130), errors


def hostile() -> list[Any]:
    deep = b"[" * 100_000 + b"]" * 100_000
    evil: dict[str, Any] = rollout(5, 0, 0.5, said(SCRIPT), **{SCRIPT: SCRIPT, "label": SCRIPT})
    evil["agent_ref"] = {"name": SCRIPT}
    return [
        evil,
        rollout(6, 0, 1.0, {"type": "unknown thing", "x": [None]}, {"type": 7}, said("\ud83d half")),
        b'{"_ng_task_index": 7, "_ng_rollout_index": 0, "reward": NaN, "x": [Infinity, -Infinity], "response": 5}',
        b'{"_ng_task_index": 8, "_ng_rollout_index": 0, "reward": 1, "deep": ' + deep + b"}",
        rollout(9, 0, 0.0, said("y" * 3_000_000), image="data:image/png;base64," + "A" * 200_000),
        b"{not json",
        b'["an array"]',
        b"\xff\xfe\x00",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    math = [
        rollout(
            task, repeat, float((task + repeat) % 2), CALL, said(f"Answer {task}"), level=["easy", "hard"][task % 2]
        )
        for task in range(10)
        for repeat in range(4)
        if (task, repeat) != (9, 3)
    ]
    math[3]["_ng_timing"] = {
        "started_at": "2026-01-01T00:00:00Z",
        "duration_s": 2.0,
        "calls": [
            {"server": "policy", "path": "/v1/responses", "start_s": 0, "duration_s": 1.5},
            {"path": "/verify"},
            5,
        ],
    }
    paths = write_run(folder / "math", math, [failure(9, 3, "connect"), failure(9, 3), failure(0, 0, "rate_limited")])
    agents = {"agent_a": Expected(tasks=10, rollouts=40)}
    manifest = RunManifest(agents=agents, options={"num_repeats": 4}, started_at="2026-01-01T00:00:00.000Z")
    write_manifest(manifest, paths.manifest)
    write_run(folder, hostile(), name="hostile")
    return folder


@pytest.fixture(scope="module")
def viewer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    before = state_of(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    with viewing(folder, tmp_path_factory.mktemp("cache")) as viewer:
        yield viewer
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    assert state_of(folder) == before


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """What is in a folder, and when it was changed."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_runs(viewer: Viewer) -> None:
    answer = viewer.get("/api/runs")
    assert [run["path"] for run in answer["runs"]] == ["math/rollouts.jsonl", "hostile.jsonl"]
    math = answer["runs"][0]
    assert (math["state"], math["done"], math["expected"], math["failed"]) == ("stopped", 39, 40, 1)
    assert math["coverage"] == "39 of 40 scored, 1 failed: timeout"
    assert math["pass_at_k"]["k"] == 4
    one = viewer.get(f"/api/runs/{math['id']}")
    assert one["manifest"]["options"] == {"num_repeats": 4}
    assert {"rollouts.jsonl", "rollouts_failures.jsonl"} <= {file["name"] for file in one["files"]}
    assert "there is no run" in viewer.get("/api/runs/nothing", 404)["error"]["message"]


def test_rollouts_are_filtered_sorted_and_paged(viewer: Viewer) -> None:
    path = f"/api/runs/{viewer.run_id('rollouts')}/rollouts"
    assert [row["task"] for row in viewer.get(path, limit=5)["rows"]] == [0, 0, 0, 0, 1]
    page = viewer.get(path, where='level == "hard" and reward == 1', sort="-task,repeat", limit=3, offset=1)
    assert (page["total"], page["matching"], page["offset"], page["limit"]) == (40, 10, 1, 3)
    assert [(row["task"], row["repeat"], row["fields"]) for row in page["rows"]] == [
        (9, 2, {"level": "hard"}),
        (7, 0, {"level": "hard"}),
        (7, 2, {"level": "hard"}),
    ]
    (failed,) = viewer.get(path, where="outcome == 'failed'")["rows"]
    assert (failed["id"], failed["attempts"], failed["failure_class"]) == ("f2", 2, "timeout")
    error = viewer.get(path, 400, where="reward > 0 and levle == 1")["error"]
    assert (error["position"], error["expression"]) == (16, "reward > 0 and levle == 1")
    assert "did you mean 'level'" in error["message"]
    assert "sort" in viewer.get(path, 400, sort="nothing")["error"]["message"]
    assert "limit" in viewer.get(path, 400, limit=100_000)["error"]["message"]
    assert viewer.get(path, limit=0)["rows"] == []


def test_fields_stats_and_grid(viewer: Viewer) -> None:
    path = f"/api/runs/{viewer.run_id('rollouts')}"
    fields = {field["name"]: field for field in viewer.get(f"{path}/fields")["fields"]}
    assert fields["level"] == {
        "name": "level",
        "type": "text",
        "builtin": False,
        "present": 39,
        "values": ["easy", "hard"],
        "low": None,
        "high": None,
    }
    assert (fields["reward"]["low"], fields["reward"]["high"], fields["reward"]["builtin"]) == (0, 1, True)
    assert fields["tools"]["values"] == ["search"]
    stats = viewer.get(f"{path}/stats", where="task >= 5")
    assert stats["matching"] == 20
    assert stats["outcomes"] == {"scored": 19, "unscored": 0, "failed": 1, "damaged": 0}
    assert sum(stats["histograms"]["reward"]["counts"]) == 19
    assert len(stats["histograms"]["reward"]["counts"]) == 2
    assert stats["histograms"]["duration_s"]["missing"] == 19
    (failed,) = stats["failures"]
    assert (failed["class"], failed["rollouts"], failed["attempts"]) == ("timeout", 1, 2)
    assert failed["examples"] == [{"id": "f2", "task": 9, "repeat": 3, "message": "timeout in task 9"}]
    assert stats["agents"][0]["agent"] == "agent_a"
    grid = viewer.get(f"{path}/grid", order="-mean", limit=3)
    assert (grid["tasks_total"], len(grid["tasks"]), len(grid["tasks"][0]["cells"])) == (10, 3, 4)
    assert viewer.get(f"{path}/grid", offset=9)["tasks"][0]["cells"][3] == ["f2", 3, None, 2]
    assert viewer.get(f"{path}/grid", 400, order="random")


def test_one_rollout(viewer: Viewer) -> None:
    run = viewer.run_id("rollouts")
    shown = viewer.get(f"/api/rollouts/{run}/r4", where="task == 0", sort="-repeat")
    assert shown["record"]["reward"] == shown["row"]["reward"] == 1.0
    assert (shown["previous"], shown["next"]) == (None, "r3")
    assert [row["repeat"] for row in shown["repeats"]] == [0, 1, 2, 3]
    assert shown["timing"]["duration_s"] == 2
    assert [(call["kind"], call["name"]) for call in shown["timing"]["calls"]] == [("model", "policy"), ("verify", "")]
    assert shown["fields"] == {"level": "easy"}
    first = viewer.get(f"/api/rollouts/{run}/r1")
    assert [attempt["failure_class"] for attempt in first["attempts"]] == ["rate_limited", None]
    failed = viewer.get(f"/api/rollouts/{run}/f2")
    assert [(attempt["id"], attempt["message"]) for attempt in failed["attempts"]] == [
        ("f1", "connect in task 9"),
        ("f2", "timeout in task 9"),
    ]
    earlier = viewer.get(f"/api/rollouts/{run}/f1")
    assert (earlier["row"]["failure_class"], earlier["previous"]) == ("connect", None)
    for wrong in ("r999", "x1", "r", "r-1", "f99", "r1e3", "%2e%2e%2fetc"):
        viewer.get(f"/api/rollouts/{run}/{wrong}", 404)


def test_the_line_itself_and_a_selection_of_lines(viewer: Viewer, folder: Path) -> None:
    run = viewer.run_id("rollouts")
    content = (folder / "math/rollouts.jsonl").read_bytes().splitlines()
    response = viewer.ask(f"/api/rollouts/{run}/r4/raw")
    assert response.body == content[3]
    assert "attachment" in response.headers.get("content-disposition", "")
    selection = viewer.ask(f"/api/runs/{run}/export.jsonl?where={quote('task == 1')}&sort=-repeat&limit=2")
    assert selection.body.splitlines() == [content[7], content[6]]
    by_name = viewer.ask(f"/api/runs/{run}/export.jsonl?ids=r2,f2,r999").body.splitlines()
    assert by_name[0] == content[1]
    assert json.loads(by_name[1])["_ng_failure_class"] == "timeout"
    assert len(viewer.ask(f"/api/runs/{run}/export.jsonl").body.splitlines()) == 40


def test_full_text(viewer: Viewer) -> None:
    run = viewer.run_id("rollouts")
    events = viewer.events(f"/api/runs/{run}/search?q={quote('ANSWER 3')}", 5)
    assert [name for name, _ in events] == ["match"] * 4 + ["done"]
    assert events[0][1]["row"]["task"] == 3
    assert "Answer 3" in events[0][1]["excerpt"]
    assert events[-1][1] == {"searched": 40, "total": 40, "matches": 4, "complete": True}
    events = viewer.events(f"/api/runs/{run}/search?q=answer&limit=2&where={quote('reward == 0')}", 3)
    assert events[-1][1]["complete"] is False
    viewer.get(f"/api/runs/{run}/search", 400, q="x", where="((")
    viewer.get(f"/api/runs/{run}/search", 400)
    hostile = viewer.events(f"/api/runs/{viewer.run_id('hostile')}/search?q={quote(SCRIPT)}", 2)
    assert hostile[0][1]["row"]["task"] == 5


def test_hostile_records_are_shown_as_well_as_can_be(viewer: Viewer) -> None:
    run = viewer.run_id("hostile")
    for path in ("rollouts", "fields", "stats", "grid"):
        viewer.get(f"/api/runs/{run}/{path}")
    rows = viewer.get(f"/api/runs/{run}/rollouts", sort="line")["rows"]
    outcomes = ["scored", "scored", "unscored", "scored", "scored", "damaged", "damaged", "damaged"]
    assert [row["outcome"] for row in rows] == outcomes
    shown = [viewer.get(f"/api/rollouts/{run}/{row['id']}") for row in rows]
    assert shown[0]["record"][SCRIPT] == SCRIPT
    assert shown[1]["record"]["response"]["output"][2]["content"][0]["text"] == "\ud83d half"
    assert shown[2]["record"]["reward"] == "NaN"
    assert shown[2]["record"]["x"] == ["Infinity", "-Infinity"]
    assert shown[3]["record"]["_ng_task_index"] == 8
    assert shown[4]["cut"] == [{"path": "response.output.0.content.0.text", "length": 3_000_000}]
    assert len(shown[4]["record"]["response"]["output"][0]["content"][0]["text"]) == 100_000
    assert len(shown[4]["record"]["image"]) > 200_000
    assert [entry["record"] for entry in shown[5:]] == [None] * 3
    assert shown[5]["raw"] == "{not json"
    assert all(entry["problem"] for entry in shown[5:])
    response = viewer.ask(f"/api/runs/{run}/rollouts?where={quote('label != null')}")
    assert response.headers.get("content-type", "") == "application/json"
    assert response.headers.get("x-content-type-options", "") == "nosniff"


def test_pages(viewer: Viewer) -> None:
    page = viewer.ask("/")
    assert page.headers.get("content-type", "") == "text/html; charset=utf-8"
    policy = page.headers.get("content-security-policy", "")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = re.findall(r'"/static/([^"]+)"', page.body.decode())
    assert names
    for name in names:
        response = viewer.ask(f"/static/{name}")
        assert response.status == 200
        assert response.headers.get("content-type", "").partition(";")[0] in ("text/css", "text/javascript")
    for wrong in ("nothing.js", "..%2fapi.py", "%2e%2e/api.py", "index.html%00.js", "__init__.py"):
        assert viewer.ask(f"/static/{wrong}").status == 404


def test_only_whoever_has_the_token_may_ask(viewer: Viewer) -> None:
    here = f"{viewer.host}:{viewer.port}"
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Cookie": f"ng_view_{viewer.port}=wrong"},
        {"Cookie": "\xe4=;;"},
    ):
        response = viewer.ask("/api/runs", headers)
        assert response.status == 401
        assert "token" in json.loads(response.body)["error"]["message"]
    assert viewer.ask("/?token=wrong", {}).status == 401
    visit = viewer.ask(f"/?token={viewer.token}", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert (visit.status, visit.headers.get("location", "")) == (303, "/")
    cookie = visit.headers.get("set-cookie", "")
    assert "HttpOnly" in cookie
    cookies = {"Cookie": cookie.partition(";")[0]}
    assert viewer.ask("/api/runs", cookies).status == 200
    assert viewer.ask("/api/runs", {**cookies, "Origin": f"http://{here}"}).status == 200
    for foreign in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{viewer.port}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert viewer.ask("/api/runs", {**cookies, **foreign}).status == 403, foreign
    assert viewer.ask("/api/runs", cookies, "POST").status == 405


def test_a_run_is_watched_while_it_is_made(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "runs", [rollout(0, 0)])
    agents = {"agent_a": Expected(tasks=4, rollouts=4)}
    write_manifest(RunManifest(agents=agents, started_at="2026-01-01T00:00:00.000Z"), paths.manifest)
    with RunLock(paths.lock), viewing(tmp_path / "runs", tmp_path / "cache") as viewer:
        run = viewer.run_id("rollouts")
        found: list[tuple[str, Any]] = []
        watching = threading.Thread(target=lambda: found.extend(viewer.events(f"/api/runs/{run}/events", 3)))
        watching.start()
        deadline = time.monotonic() + PATIENCE_S
        while watching.is_alive() and time.monotonic() < deadline:
            with paths.rollouts.open("ab") as file:
                file.write(lines([rollout(1, 0, 0.0)]))
            watching.join(timeout=2)
        assert [name for name, _ in found] == ["run", "run", "rollouts"]
        assert [data["state"] for name, data in found if name == "run"] == ["running", "running"]
        assert found[1][1]["done"] > found[0][1]["done"]
        assert found[2][1]["added"] == found[1][1]["done"] - found[0][1]["done"]
        assert found[2][1]["replaced"] is False
        write_run(tmp_path / "runs" / "later", [rollout(0, 0)], name="later")
        names = [data["name"] for _, data in viewer.events("/api/events", 2)]
        while set(names) != {"rollouts", "later"} and time.monotonic() < deadline:
            names += [data["name"] for _, data in viewer.events("/api/events", 2)]
        assert set(names) == {"rollouts", "later"}
    assert not paths.lock.exists()


def test_a_condition_leads_to_the_list(tmp_path: Path) -> None:
    paths = write_run(tmp_path, [rollout(0, 0)])
    with viewing(paths.rollouts, tmp_path / "cache", "+where=reward < 1 and task == 0") as viewer:
        assert viewer.fragment == f"#/runs/{viewer.run_id('rollouts')}?where=reward%20%3C%201%20and%20task%20%3D%3D%200"


def test_the_command_lists_runs_and_names_mistakes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    main.run([f"+path=[{folder / 'math'},{folder / 'hostile.jsonl'}]", "+json=true"])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["rollouts", "hostile"]
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "x"}}\n')
    (tmp_path / "empty").mkdir()
    page = f"+export={tmp_path / 'x.html'}"
    for arguments, problem in (
        ([f"+path={tmp_path / 'nowhere'}"], "does not exist"),
        ([f"+path={tmp_path / 'rows.jsonl'}"], "not a rollouts file"),
        ([f"+path={folder / 'math'}", "+where=reward >"], r"\+where, position 9"),
        ([f"+path={folder}", "+where=reward > 1"], "about the rollouts of one run, and there are 2"),
        ([f"+path={folder / 'math'}", "+where=rewrd > 1", page], "did you mean 'reward'"),
        ([f"+path={folder / 'math'}", f"+export={folder / 'hostile.jsonl'}"], "stays as it is"),
        ([f"+path={tmp_path / 'empty'}", page], "there is no run"),
        ([f"+path={folder / 'math'}", "+host=203.0.113.1"], "cannot listen"),
    ):
        with pytest.raises(SystemExit) as end:
            main.run(arguments)
        printed = capsys.readouterr()
        assert (end.value.code, printed.out) == (2, "")
        assert re.search(problem, printed.err), printed.err
    assert not (tmp_path / "x.html").exists()
