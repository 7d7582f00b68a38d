"""
What checks measured lately, for the small charts: in memory, bounded, gone with the process.

Nobody keeps a time series here: Prometheus does. A chart of two dozen points answers "was it always like this?".

Also here:

- the newest value of every measurement on every node, for the heat map: in memory, bounded, gone with the process;
- small charts as numbers for inline SVG: pure geometry, in units of the drawing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Finding, Measurement, Status
from healthd.aggregator.page.rendering import STATUS_TONES
from healthd.core.evidence import speeds_note
from healthd.core.model import CheckResult, NodeState

# Names of measurements, their labels included; what comes later is left out.
MOST_NAMES = 256
LONGEST_NAME = 120

POINTS = 24
# Points are at least so far apart, so that two dozen reach back for hours; a change of status is always kept.
APART_SECONDS = 300.0
# Series of all nodes: some 700 bytes each.
MOST_SERIES = 40_000

_STATUSES = tuple(Status)

WIDTH, HEIGHT, MARGIN = 132.0, 30.0, 4.0
# Of the charts at the top of a node's page.
WIDE, HIGH = 260.0, 72.0


def worst_finding(result: CheckResult) -> Finding | None:
    """The finding that gave the result its status, at the largest size; None where there is none."""
    return next((f for f in largest_first(result.findings) if f.status is result.status), None)


class Samples:
    """Series by node and check. The oldest nodes go first when there are too many."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, array[float]]] = {}
        self._started: dict[str, dict[str, float]] = {}
        self._series = 0
        self.readings = Readings()
        self.without_limits: set[str] = set()
        """Nodes whose speeds have no configured or learned limit."""

    def take(self, state: NodeState, now: float) -> None:
        """Take in the results that are new in this state; ages in it must be as of `now`."""
        series, started = self._nodes.setdefault(state.node, {}), self._started.setdefault(state.node, {})
        for result in state.results:
            if started.get(result.check) == result.started_at:
                continue
            if result.check not in series:
                series[result.check] = array("d")
                self._series += 1
            started[result.check] = result.started_at
            self.readings.take(state.node, result)
            lead = leading(result)
            value = lead.value if lead is not None and lead.value is not None else float("nan")
            _append(series[result.check], now - result.age_seconds, _STATUSES.index(result.status), value)
        if speeds_note(state.results) is None:
            self.without_limits.discard(state.node)
        else:
            self.without_limits.add(state.node)
        while self._series > MOST_SERIES and len(self._nodes) > 1:
            self._evict(next(iter(self._nodes)))

    def forget(self, node: str) -> None:
        self._evict(node)
        self.readings.forget(node)
        self.without_limits.discard(node)

    def _evict(self, node: str) -> None:
        """Drop what was measured over time; the newest values stay."""
        self._series -= len(self._nodes.pop(node, {}))
        self._started.pop(node, None)

    def of(self, node: str, check: str) -> Sequence[Point]:
        """The results of a check on a node, oldest first."""
        kept = self._nodes.get(node, {}).get(check)
        if kept is None:
            return ()
        rows = zip(kept[0::3], kept[1::3], kept[2::3], strict=True)
        return tuple(Point(at=at, status=_STATUSES[int(s)], value=v if v == v else None) for at, s, v in rows)


