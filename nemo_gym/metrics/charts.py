"""Charts as inline SVG: bars, boxes and intervals, drawn with plain arithmetic.

`STYLE` is how charts look on every page, those of the viewer included; they follow the page from light to dark. Every
mark says its numbers in a `<title>`, which browsers show when the pointer rests on it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_LIGHT = "--mark: #2f6fb2; --low: #b9b6ad; --high: #3d9a6b; --box: #bcd3ea; --rule: #8f8c84; --grid: #ecebe7;"
_DARK = "--mark: #6aa5e3; --low: #6d6c68; --high: #5fbf8e; --box: #33506d; --rule: #8d8b86; --grid: #2b2e30;"
STYLE = f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {_DARK} }} }}
:root[data-theme="dark"] {{ {_DARK} }}
svg text {{ font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }}
svg text.middle {{ text-anchor: middle; }} svg text.end {{ text-anchor: end; }}
.mark {{ fill: var(--mark); }} .mark.low {{ fill: var(--low); }} .mark.high {{ fill: var(--high); }}
.mark.bad {{ fill: var(--bad); }}
line.grid {{ stroke: var(--grid); }} line.rule {{ stroke: var(--rule); stroke-dasharray: 3 3; }}
.whisker {{ stroke: var(--rule); }} .box {{ fill: var(--box); }}
line.median {{ stroke: var(--mark); stroke-width: 2.5; }}
.interval {{ stroke: var(--rule); stroke-width: 3; stroke-linecap: round; }}
.mark:hover, g:hover > .box {{ opacity: 0.75; }}
"""
"""The page gives `--soft`, the colour of what is written, and `--bad`, that of failures."""
Floats = NDArray[np.float64]
WIDTH = 560
HEIGHT = 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 26, 40
_WIDEST_BAR = 72
_BINS = 36
_FEW_VALUES = 12
_LARGEST_WHOLE = 1e15


@dataclass(frozen=True)
class Bar:
    """One bar of a chart."""

    label: str
    """Below the bar; may be empty."""
    value: float
    tooltip: str
    style: str = "mark"
    edge: str = ""
    """Below its left edge."""


@dataclass(frozen=True)
class Rule:
    """A vertical line at a place of interest."""

    at: float
    """From 0, the left edge, to 1."""
    label: str


def bar_chart(title: str, bars: Sequence[Bar], x_label: str, y_label: str, rules: Sequence[Rule] = ()) -> str:
    """Upright bars of counts."""
    top = max((bar.value for bar in bars), default=0)
    ticks = _whole_ticks(top)
    scale = (HEIGHT - _TOP - _BOTTOM) / max(ticks[-1], 1)
    plot_width = WIDTH - _LEFT - _RIGHT
    step = plot_width / max(len(bars), 1)
    parts = [_grid_line(HEIGHT - _BOTTOM - tick * scale, _number(tick)) for tick in ticks]
    for place, bar in enumerate(bars):
        left, height = _LEFT + place * step, bar.value * scale
        if bar.value:
            width = min(step * 0.82, _WIDEST_BAR)
            shape = _rounded_top(left + (step - width) / 2, HEIGHT - _BOTTOM - height, width, height)
            parts.append(f'<path class="{bar.style}" d="{shape}"><title>{escape(bar.tooltip)}</title></path>')
        parts.append(_text(left + step / 2, HEIGHT - _BOTTOM + 15, bar.label, "tick middle"))
        parts.append(_text(left, HEIGHT - _BOTTOM + 15, bar.edge, "tick middle"))
    for rule in rules:
        parts.append(_rule(_LEFT + rule.at * plot_width, rule.label))
    parts.append(_text(_LEFT + plot_width / 2, HEIGHT - 6, x_label, "axis middle"))
    parts.append(_text(0, 9, y_label, "axis"))
    return _svg(title, HEIGHT, parts)


def histogram(title: str, values: Floats, x_label: str, y_label: str, *, marks_quantiles: bool = False) -> str:
    """One bar per value where there are few of them, else bars of equal width."""
    distinct = np.unique(values)
    if len(distinct) <= _FEW_VALUES:
        counts = {value: int(np.sum(values == value)) for value in distinct.tolist()}
        bars = [Bar(_number(value), count, f"{_number(value)}: {count:,}") for value, count in counts.items()]
        return bar_chart(title, bars, x_label, y_label)
    edges = _bin_edges(values)
    every = math.ceil(len(edges) / 7)
    counted = np.histogram(values, edges)[0].tolist()
    bars = [
        Bar("", count, f"{_number(low)} to {_number(high)}: {count:,}", edge=_number(low) if place % every == 0 else "")
        for place, (count, (low, high)) in enumerate(zip(counted, pairwise(edges), strict=True))
    ]
    rules = []
    if marks_quantiles:
        for share, name in ((0.5, "median"), (0.95, "95 %")):
            quantile = float(np.quantile(values, share))
            rules.append(Rule((quantile - edges[0]) / (edges[-1] - edges[0]), f"{name} {_number(quantile)}"))
    return bar_chart(title, bars, x_label, y_label, rules)


