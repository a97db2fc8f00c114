"""The pages of the viewer, read as text: what the strict policy and the exported file demand of them."""

import re
from collections import Counter
from pathlib import Path

import pytest

from nemo_gym.metrics.charts import STYLE
from nemo_gym.paths import PARENT_DIR
from nemo_gym.view.export import CHARTS_FILE, one_file

PAGES = PARENT_DIR / "nemo_gym" / "view" / "pages"
MODULES = sorted(PAGES.glob("*.js"))
MOST_LINES = 500
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";$', re.MULTILINE)
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
MARKUP_OR_CODE_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|createContextualFragment|DOMParser|srcdoc"
    r"|\beval\b|new Function|import\(|import\.meta|javascript:"
)


def imported_by(path: Path) -> dict[str, list[str]]:
    """The names that a module takes from each other one."""
    taken: dict[str, list[str]] = {}
    for names, source in IMPORT.findall(path.read_text()):
        taken.setdefault(source, []).extend(name.strip() for name in names.split(",") if name.strip())
    return taken


def test_there_is_one_beginning_and_it_reaches_every_module() -> None:
    page = (PAGES / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/static/app.js">']
    reached, waiting = set[str](), ["app.js"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_by(PAGES / name)
    assert reached == {path.name for path in MODULES}
    assert set(re.findall(r'href="/static/([\w.]+)"', page)) == {
        *(path.name for path in PAGES.glob("*.css")),
        CHARTS_FILE,
    }


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    page = (PAGES / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|https?:", page)
    for path in PAGES.glob("*.css"):
        assert not re.search(r"@import|url\(", path.read_text()), path.name
    for path in MODULES:
        addresses = set(re.findall(r"https?://[^\s\"']+", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_can_be_put_into_one_file_and_takes_no_markup(path: Path) -> None:
    text = path.read_text()
    assert not MARKUP_OR_CODE_FROM_TEXT.findall(text)
    assert len(text.splitlines()) <= MOST_LINES
    assert text.startswith("// "), "it says what it is for"
    starts = [line for line in text.splitlines() if re.match(r"(import|export)\b", line)]
    assert len(starts) == len(IMPORT.findall(text)) + len(EXPORTED.findall(text)), "an import or export in another form"
    for source, names in imported_by(path).items():
        offered = set(EXPORTED.findall((PAGES / source).read_text()))
        assert set(names) <= offered, f"{path.name} wants {set(names) - offered} of {source}"
        for name in names:
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{path.name} imports {name} and does not use it"


def test_no_two_modules_use_a_name_at_their_top() -> None:
    names = Counter(name for path in MODULES for name in TOP_LEVEL.findall(path.read_text()))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_everything_it_stands_on(scheme: str) -> None:
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (PAGES / "style.css").read_text())
    light, by_system, by_choice = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    assert by_system == by_choice
    colours = light if scheme == "light" else light | by_system
    pairs = [
        *((text, ground) for text in ("text", "soft", "accent", "bad", "warn", "good") for ground in ("page", "card")),
        *((text, "raised") for text in ("text", "soft", "good", "key", "string", "number", "word", "comment")),
        *(("text", ground) for ground in ("found", "found-now", "accent-soft")),
        *(("warn", "warn-soft"), ("bad", "bad-soft"), ("accent", "accent-soft"), ("on-accent", "accent")),
    ]
    ratios = {pair: round(contrast(*(colours[name] for name in pair)), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def contrast(one: str, other: str) -> float:
    """How two colours differ in lightness, after WCAG 2; 4.5 is enough for text of any size."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_charts_look_as_on_the_profile_page_and_what_they_use_is_there() -> None:
    own = "".join(path.read_text() for path in PAGES.glob("*.css"))
    assert STYLE.strip() in one_file({}).decode()
    for name in re.findall(r"var\((--[\w-]+)\)", own + STYLE):
        assert f"{name}:" in own + STYLE, name
    drawn = set(re.findall(r'class: "([a-z]+)"', (PAGES / "charts.js").read_text()))
    assert {"mark", "grid", "interval"} <= drawn
    assert not re.search(r"\.mark\b|line\.grid|\.interval\b", own), "the shared sheet says how these look"
