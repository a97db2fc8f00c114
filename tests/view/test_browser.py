"""The viewer in a real browser, on the real server: each page, filters, keys, live runs, hostile records, one file."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.view.browsing import UNNAMED, WAIT_MS, address, ask, assert_quiet, lines_in, open_run, run_called, watched
from tests.view.demo import AGENT, OVERLOADED, Demo, overloaded, servers, view, viewer
from tests.view.records import write_hostile, write_many

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make test-browser` does")
expect = playwright.expect
expect.set_options(timeout=WAIT_MS)
PHONE = {"width": 390, "height": 800}
DESK = {"width": 1280, "height": 900}
TASKS, REPEATS = 15, 4
HUGE_TASKS = 10_000
NEEDLE = "list 11 ("
TRIED_AGAIN, FAILING = 12, 13

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no `chromium` on PATH to look at the pages with"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    faults = [
        overloaded(match={"last_user_contains": f"list {FAILING} ("}),
        overloaded(match={"last_user_contains": f"list {TRIED_AGAIN} (", "turn": 1}, times_per_request=1),
    ]
    with servers(tmp_path_factory.mktemp("demo"), faults=faults) as running:
        first = running.collect("first", TASKS, REPEATS, "+max_attempts=2")
        assert first.wait() == 1, first.stderr
        second = running.collect("second", TASKS, 2, "+max_attempts=2")
        assert second.wait() == 1, second.stderr
        write_hostile(running.results / "hostile" / "rollouts.jsonl")
        write_many(running.results / "many" / "rollouts.jsonl", HUGE_TASKS)
        yield running


@pytest.fixture(scope="module")
def url(demo: Demo) -> Iterator[str]:
    with viewer(demo.results, demo.folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that has been let in; nothing may have gone wrong in it, and nothing asked for elsewhere."""
    context = browser.new_context(viewport=DESK, accept_downloads=True)
    opened = watched(context)
    opened.goto(url)
    yield opened
    assert_quiet(opened, urlsplit(url).netloc)
    context.close()


def test_the_list_of_runs_sorts_finds_and_compares(page: Any, demo: Demo) -> None:
    expect(page.locator("h1")).to_have_text("Runs")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(4)
    first = rows.filter(has_text="first/rollouts")
    done = len(lines_in(demo.results / "first" / "rollouts.jsonl"))
    expect(first).to_contain_text(f"{done} of {TASKS * REPEATS}")
    expect(first).to_contain_text("example_multi_step_simple_agent")
    assert "?token" not in page.url

    page.get_by_role("button", name="Done", exact=True).click()
    expect(rows.first).to_contain_text("many/rollouts")
    page.get_by_role("button", name="Done", exact=True).click()
    expect(rows.last).to_contain_text("many/rollouts")
    assert "sort=done" in page.url

    page.keyboard.press("/")
    page.keyboard.type("second")
    expect(rows).to_have_count(1)
    page.keyboard.press("Control+a")
    page.keyboard.press("Backspace")
    page.keyboard.press("Escape")
    for name in ("first", "second"):
        page.get_by_role("checkbox", name=f"compare {name}/rollouts").check()
    page.get_by_role("link", name="Compare them").click()
    expect(page.locator("h1")).to_have_text("Comparison")
    expect(page.locator("table.compare thead")).to_contain_text("first/rollouts")
    expect(page.locator("svg.intervals circle")).to_have_count(2)


def test_one_run_says_how_it_stands(page: Any) -> None:
    run = open_run(page, "first")
    expect(page.locator(".grid-scroll canvas")).to_be_visible()
    expect(page.locator(".coverage")).to_have_text(run["coverage"])
    expect(page.locator(".cards")).to_contain_text(f"{run['score']['mean']:.3f}")
    expect(page.locator("figure.chart").filter(has_text="Output tokens").first.locator(".mark").first).to_be_visible()
    painted = page.locator(".grid-scroll canvas").evaluate(
        "(canvas) => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        ".data.buffer)).size"
    )
    assert painted > 2, "rewards of 0 and 1 have different colours"
    assert run["failed"] == REPEATS
    expect(page.locator("section", has=page.locator("#failures-title"))).to_contain_text(OVERLOADED)
    page.locator("figure.chart").filter(has_text="Reward").locator(".can-choose").last.click()
    expect(page.locator(".chips li code")).to_contain_text(["reward"])
    page.get_by_role("button", name="Remove").click()
    expect(page.locator(".chips li")).to_have_count(0)
    page.get_by_text("Manifest: options").click()
    expect(page.locator(".manifest")).to_contain_text("num_repeats")
    expect(page.locator(".manifest")).to_contain_text("ng_collect_rollouts")

    page.keyboard.press("g")
    expect(page.locator(".grid-tip")).to_contain_text("task 0, repeat 0")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".grid-tip")).to_contain_text("task 1, repeat 0")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Task 1 · repeat 0")
    page.keyboard.press("u")
    page.get_by_role("button", name="Show as a table").click()
    page.get_by_role("link", name="task 2, repeat 1: reward").click()
    expect(page.locator("h1")).to_have_text("Task 2 · repeat 1")


