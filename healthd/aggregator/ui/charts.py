"""Small charts as numbers for inline SVG: pure geometry, in units of the drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checks.contract import Status
from healthd.aggregator.ui.formatting import STATUS_TONES
from healthd.aggregator.ui.samples import Point

WIDTH, HEIGHT, MARGIN = 132.0, 30.0, 4.0
# Of the charts at the top of a node's page.
WIDE, HIGH = 260.0, 72.0


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A result in the chart: its place and its colour; `bad` ones are drawn larger."""

    x: float
    y: float
    tone: str
    bad: bool


@dataclass(frozen=True, kw_only=True)
class Chart:
    """`line` holds the points of a polyline; `limit_y` is where the limit lies, None where there is none in sight."""

    line: str
    dots: tuple[Dot, ...]
    limit_y: float | None
    width: float
    height: float


def chart(
    points: Sequence[Point], limit: float | None, *, width: float = WIDTH, height: float = HEIGHT
) -> Chart | None:
    """The chart of a series; None for fewer than two points. Results without a number lie on the middle line."""
    if len(points) < 2:
        return None
    values = [p.value for p in points if p.value is not None and math.isfinite(p.value)]
    shown = [*values, limit] if limit is not None and math.isfinite(limit) and values else values
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    begin, end = points[0].at, points[-1].at

    def x(at: float) -> float:
        return round(MARGIN + (at - begin) / (end - begin) * (width - 2 * MARGIN), 1) if end > begin else width / 2

    def y(value: float | None) -> float:
        if value is None or not math.isfinite(value) or not high > low:
            return height / 2
        return round(height - MARGIN - (value - low) / (high - low) * (height - 2 * MARGIN), 1)

    dots = tuple(
        Dot(
            x=x(p.at),
            y=y(p.value),
            tone=STATUS_TONES[p.status],
            bad=p.status in (Status.FAIL, Status.UNKNOWN, Status.WARN),
        )
        for p in points
    )
    drawn = [(x(p.at), y(p.value)) for p in points if p.value is not None]
    line = " ".join(f"{a:g},{b:g}" for a, b in drawn) if len(drawn) > 1 else ""
    limit_y = y(limit) if limit in shown and high > low else None
    return Chart(line=line, dots=dots, limit_y=limit_y, width=width, height=height)