class Readings:
    """Values by node and name of measurement."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._plain: dict[str, str] = {}
        self._rows: dict[str, array[float]] = {}

    def take(self, node: str, result: CheckResult) -> None:
        """Take in the measurements of a result."""
        worst: dict[str, Measurement] = {}
        for one in (m for finding in result.findings for m in finding.measurements if m.value is not None):
            name = name_of(one)
            known = worst.get(name)
            if known is None or _worse(one, known):
                worst[name] = one
        if not worst:
            return
        row = self._rows.setdefault(node, array("d"))
        for name, one in worst.items():
            place = self._place(name, one.name)
            if place is None or one.value is None:
                continue
            if len(row) <= 2 * place + 1:
                row.extend([float("nan")] * (2 * place + 2 - len(row)))
            row[2 * place], row[2 * place + 1] = one.value, float(_outside(one))

    def _place(self, name: str, plain: str) -> int | None:
        if name not in self._index:
            if len(self._index) >= MOST_NAMES or len(name) > LONGEST_NAME:
                return None
            self._index[name] = len(self._index)
            self._plain[name] = plain
        return self._index[name]

    def forget(self, node: str) -> None:
        self._rows.pop(node, None)

    def names(self) -> Mapping[str, str]:
        """What can be shown, in the order of the alphabet, and the measurement's name without labels (its unit)."""
        return {name: self._plain[name] for name in sorted(self._index)}

    def of(self, name: str) -> Mapping[str, Reading]:
        """The values of one measurement by node; nodes without one are left out."""
        place = self._index.get(name)
        if place is None:
            return {}
        found = {}
        for node, row in self._rows.items():
            if len(row) > 2 * place and row[2 * place] == row[2 * place]:
                found[node] = Reading(value=row[2 * place], outside=bool(row[2 * place + 1]))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A value on one node; `outside`: it is beyond its limit."""

    value: float
    outside: bool


def name_of(one: Measurement) -> str:
    """The name with the labels that tell series apart: `all_reduce_busbw_bytes_per_second bytes=1048576`."""
    labels = " ".join(f"{key}={value}" for key, value in sorted((one.labels or {}).items()))
    return f"{one.name} {labels}".rstrip()


def leading(result: CheckResult) -> Measurement | None:
    """
    The number to draw: the first that the check measures, at the largest size, of the device where it is worst for its
    limit.
    """
    findings = largest_first(result.findings)
    first = next((m for f in findings for m in f.measurements if m.value is not None), None)
    if first is None:
        return None
    alike = [m for f in result.findings for m in f.measurements if (m.name, m.labels) == (first.name, first.labels)]
    known = [m for m in alike if m.value is not None]
    upper_alone = first.upper is not None and first.lower is None
    pick = max if upper_alone else min
    return pick(known, key=lambda m: m.value if m.value is not None else 0.0)


def largest_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, those of large messages before those of small ones: bandwidth means something for large ones."""
    return sorted(findings, key=lambda finding: -max(map(_size_bytes, finding.measurements), default=0))


def chart(
    points: Sequence[Point], limit: float | None, *, width: float = WIDTH, height: float = HEIGHT
) -> Chart | None:
    """The chart of a series; None for fewer than two points. Results without a number lie on the middle line."""
    if len(points) < 2:
        return None
    values = [p.value for p in points if p.value is not None and math.isfinite(p.value)]
    shown = [*values, limit] if limit is not None and math.isfinite(limit) and values else values
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    scale = 1.0 if math.isfinite(high - low) else 0.5  # the difference of two finite numbers may be none
    spread = high * scale - low * scale
    begin, end = points[0].at, points[-1].at

    def x(at: float) -> float:
        return round(MARGIN + (at - begin) / (end - begin) * (width - 2 * MARGIN), 1) if end > begin else width / 2

    def y(value: float | None) -> float:
        if value is None or not math.isfinite(value) or not high > low:
            return height / 2
        return round(height - MARGIN - (value * scale - low * scale) / spread * (height - 2 * MARGIN), 1)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One result: when it was measured (seconds since the epoch), what came of it, its leading number."""

    at: float
    status: Status
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """`line` holds the points of a polyline; `limit_y` is where the limit lies, None where there is none in sight."""

    line: str
    dots: tuple[Dot, ...]
    limit_y: float | None
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A result in the chart: its place and its colour; `bad` ones are drawn larger."""

    x: float
    y: float
    tone: str
    bad: bool


def _worse(one: Measurement, other: Measurement) -> bool:
    if one.value is None or other.value is None:
        return other.value is None
    upper_alone = one.upper is not None and one.lower is None
    return one.value > other.value if upper_alone else one.value < other.value


def _outside(one: Measurement) -> bool:
    value = one.value
    if value is None:
        return False
    return (one.lower is not None and value < one.lower) or (one.upper is not None and value > one.upper)


def _size_bytes(measurement: Measurement) -> int:
    size = measurement.labels.get("size_bytes", "")
    return int(size) if size.isdecimal() else 0


def _append(kept: array[float], at: float, status: int, value: float) -> None:
    """The newest point always stands; the one before it goes when it is too near and says nothing else."""
    if len(kept) >= 6 and kept[-3] - kept[-6] < APART_SECONDS and kept[-2] == kept[-5] and status == kept[-2]:
        del kept[-3:]
    kept.extend((at, float(status), value))
    if len(kept) > 3 * POINTS:
        del kept[:3]
