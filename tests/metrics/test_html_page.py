"""The page: complete in itself, escaped, and looked at in a real browser."""

import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_gym.metrics.charts import grouped_by, histogram, number
from nemo_gym.metrics.report import Failures, numbers_of, render_page
from nemo_gym.reward_profile import RewardProfiler

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]
NASTY = """</title><script>alert("x")</script><img src=x onerror='alert(1)'>&amp;"""


def profiles(rewards: list[list[Any]], agent: str = "alpha", **usage: int) -> list[dict[str, Any]]:
    keys = [(task, rollout) for task, of_task in enumerate(rewards) for rollout in range(len(of_task))]
    rows = [{"_ng_task_index": t, "_ng_rollout_index": r, "agent_ref": {"name": agent}} for t, r in keys]
    results = [
        {**row, "reward": rewards[t][r], "response": {"usage": {name: value + t for name, value in usage.items()}}}
        for row, (t, r) in zip(rows, keys, strict=True)
    ]
    return RewardProfiler().profile_from_data(rows, results)[0]


def page(*arguments: Any) -> str:
    return render_page("run.jsonl", "a run", numbers_of(*arguments))


class Checker(HTMLParser):
    """Notes tags left open and anything that would be loaded or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_every_part_is_there() -> None:
    text = page(profiles([[0, 1], [1, 1], [0, 0]], output_tokens=100), [3, 4, 5], [Failures("timeout", 4, 2)])

    checked(text)
    for title in (
        "Pass rate of tasks",
        "Rewards",
        "Tokens and reward",
        "Lengths of rollouts",
        "Steps of rollouts",
        "Failures by class",
        "Agents",
    ):
        assert f"<h2>{title}</h2>" in text
    assert "never above 0: 1 (33.3 %)" in text
    assert "in between: 1 (33.3 %)" in text
    assert "always 1 or more: 1 (33.3 %)" in text
    assert "timeout: 4 of 2 rollouts" in text


def test_nothing_is_loaded_or_run() -> None:
    checker = checked(page(profiles([[0, 1]], output_tokens=5)))

    assert not checker.tags & {"script", "iframe", "object", "embed", "img"}
    for name, value in checker.attributes:
        assert not name.startswith("on")
        assert not re.match(r"(https?:)?//|javascript:", value or "")
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in checker.attributes


def test_whatever_the_data_says_is_text() -> None:
    text = render_page(
        NASTY,
        NASTY,
        numbers_of(profiles([[0, 1]], agent=NASTY), [], [Failures(NASTY[:40], 1, 1), Failures(NASTY, 2, 1)]),
    )

    assert "script" not in checked(text).tags
    assert "<script" not in text
    assert "<img" not in text


@pytest.mark.parametrize(
    ("rewards", "usage"),
    [
        ([], {}),
        ([[None, None]], {}),
        ([[0.5]], {}),
        ([[-3.5, 2e12], [1e-9]], {"total_tokens": 1}),
        ([[task / 100, task / 50] for task in range(100)], {"output_tokens": 7, "total_tokens": 10**9}),
    ],
)
def test_any_profile_makes_a_page(rewards: list[list[Any]], usage: dict[str, int]) -> None:
    text = page(profiles(rewards, "alpha", **usage) if rewards else [], [1, 1, 2])

    checked(text)
    assert "nan" not in re.sub(r"<style>.*</style>", "", text, flags=re.DOTALL).lower()


def test_tasks_without_a_score_are_in_no_band() -> None:
    agent = numbers_of(profiles([[None], [1], [0]])).agents[0]

    assert (agent.tasks, agent.scored_tasks, agent.never, agent.sometimes, agent.always) == (3, 2, 1, 0, 1)


def test_the_size_of_the_page_does_not_grow_with_the_run() -> None:
    small, large = (
        page(profiles([[0, 1, 0.5, 0.25 * (t % 4)] for t in range(n)], output_tokens=9)) for n in (30, 3000)
    )

    assert len(large) < 1.5 * len(small)


def test_rewards_that_are_no_passes_are_not_called_passes() -> None:
    text = page(profiles([[0.5, 0.7], [2.0, 0.1]]))

    assert "Mean reward of tasks" in text
    assert "Pass rate" not in text


def test_few_values_have_a_bar_each_and_many_whole_ones_have_whole_ranges() -> None:
    assert histogram("t", np.array([1.0, 1, 2]), "x", "y").count("<path") == 2

    many = histogram("t", np.arange(100.0), "x", "y", marks_quantiles=True)

    assert "0 to 5: 5" in many
    assert "median 49.5" in many


def test_many_different_rewards_are_put_into_ranges() -> None:
    keys = np.linspace(-1, 1, 50)

    groups = grouped_by(keys, keys)

    assert [label for label, _ in groups] == ["0.5 to 1", "0 to 0.5", "-0.5 to 0", "-1 to -0.5"]
    assert sum(len(values) for _, values in groups) == 50


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.0, "3"), (0.12345, "0.123"), (12345.6, "12,346"), (2.5e6, "2.5M"), (-3e9, "-3G"), (1e20, "1e+20")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no `chromium` on PATH to look at the page with")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_looks_like_something_in_a_browser(tmp_path: Path, scheme: str) -> None:
    rewards = [[float((task * 7 + rollout * 3) % 11 < task % 12) for rollout in range(8)] for task in range(60)]
    text = page(profiles(rewards, output_tokens=100), [3, 4, 5] * 20, [Failures("timeout", 3, 3)])
    (tmp_path / "page.html").write_text(text)

    errors = screenshot(tmp_path / "page.html", tmp_path / "shot.png", tmp_path / "profile", scheme)

    colours = colours_of(tmp_path / "shot.png")
    background = max(colours, key=lambda colour: colours[colour])
    is_dark = sum(background) < 3 * 128
    assert is_dark == (scheme == "dark")
    assert len(colours) > 50
    assert colours[background] < 0.9 * colours.total()
    assert not [line for line in errors.splitlines() if "CONSOLE" in line]


def screenshot(source: Path, target: Path, profile: Path, scheme: str) -> str:
    assert CHROMIUM is not None
    number_of_scheme = {"dark": 0, "light": 1}[scheme]
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=700,800"]
    command += [f"--blink-settings=preferredColorScheme={number_of_scheme}", f"--screenshot={target}"]
    done = subprocess.run([*command, source.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr


def colours_of(path: Path) -> Counter[bytes]:
    """How often each colour occurs in a PNG without interlacing, as Chromium writes them."""
    content = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", content[16:26])
    assert depth == 8
    step = {2: 3, 6: 4}[kind]
    packed, place = b"", 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        if content[place + 4 : place + 8] == b"IDAT":
            packed += content[place + 8 : place + 8 + length]
        place += length + 12
    rows = zlib.decompress(packed)
    size = width * step
    colours: Counter[bytes] = Counter()
    above = bytes(size)
    for start in range(0, height * (size + 1), size + 1):
        above = unfiltered(rows[start], rows[start + 1 : start + 1 + size], above, step)
        colours.update(above[pixel : pixel + 3] for pixel in range(0, size, step))
    return colours


def unfiltered(kind: int, values: bytes, above: bytes, step: int) -> bytes:
    """One row of pixels, freed from its PNG filter."""
    row = bytearray(values)
    for place, value in enumerate(values):
        left, up = row[place - step] if place >= step else 0, above[place]
        corner = above[place - step] if place >= step else 0
        guess = (0, left, up, (left + up) // 2, paeth(left, up, corner) if kind == 4 else 0)[kind]
        row[place] = (value + guess) & 255
    return bytes(row)


def paeth(left: int, up: int, corner: int) -> int:
    base = left + up - corner
    return min((left, up, corner), key=lambda value: abs(base - value))