def test_filters_are_built_combined_sorted_by_and_sent_as_a_link(page: Any, demo: Demo) -> None:
    run = open_run(page, "first")
    wanted = {
        record["_ng_task_index"]
        for record in lines_in(demo.results / "first" / "rollouts.jsonl")
        if record["level"] == "hard" and record["reward"] == 0
    }
    page.get_by_label("Add", exact=True).select_option("level")
    page.get_by_label("value").select_option("hard")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(".chips li code")).to_have_text(['level == "hard"'])
    page.get_by_role("button", name="Reward 0").click()
    expect(page.locator(".chips li code")).to_have_text(['level == "hard"', "reward == 0"])
    page.get_by_role("button", name="Output tokens", exact=True).click()
    matching = ask(page, f"/api/runs/{run['id']}/rollouts?" + urlencode({"where": 'level == "hard" and reward == 0'}))
    expect(page.locator("table.rollouts tbody tr")).to_have_count(matching["matching"])
    shown = page.locator("table.rollouts tbody tr a.row-link").all_inner_texts()
    assert {int(text) for text in shown} == wanted
    tokens = [int(text) for text in page.locator('td[data-label="Output tokens"]').all_inner_texts()]
    assert tokens == sorted(tokens, reverse=True)

    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("table.rollouts tbody tr")).to_have_count(matching["matching"])
    other.close()

    with page.expect_download() as download:
        page.get_by_role("link", name="Export these").click()
    exported = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert {(record["level"], record["reward"]) for record in exported} == {("hard", 0.0)}
    assert len(exported) == matching["matching"]

    page.get_by_role("button", name="Remove reward == 0").click()
    expect(page.locator(".chips li code")).to_have_text(['level == "hard"'])
    page.locator("select[aria-label='Add a column']").select_option("level")
    expect(page.locator('td[data-label="level"]').first).to_have_text("hard")
    page.keyboard.press("f")
    page.keyboard.press("Control+a")
    page.keyboard.type("reward <")
    page.keyboard.press("Enter")
    expect(page.locator(".caret")).to_contain_text("^")
    page.problems = [text for text in page.problems if "400" not in text]  # the browser reports what was refused


def test_what_is_typed_while_a_filter_goes_is_kept(page: Any) -> None:
    open_run(page, "first", where="reward == 1")
    expect(page.locator(".filtered")).to_be_visible()
    page.evaluate(
        "() => { document.querySelector('button.remove').click();"
        " document.querySelector('#full-text').value = 'typed before the page hears of it'; }"
    )

    expect(page.locator(".filtered")).to_have_count(0)
    expect(page.locator("#full-text")).to_have_value("typed before the page hears of it")
    expect(page.locator("#where")).to_have_value("")


def test_full_text_is_found_and_a_search_can_be_cancelled(page: Any) -> None:
    open_run(page, "first")
    page.keyboard.press("/")
    page.keyboard.type(NEEDLE.upper())
    page.keyboard.press("Enter")
    expect(page.locator("tr.excerpt mark")).to_have_count(REPEATS)
    expect(page.locator("table.rollouts a.row-link").first).to_have_text("11")
    page.get_by_role("button", name="Show all rollouts").click()
    expect(page.locator("tr.excerpt")).to_have_count(0)

    open_run(page, "many")
    page.route("**/search?**", lambda route: None)  # a search that takes for ever
    page.get_by_label("Full text").fill("anything")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_text("Searching…")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled")).to_be_visible()


