"""Line and bar charts as SVG text, for the run report: standard library only, readable in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

__all__ = ["bars", "lines"]

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 26, 34
_COLOURS = ("#4269d0", "#d98c00", "#d1495b", "#2a9d8f", "#8e5ea2", "#7a5c3e", "#6c757d", "#b5179e")

Points = Sequence[tuple[float, float]]


def lines(title: str, series: Mapping[str, Points], across: str = "step") -> str:
    """A chart of named lines over one axis; points that are not finite are left out, and a name without points too."""
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    xs, ys = zip(*(point for points in kept.values() for point in points), strict=True)
    x_range, y_range = _widened(min(xs), max(xs)), _padded(min(ys), max(ys))
    parts = _frame(title, x_range, y_range, across)
    for index, points in enumerate(kept.values()):
        colour, dashes = _COLOURS[index % len(_COLOURS)], ' stroke-dasharray="5 3"' if index >= len(_COLOURS) else ""
        path = " ".join(f"{_x(x, x_range):.1f},{_y(y, y_range):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        if len(points) <= 40:
            parts += [
                f'<circle cx="{_x(x, x_range):.1f}" cy="{_y(y, y_range):.1f}" r="2.2" fill="{colour}"/>'
                for x, y in points
            ]
    return _svg([*parts, *_legend(list(kept))])


def bars(title: str, series: Mapping[str, Sequence[float]], across: str = "slot") -> str:
    """Groups of bars from 0 to 1, one group a slot (from 1), one bar a name."""
    kept = {name: list(values) for name, values in series.items() if len(values)}
    if not kept:
        return ""
    count = max(map(len, kept.values()))
    parts = _frame(title, (0.5, count + 0.5), (0.0, 1.0), across, ticks=[float(slot) for slot in range(1, count + 1)])
    width = 0.8 / len(kept)
    for index, values in enumerate(kept.values()):
        for slot, value in enumerate(values, 1):
            if not math.isfinite(value):
                continue
            left, right = (_x(slot - 0.4 + width * place, (0.5, count + 0.5)) for place in (index, index + 1))
            top = _y(min(max(value, 0.0), 1.0), (0.0, 1.0))
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
                f'height="{HEIGHT - _BOTTOM - top:.1f}" fill="{_COLOURS[index % len(_COLOURS)]}">'
                f"<title>{value:.4f}</title></rect>"
            )
    return _svg([*parts, *_legend(list(kept))])


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
    return head + 'role="img" font-family="sans-serif" font-size="11" fill="currentColor">' + "".join(parts) + "</svg>"


def _frame(
    title: str,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    across: str,
    ticks: list[float] | None = None,
) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="15" font-size="13" font-weight="bold">{html.escape(title)}</text>']
    for value in _ticks(*y_range):
        y = _y(value, y_range)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8886" stroke-width="0.6"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in _ticks(*x_range) if ticks is None else ticks:
        x = _x(value, x_range)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{_number(value)}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(across)}</text>')
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    """One line; what all names have up to a slash is left out, since the title says it."""
    parts, x = [], float(_LEFT)
    shared = {name.rpartition("/")[0] for name in names}
    labels = [name.rpartition("/")[2] for name in names] if len(shared) == 1 else names
    for index, name in enumerate(labels):
        parts.append(
            f'<rect x="{x:.0f}" y="{HEIGHT - 12}" width="9" height="9" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 12:.0f}" y="{HEIGHT - 4}">{html.escape(name)}</text>')
        x += 24 + 6.2 * len(name)
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers inside the range."""
    rough = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value / 1000:.4g}k"


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _x(value: float, limits: tuple[float, float]) -> float:
    return _LEFT + (value - limits[0]) / (limits[1] - limits[0]) * (WIDTH - _LEFT - _RIGHT)


def _y(value: float, limits: tuple[float, float]) -> float:
    return HEIGHT - _BOTTOM - (value - limits[0]) / (limits[1] - limits[0]) * (HEIGHT - _TOP - _BOTTOM)
