"""
What checks measured lately, for the small charts: in memory, bounded, gone with the process.

Nobody keeps a time series here: Prometheus does. A chart of two dozen points answers "was it always like this?".
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from checks.contract import Finding, Measurement, Status
from healthd.aggregator.ui.overview.readings import Readings
from healthd.core.model import CheckResult, NodeState

POINTS = 24
# Points are at least so far apart, so that two dozen reach back for hours; a change of status is always kept.
APART_SECONDS = 300.0
# Series of all nodes: some 700 bytes each.
MOST_SERIES = 40_000

_STATUSES = tuple(Status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One result: when it was measured (seconds since the epoch), what came of it, its leading number."""

    at: float
    status: Status
    value: float | None


def leading(result: CheckResult) -> Measurement | None:
    """The number to draw: the first that the check measures, of the device where it is worst for its limit."""
    first = next((m for f in result.findings for m in f.measurements if m.value is not None), None)
    if first is None:
        return None
    alike = [m for f in result.findings for m in f.measurements if (m.name, m.labels) == (first.name, first.labels)]
    known = [m for m in alike if m.value is not None]
    upper_alone = first.upper is not None and first.lower is None
    pick = max if upper_alone else min
    return pick(known, key=lambda m: m.value if m.value is not None else 0.0)


def worst_finding(result: CheckResult) -> Finding | None:
    """The finding that gave the result its status; None where there is none."""
    return next((f for f in result.findings if f.status is result.status), None)


class Samples:
    """Series by node and check. The oldest nodes go first when there are too many."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, array[float]]] = {}
        self._started: dict[str, dict[str, float]] = {}
        self._series = 0
        self.readings = Readings()

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
        while self._series > MOST_SERIES and len(self._nodes) > 1:
            self._evict(next(iter(self._nodes)))

    def forget(self, node: str) -> None:
        """Drop a node that is gone."""
        self._evict(node)
        self.readings.forget(node)

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


def _append(kept: array[float], at: float, status: int, value: float) -> None:
    """The newest point always stands; the one before it goes when it is too near and says nothing else."""
    if len(kept) >= 6 and kept[-3] - kept[-6] < APART_SECONDS and kept[-2] == kept[-5] and status == kept[-2]:
        del kept[-3:]
    kept.extend((at, float(status), value))
    if len(kept) > 3 * POINTS:
        del kept[:3]
