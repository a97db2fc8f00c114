"""The comparison with others: its arithmetic, its canned model, its meter and our own side of it.

The peers themselves take part in `make bench-peers` only, which has their environments.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.perf.peers import report
from tests.perf.peers.__main__ import CannedModel, measure, run
from tests.perf.peers.contenders import CONTENDERS, OURS, Contender
from tests.perf.peers.findings import Findings, Round, Spread
from tests.perf.peers.meter import Usage, has_result
from tests.perf.peers.tasks import HAND_IN, TASKS, reward

US = CONTENDERS[0]
SINGLE, MULTI = TASKS["single_tool_call"], TASKS["multi_step"]


def usage(cpu_s: float, seconds: float = 1.0, peak_mb: float = 100.0, first_result_s: float = 1.0) -> Usage:
    return Usage(seconds, cpu_s, peak_mb, first_result_s)


@pytest.fixture
def findings() -> Findings:
    found = Findings(
        {OURS: "nemo_gym 1", "other": "other 2"}, {OURS: 1001, "other": 101}, {OURS: 256, "other": 4}, cores=2
    )
    for ours_cpu_s, theirs_cpu_s, theirs_calling_s in ((2.0, 11.0, 10.0), (3.0, 21.0, 20.0), (1.5, 21.0, 5.0)):
        found.add(MULTI.name, OURS, Round(1001, 1.0, usage(1.0), usage(ours_cpu_s)))
        their_many = usage(theirs_cpu_s, peak_mb=50.0)
        found.add(MULTI.name, "other", Round(101, theirs_calling_s, usage(1.0, first_result_s=4.0), their_many))
    return found


def test_a_rollout_costs_what_many_took_more_than_one(findings: Findings) -> None:
    assert findings.spread(MULTI.name, OURS, "cpu_ms") == Spread(1.0, 0.5, 2.0)
    assert findings.spread(MULTI.name, "other", "cpu_ms") == Spread(200.0, 100.0, 200.0)
    assert findings.spread(MULTI.name, "other", "per_s") == Spread(10.1, 5.05, 20.2)


def test_ratios_are_made_within_rounds_and_above_one_where_we_are_better(findings: Findings) -> None:
    assert findings.ratio(MULTI.name, "other", "cpu_ms") == Spread(100.0, 100.0, 400.0)
    assert findings.ratio(MULTI.name, "other", "per_s").median == pytest.approx(1001 / 10.1)
    assert findings.ratio(MULTI.name, "other", "peak_mb") == Spread(0.5, 0.5, 0.5)
    assert findings.ratio(MULTI.name, "other", "first_result_s") == Spread(4.0, 4.0, 4.0)


def test_the_section_is_written_and_the_rest_of_the_page_stays(findings: Findings, tmp_path: Path) -> None:
    page, plot, data = tmp_path / "page.md", tmp_path / "plot.png", tmp_path / "data.json"
    page.write_text(f"before\n{report.BEGIN}\nold figures\n{report.END}\nafter\n")

    report.publish(findings, page, plot, data)

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old figures" not in text
    assert "| other 2 | 101 | 4 | 200: **100 x** (100 to 400) | 10.1: **99.1 x**" in text
    assert plot.stat().st_size > 1000
    assert Findings.from_json(orjson.loads(data.read_bytes())) == findings


def test_a_page_without_the_section_is_left_alone(findings: Findings, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing to fill\n")

    with pytest.raises(SystemExit, match="put both lines back"):
        report.publish(findings, page, tmp_path / "plot.png", tmp_path / "data.json")

    assert page.read_text() == "nothing to fill\n"


def test_the_published_tables_are_those_of_the_published_data() -> None:
    published = Findings.from_json(orjson.loads(report.DATA.read_bytes()))
    section = report.PAGE.read_text().partition(report.BEGIN)[2].partition(report.END)[0]

    assert section == f"\n{report.tables(published)}"
    assert [one.name for one in CONTENDERS] == list(published.versions)


@pytest.fixture
def model() -> Iterator[CannedModel]:
    with CannedModel(MULTI) as canned:
        yield canned


def ask(model: CannedModel, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"{model.base_url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def test_the_canned_model_plays_the_same_in_every_dialect(model: CannedModel) -> None:
    for turn in range(MULTI.model_calls):
        outputs = [{"type": "function_call_output", "call_id": f"call_{past:04d}"} for past in range(turn)]
        item = json.loads(ask(model, "/responses", {"input": outputs, "tools": []}))["output"][0]
        said = [{"role": "tool", "tool_call_id": f"call_{past:04d}"} for past in range(turn)]
        chat = {"messages": said, "tools": []}
        choice = json.loads(ask(model, "/chat/completions", chat))["choices"][0]
        events = ask(model, "/chat/completions", {**chat, "stream": True}).split("\n\n")
        delta = json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]

        if turn == len(MULTI.tool_calls):
            assert item["content"][0]["text"] == choice["message"]["content"] == delta["content"] == MULTI.text
        else:
            name, arguments = MULTI.tool_calls[turn]
            functions = [item, *(said["tool_calls"][0]["function"] for said in (choice["message"], delta))]
            assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [(name, arguments)] * 3
        assert events[-2] == "data: [DONE]"


def test_only_calls_of_rollouts_count() -> None:
    with CannedModel(SINGLE) as model:
        ask(model, "/responses", {"input": "what can you do?"})
        ask(model, "/responses", {"input": [], "tools": []})

    assert model.calls == 1


@pytest.mark.parametrize(("values", "expected"), [([496, 525, 507], 1.0), ([525, 496, 507], 0.0), (None, 0.0)])
def test_peers_are_scored_as_we_are(values: list[int] | None, expected: float) -> None:
    calls: list[tuple[str, str | dict[str, Any]]] = [("get_synonym_value", {"synonym": "Rapid"})]
    if values is not None:
        calls.append((HAND_IN, json.dumps({"synonym_values": values})))

    assert reward(MULTI, calls) == expected


def test_the_meter_counts_processes_that_outlive_their_parents(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\nopen('done.txt', 'w').write('1')"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}], cwd={str(tmp_path)!r})"

    used = Usage.of([sys.executable, "-c", leave], tmp_path, "done.txt", 60)

    assert used.cpu_s >= 0.4
    assert (tmp_path / "done.txt").exists()


def test_a_command_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        Usage.of([sys.executable, "-c", "import sys; sys.exit('no such model')"], tmp_path, "*", 60)


def test_a_file_without_a_result_is_none(tmp_path: Path) -> None:
    (tmp_path / "log.eval").write_bytes(b"not yet an archive")
    (tmp_path / "rollouts.jsonl").touch()

    assert not has_result(tmp_path, "*.eval")
    assert not has_result(tmp_path, "rollouts.jsonl")


def test_our_side_is_measured_on_both_tasks(tmp_path: Path) -> None:
    [found] = measure([US], rounds=1, scale=3 / US.rollouts, folder=tmp_path)

    for task in TASKS:
        [reading] = found.rounds[task][OURS]
        assert reading.rollouts == 3
        assert reading.many.peak_mb > 50
        assert reading.one.first_result_s <= reading.one.seconds
        assert found.ratio(task, OURS, "peak_mb") == Spread(1.0, 1.0, 1.0)


class Idler(Contender):
    """It claims results, and never asked the model."""

    def command(self, *_: object) -> list[str]:
        return [sys.executable, "-c", "pass"]

    def scored(self, folder: Path) -> tuple[int, float]:
        return 7, 1.0


def test_other_work_than_was_asked_for_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"0 model calls, 7 results, mean reward .*: that was not the same work"):
        run(Idler(OURS, OURS, "*.jsonl", 7), MULTI, 7, tmp_path)


def test_a_peer_that_is_not_installed_is_named_with_the_remedy() -> None:
    with pytest.raises(SystemExit, match=r"nobody is not installed in .*; run `make bench-peers`"):
        Contender("nobody", "nobody", "*.jsonl", 1).version()