def share_chart(title: str, shares: Floats, x_label: str, y_label: str) -> str:
    """A histogram of shares in which exactly 0 and exactly 1, which are worlds apart from nearly so, stand alone."""
    inner = shares[(shares > 0) & (shares < 1)]
    counted = np.histogram(inner, 10, (0, 1))[0].tolist()
    bars = [Bar("0", int(np.sum(shares <= 0)), f"never: {int(np.sum(shares <= 0)):,}", "mark low")]
    for place, count in enumerate(counted):
        low, high = f"{place / 10:.1f}", f"{(place + 1) / 10:.1f}"
        bars.append(Bar("", int(count), f"{low} to {high}: {int(count):,}", edge=low if place else ""))
    bars.append(Bar("1", int(np.sum(shares >= 1)), f"always: {int(np.sum(shares >= 1)):,}", "mark high"))
    return bar_chart(title, bars, x_label, y_label)


def box_chart(title: str, rows: Sequence[tuple[str, Floats]], x_label: str, y_label: str) -> str:
    """A box per group: from the first to the third quartile, its median, and a line from 5 % to 95 %."""
    row_height = max(24, min(60, (HEIGHT - _TOP - _BOTTOM) // max(len(rows), 1)))
    height = _TOP + row_height * len(rows) + _BOTTOM
    ticks = _ticks(*_extent([values for _, values in rows]))
    low, high, left, right = ticks[0], ticks[-1], 104, 28

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - right)

    base = height - _BOTTOM
    parts = [
        f'<line class="grid" x1="{at(tick):.1f}" y1="{_TOP}" x2="{at(tick):.1f}" y2="{base}"/>'
        + _text(at(tick), base + 15, _number(tick), "tick middle")
        for tick in ticks
    ]
    for place, (label, values) in enumerate(rows):
        middle, half = _TOP + row_height * (place + 0.5), row_height * 0.28
        p5, q1, median, q3, p95 = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
        tooltip = f"{label}: median {_number(median)}, half within {_number(q1)} to {_number(q3)}, n = {len(values):,}"
        box_width = max(at(q3) - at(q1), 2)
        parts.append(
            f"<g><title>{escape(tooltip)}</title>"
            f'<line class="whisker" x1="{at(p5):.1f}" y1="{middle}" x2="{at(p95):.1f}" y2="{middle}"/>'
            f'<rect class="box" x="{at(q1):.1f}" y="{middle - half:.1f}" '
            f'width="{box_width:.1f}" height="{2 * half:.1f}" rx="3"/>'
            f'<line class="median" x1="{at(median):.1f}" y1="{middle - half:.1f}" '
            f'x2="{at(median):.1f}" y2="{middle + half:.1f}"/>'
            "</g>"
        )
        parts.append(_text(left - 10, middle + 4, label, "tick end"))
    parts.append(_text((left + WIDTH - right) / 2, height - 6, x_label, "axis middle"))
    parts.append(_text(0, 9, y_label, "axis"))
    return _svg(title, height, parts)


def row_chart(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Bars lying down, for names: (name, value, what is written at its end)."""
    row_height, left = 30, 160
    height = 12 + row_height * len(rows)
    top = max((value for _, value, _ in rows), default=1) or 1
    parts = []
    for place, (name, value, note) in enumerate(rows):
        middle = 6 + row_height * (place + 0.5)
        width = max(value / top * (WIDTH - left - 180), 2)
        tooltip = escape(f"{name}: {note}")
        parts.append(_text(left - 10, middle + 4, _shortened(name, 22), "tick end"))
        parts.append(
            f'<rect class="mark bad" x="{left}" y="{middle - 8}" width="{width:.1f}" height="16" rx="3">'
            f"<title>{tooltip}</title></rect>"
        )
        parts.append(_text(left + width + 8, middle + 4, note, "tick"))
    return _svg(title, height, parts)


@dataclass(frozen=True)
class Interval:
    """A value that is not known exactly."""

    label: str
    value: float
    low: float
    high: float
    style: str = "mark"


def interval_chart(title: str, rows: Sequence[Interval], label: Callable[[float], str]) -> str:
    """A point and its interval for each row, around a line at 0; `label` writes a value."""
    left, right, row_height = 236, 24, 34
    middle = (left + WIDTH - right) / 2
    reach = max((max(abs(row.low), abs(row.high)) for row in rows), default=0) or 1.0
    height = row_height * len(rows) + 34

    def at(value: float) -> float:
        return middle + (WIDTH - left - right) / 2 * value / reach

    parts = [f'<line class="rule" x1="{middle}" x2="{middle}" y1="8" y2="{height - 26}"/>']
    for place, row in enumerate(rows):
        y = 24 + row_height * place
        tooltip = f"{row.label}: {label(row.value)}, from {label(row.low)} to {label(row.high)}"
        parts.append(_text(4, y + 4, _shortened(row.label, 34), "tick"))
        parts.append(
            f"<g><title>{escape(tooltip)}</title>"
            f'<line class="interval" x1="{at(row.low):.1f}" x2="{at(row.high):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="{row.style}" cx="{at(row.value):.1f}" cy="{y}" r="5"/></g>'
        )
    parts += [_text(at(value), height - 8, label(value), "tick middle") for value in (-reach, 0.0, reach)]
    return _svg(title, height, parts)


def grouped_by(keys: Floats, values: Floats) -> list[tuple[str, Floats]]:
    """Values by key, the largest key first; many different keys are put into ranges."""
    distinct = np.unique(keys)
    if len(distinct) <= _FEW_VALUES:
        return [(_number(key), values[keys == key]) for key in distinct[::-1].tolist()]
    edges = _ticks(float(distinct[0]), float(distinct[-1]), about=8)
    places = np.clip(np.digitize(keys, edges) - 1, 0, len(edges) - 2)
    labels = [f"{_number(low)} to {_number(high)}" for low, high in pairwise(edges)]
    return [(label, values[places == place]) for place, label in enumerate(labels) if np.any(places == place)][::-1]


def number(value: float) -> str:
    """A number for people."""
    return _number(value)


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if size <= abs(value) < _LARGEST_WHOLE:
            return f"{value / size:.4g}{letter}"
    if float(value).is_integer() and abs(value) < _LARGEST_WHOLE:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < _LARGEST_WHOLE else f"{value:.3g}"


def _whole_ticks(top: float) -> list[float]:
    """Up to five whole numbers from 0 to at least `top`, evenly spaced."""
    step = _nice_step(max(top, 1) / 4, whole=True)
    return [step * place for place in range(math.ceil(max(top, 1) / step) + 1)]


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that divide everything from `low` to `high` into `about` parts or fewer, and one at each end."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    step = _nice_step((high - low) / about)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * place for place in range(first, last + 1)]


def _bin_edges(values: Floats) -> list[float]:
    """Round numbers that divide the range of `values` into about `_BINS` parts; whole ones for whole values."""
    low, high = float(values.min()), float(values.max())
    is_whole = bool(np.all(values == np.round(values)))
    step = _nice_step((high - low) / _BINS, whole=is_whole)
    first = math.floor(low / step)
    return [step * place for place in range(first, math.floor(high / step) + 2)]


def _nice_step(raw: float, *, whole: bool = False) -> float:
    """1, 2 or 5 times a power of ten, at least `raw`."""
    if whole and raw <= 1:
        return 1
    magnitude = 10.0 ** math.floor(math.log10(raw))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= raw * (1 - 1e-9))


def _extent(groups: Sequence[Floats]) -> tuple[float, float]:
    """From the lowest 5 % to the highest 95 % of any group."""
    return (
        min(float(np.quantile(values, 0.05)) for values in groups),
        max(float(np.quantile(values, 0.95)) for values in groups),
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _rounded_top(x: float, y: float, width: float, height: float) -> str:
    radius = min(3.0, height, width / 2)
    return (
        f"M{x:.1f} {y + height:.1f}V{y + radius:.1f}Q{x:.1f} {y:.1f} {x + radius:.1f} {y:.1f}"
        f"H{x + width - radius:.1f}Q{x + width:.1f} {y:.1f} {x + width:.1f} {y + radius:.1f}V{y + height:.1f}Z"
    )


def _grid_line(y: float, label: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 7, y + 4, label, "tick end")


def _rule(x: float, label: str) -> str:
    anchor = "tick end" if x > WIDTH * 0.75 else "tick"
    line = f'<line class="rule" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{HEIGHT - _BOTTOM}"/>'
    return line + _text(x - 5 if anchor == "tick end" else x + 5, _TOP + 10, label, anchor)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>' if text else ""


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
