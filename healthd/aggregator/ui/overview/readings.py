"""
The newest value of every measurement on every node, for the heat map: in memory, bounded, gone with the process.

A value is that of the device where it is worst for its limit. Two thousand nodes with sixty measurements are 2 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from checks.contract import Measurement
from healthd.core.model import CheckResult

# Names of measurements, their labels included; what comes later is left out.
MOST_NAMES = 256
LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A value on one node; `outside`: it is beyond its limit."""

    value: float
    outside: bool


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
        """Drop a node that is gone."""
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


def name_of(one: Measurement) -> str:
    """The name with the labels that tell series apart: `all_reduce_busbw_bytes_per_second bytes=1048576`."""
    labels = " ".join(f"{key}={value}" for key, value in sorted((one.labels or {}).items()))
    return f"{one.name} {labels}".rstrip()


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