def test_a_conversation_is_read_with_the_keyboard(page: Any, demo: Demo) -> None:
    open_run(page, "first")
    expect(page.locator("table.rollouts a.row-link").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Task 0 · repeat 1")
    for role in ("developer message", "user message", "reasoning", "call of get_synonym_value", "assistant message"):
        expect(page.get_by_role("article", name=role).first).to_be_visible()
    call = page.get_by_role("article", name="call of get_synonym_value").first
    expect(call.locator(".call-side").first).to_contain_text('"synonym"')
    expect(call.locator(".call-output")).to_contain_text("synonym_value")
    expect(page.locator(".item-reasoning details").first).not_to_have_attribute("open", "")
    expect(page.locator("aside")).to_contain_text("set_overlap")

    page.keyboard.press("l")
    expect(page.locator("h1")).to_have_text("Task 0 · repeat 2")
    page.keyboard.press("h")
    expect(page.locator("h1")).to_have_text("Task 0 · repeat 1")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("Task 0 · repeat 2")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("Task 0 · repeat 1")

    page.keyboard.press("/")
    page.keyboard.type("value of its own")
    expect(page.locator(".finder")).to_contain_text("found")
    page.keyboard.press("Enter")
    if "1 of" in page.locator(".finder .note").inner_text():
        expect(page.locator(".item-reasoning details").first).to_have_attribute("open", "")
    page.keyboard.press("Escape")
    expect(page.locator(".finder input")).to_have_value("")

    expect(page.locator(".markdown")).to_have_count(0)
    page.keyboard.press("m")
    expect(page.locator(".item-assistant .markdown .md-heading")).to_have_text("Done")
    expect(page.locator(".item-assistant .markdown strong")).to_have_text("every word")
    expect(page.locator(".item-assistant .markdown li")).to_have_count(2)
    page.keyboard.press("m")
    expect(page.locator(".item-assistant .text").last).to_contain_text("### Done")

    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next repeat of this task")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["agent_ref"]["name"] == AGENT
    page.get_by_text("Raw JSON").click()
    expect(page.locator(".code .json-key").first).to_be_visible()


def test_a_failure_says_why_and_what_was_tried(page: Any) -> None:
    open_run(page, "first", where=f"task == {FAILING}")
    page.locator("table.rollouts a.row-link").first.click()
    expect(page.locator(".failure")).to_contain_text(OVERLOADED)
    expect(page.locator(".verdict")).to_contain_text("failed")
    expect(page.locator(".attempts li")).to_have_count(2)
    page.get_by_role("link", name="open its record").click()
    expect(page.get_by_role("link", name="open its record")).to_have_count(0)
    expect(page.locator("h1")).to_contain_text(f"Task {FAILING}")

    open_run(page, "first", where=f"task == {TRIED_AGAIN} and attempts > 1")
    page.locator("table.rollouts a.row-link").first.click()
    expect(page.locator(".verdict")).to_contain_text("Reward")
    expect(page.locator(".attempts li")).to_contain_text([OVERLOADED, "finished"])
    expect(page.locator("aside")).to_contain_text("Where the time went")
    expect(page.locator(".times")).to_contain_text("policy_model")


def test_two_rollouts_stand_side_by_side(page: Any, demo: Demo) -> None:
    records = lines_in(demo.results / "first" / "rollouts.jsonl")
    task = next(
        record["_ng_task_index"] for record in records if len(rewards_of(records, record["_ng_task_index"])) == 2
    )
    run = open_run(page, "first", where=f"task == {task}")
    rows = ask(page, f"/api/runs/{run['id']}/rollouts?" + urlencode({"where": f"task == {task}"}))["rows"]
    good, bad = (next(row for row in rows if row["reward"] == reward) for reward in (1, 0))
    page.goto(f"{page.url.split('#')[0]}#/rollouts/{run['id']}/{good['id']}")
    page.get_by_label("Side by side with").select_option(f"repeat {bad['id']}")
    expect(page.locator("h1")).to_have_text("Side by side")
    expect(page.locator(".first-difference")).to_have_count(1)
    expect(page.locator(".first-difference mark.difference")).to_have_count(2)
    expect(page.locator(".side-summary")).to_contain_text("The first difference is in item")
    page.keyboard.press("d")
    expect(page.locator(".first-difference")).to_be_focused()

    second = run_called(page, "second")
    page.goto(f"{page.url.split('#')[0]}#/rollouts/{run['id']}/{good['id']}")
    page.get_by_label("Side by side with").select_option(f"run {second['id']}")
    expect(page.locator(".side-heads")).to_contain_text("second/rollouts")


def rewards_of(records: list[dict[str, Any]], task: int) -> set[float]:
    return {record["reward"] for record in records if record["_ng_task_index"] == task}


def test_a_run_is_watched_while_it_is_made(page: Any, demo: Demo, tmp_path: Path) -> None:
    with servers(tmp_path, latency_s=0.15) as slow:
        collector = slow.collect("live", 10, 4, "+num_samples_in_parallel=2", results=demo.results)
        try:
            row = page.locator("table.runs tbody tr").filter(has_text="live/rollouts")
            expect(row).to_contain_text("running")
            row.get_by_role("link").click()
            expect(page.locator(".live")).to_contain_text("Live")
            page.evaluate("window.sameDocument = true")
            seen = shown_done(page)
            deadline_s = time.monotonic() + WAIT_MS / 1000
            while shown_done(page) < seen + 3:
                assert time.monotonic() < deadline_s
                assert collector.is_running, collector.stderr
                page.wait_for_timeout(50)
            assert collector.wait() == 0, collector.stderr
        finally:
            collector.stop()
    expect(page.locator(".page-head .state")).to_have_text("finished")
    expect(page.locator(".cards")).to_contain_text("40")
    expect(page.locator(".coverage")).to_contain_text("40 of 40")
    expect(page.locator("section", has=page.locator("#list-title")).get_by_role("status")).to_have_text("40 rollouts")
    assert page.evaluate("window.sameDocument") is True


def shown_done(page: Any) -> int:
    text = page.locator(".tile", has_text="Rollouts").locator("b").inner_text()
    return int(text.replace(",", "")) if text[0].isdigit() else 0


def test_hostile_records_are_text(page: Any) -> None:
    run = open_run(page, "hostile")
    expect(page.locator("table.rollouts tbody tr")).to_have_count(4)
    page.locator("select[aria-label='Add a column']").select_option("level")
    expect(page.locator('td[data-label="level"]').first).to_contain_text("</script>")
    for row in ask(page, f"/api/runs/{run['id']}/rollouts")["rows"]:
        page.goto(f"{page.url.split('#')[0]}#/rollouts/{run['id']}/{row['id']}")
        expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        expect(page.locator("h1")).not_to_have_text("This cannot be shown")
    page.goto(f"{page.url.split('#')[0]}#/rollouts/{run['id']}/r1")
    expect(page.locator(".hidden-character").filter(has_text="ESC[31m")).to_be_visible()
    expect(page.locator(".hidden-character").filter(has_text="RLO")).to_be_visible()
    expect(page.locator(".observed h2")).to_have_text(["1 model call", "1 tool call", "Not observed"])
    page.locator(".observed summary", has_text="asked").click()
    expect(page.locator(".observed .code")).to_contain_text("</script>")
    expect(page.locator(".observed").first).to_contain_text("1.5 s · 3 tokens in")
    expect(page.get_by_role("article", name="item of type brand_new_item")).to_contain_text("brand_new_item")
    expect(page.get_by_text("Refused")).to_be_visible()
    expect(page.get_by_text("Incomplete: this item was cut off")).to_be_visible()
    expect(page.get_by_text("An image elsewhere, which is not loaded")).to_be_visible()
    expect(page.locator("img.picture")).to_have_count(1)
    page.get_by_role("button", name="Show all").first.click()
    expect(page.get_by_text("Cut here: 100,000 of 250,000 characters")).to_be_visible()
    page.keyboard.press("m")
    page.get_by_text("Raw JSON").click()
    closed = page.locator("details:not([open]) > summary")
    for _ in range(closed.count()):
        closed.first.click()
    assert page.locator("script").count() == 1
    assert page.evaluate("window.pwned") is None


def test_hostile_records_are_text_in_an_exported_file_too(browser: Any, demo: Demo, tmp_path: Path) -> None:
    target = exported(demo.results / "hostile" / "rollouts.jsonl", tmp_path)
    context = browser.new_context(viewport=DESK, offline=True)
    page = watched(context)
    page.goto(target.as_uri())
    expect(page.locator("table.rollouts a.row-link")).to_have_count(4)
    for place in range(4):
        page.locator("table.rollouts a.row-link").nth(place).click()
        expect(page.locator(".rollout h1")).to_be_visible()
        page.keyboard.press("m")
        page.keyboard.press("u")
        expect(page.locator("table.rollouts a.row-link")).to_have_count(4)
    assert page.evaluate("window.pwned") is None
    assert page.problems == []
    assert page.asked <= {"file", "data", "blob"}
    context.close()


def exported(path: Path, folder: Path) -> Path:
    """The file that `ng_view` writes for these rollouts."""
    command = view(path, folder, f"+export={folder / 'report.html'}", "+limit=1000")
    assert command.wait() == 0, command.stderr
    return folder / "report.html"


def test_ten_thousand_tasks_stay_usable(page: Any) -> None:
    open_run(page, "many")
    expect(page.locator(".grid-scroll canvas")).to_be_visible()
    page.keyboard.press("g")
    began_s = time.monotonic()
    page.keyboard.press("End")
    expect(page.locator(".grid-tip")).to_contain_text(f"task {HUGE_TASKS - 1}, repeat 0")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".grid-tip")).to_contain_text(f"task {HUGE_TASKS - 1}, repeat 1")
    assert time.monotonic() - began_s < WAIT_MS / 1000
    assert page.locator("main *").count() < 5_000, "what is not in sight is not built"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(f"Task {HUGE_TASKS - 1} · repeat 1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, url: str, scheme: str) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)
    page = watched(context)
    page.goto(url)
    run = run_called(page, "first")
    rows = ask(page, f"/api/runs/{run['id']}/rollouts")["rows"]
    side = urlencode({"a": f"{run['id']}/{rows[0]['id']}", "b": f"{run['id']}/{rows[1]['id']}"})
    for place in ("#/", f"#/runs/{run['id']}", f"#/rollouts/{run['id']}/{rows[0]['id']}", f"#/side?{side}"):
        page.goto(address(url) + place)
        expect(page.locator("h1")).to_be_visible()
        page.wait_for_load_state("load")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
        unnamed = page.evaluate(UNNAMED)
        assert unnamed == []
    lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(lightness) > 3 * 128) == (scheme == "light")
    page.locator(".tools button").first.click()  # auto, then light, then dark
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert_quiet(page, urlsplit(url).netloc)
    context.close()


