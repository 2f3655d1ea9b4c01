"""Curves and bars as text: two by four dots in a character where the terminal can, plain marks where not.

What always holds: a plot is exactly as wide and high as asked; every point lies inside it; several points that
share a column are joined into the stroke they make.
"""

from __future__ import annotations

from collections.abc import Sequence

Points = Sequence[tuple[int, float]]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character, by row and column."""


def plot(
    points: Points,
    width: int,
    height: int,
    *,
    low: float | None = None,
    high: float | None = None,
    first: int | None = None,
    last: int | None = None,
    braille: bool = True,
) -> list[str]:
    """The curve in `height` lines of `width` characters; the bounds given hold instead of the curve's own, so that
    two plots can be compared."""
    if not points or width < 1 or height < 1:
        return [" " * width for _ in range(height)]
    across, down = (2 * width, 4 * height) if braille else (width, height)
    values = [value for _, value in points]
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    first = points[0][0] if first is None else first
    last = points[-1][0] if last is None else last
    lit: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - first) / (last - first) * (across - 1)) if last > first else across // 2
        y = round((high - value) / (high - low) * (down - 1)) if high > low else down // 2
        x, y = min(max(x, 0), across - 1), min(max(y, 0), down - 1)
        lit.update(_line(before, (x, y)) if before is not None else [(x, y)])
        before = (x, y)
    if not braille:
        return ["".join("*" if (x, y) in lit else " " for x in range(width)) for y in range(height)]
    return ["".join(_cell(lit, column, row) for column in range(width)) for row in range(height)]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    (x0, y0), (x1, y1) = start, end
    parts = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * part / parts), round(y0 + (y1 - y0) * part / parts))
        for part in range(parts + 1)
    ]


def _cell(lit: set[tuple[int, int]], column: int, row: int) -> str:
    bits = 0
    for y in range(4):
        for x in range(2):
            if (2 * column + x, 4 * row + y) in lit:
                bits |= _DOTS[y][x]
    return chr(0x2800 + bits) if bits else " "


def thinned(points: Points, count: int) -> Points:
    """At most `count` points: where there are more, the means of neighbours, or noise would fill the plot."""
    if len(points) <= count:
        return points
    width = -(-len(points) // count)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def figure(
    title: str,
    points: Points,
    width: int,
    height: int,
    *,
    braille: bool = True,
    low: float | None = None,
    high: float | None = None,
    first: int | None = None,
    last: int | None = None,
) -> list[str]:
    """A plot with its name, newest value and range: `height` lines of curve and one above them. Of more points than
    the plot has columns means are drawn."""
    newest = number(points[-1][1])
    points = thinned(points, width)
    low = min(v for _, v in points) if low is None else low
    high = max(v for _, v in points) if high is None else high
    labels = [number(high), *[""] * (height - 2), number(low)] if height > 1 else [number(high)]
    margin = max(len(label) for label in labels)
    inside = max(4, width - margin - 1)
    drawn = plot(points, inside, height, low=low, high=high, first=first, last=last, braille=braille)
    name = title if len(title) + len(newest) + 2 <= width else title[: max(1, width - len(newest) - 3)] + "…"
    head = name + newest.rjust(max(1, width - len(name)))
    return [head, *(f"{label:>{margin}} {line}" for label, line in zip(labels, drawn, strict=True))]


def number(value: float) -> str:
    """Four digits that matter, in at most seven characters or so."""
    size = abs(value)
    if value != value or size == float("inf"):
        return str(value)
    if size >= 1e6 or (size and size < 1e-3):
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bar(share: float, width: int, *, blocks: bool = True) -> str:
    """A bar of `share` of `width`."""
    filled = min(max(share, 0.0), 1.0) * width
    if not blocks:
        return "#" * round(filled)
    eighths = round(filled * 8)
    rest = "▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else ""
    return "█" * (eighths // 8) + rest