def test_an_exported_file_works_alone(browser: Any, demo: Demo, url: str, tmp_path: Path) -> None:
    target = exported(demo.results / "first" / "rollouts.jsonl", tmp_path)
    context = browser.new_context(viewport=DESK, offline=True)
    page = watched(context)
    page.goto(target.as_uri())
    expect(page.locator("section", has=page.locator("#list-title")).get_by_role("status")).to_contain_text("rollouts")
    expect(page.locator(".grid-scroll canvas")).to_be_visible()

    online = watched(browser.new_context())
    online.goto(url)
    run = run_called(online, "first")
    for where in EXPRESSIONS:
        matching = ask(online, f"/api/runs/{run['id']}/rollouts?" + urlencode({"where": where, "limit": 1000}))[
            "matching"
        ]
        page.goto(
            f"{page.url.split('#')[0]}#/runs/{page.url.split('#/runs/')[1].split('?')[0]}?{urlencode({'where': where})}"
        )
        expect(page.locator(".filtered")).to_contain_text(f"{matching} rollout", timeout=WAIT_MS)
    online.context.close()

    page.get_by_role("button", name="Remove").first.click()
    page.keyboard.press("/")
    page.keyboard.type(NEEDLE)
    page.keyboard.press("Enter")
    expect(page.locator("tr.excerpt mark").first).to_be_visible()
    page.locator("table.rollouts a.row-link").first.click()
    expect(page.locator("h1")).to_contain_text("Task 11")
    expect(page.get_by_role("article", name="user message")).to_contain_text(NEEDLE)
    page.keyboard.press("l")
    expect(page.locator("h1")).to_have_text("Task 11 · repeat 1")
    assert page.asked <= {"file", "data", "blob"}
    assert page.problems == []
    context.close()


EXPRESSIONS = (
    "reward == 1",
    'level == "hard" and not incomplete',
    'level in ["easy", "medium"] or reward == 0',
    '"get_synonym_value" in tools and 0 <= reward < 1',
    "_ng_attempt_index != 3 or not accuracy",
    "failure_class == null and (task > 3 or repeat != 0)",
    'level < 3 or "ar" in level',
    "record.id >= 3 and set_overlap > 0.5",
)
