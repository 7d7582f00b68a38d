"""The fleet coloured by one measurement: from the lowest value on it to the highest, in the order of a label. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from checks.limits import quantity
from healthd.aggregator.ui.fleet_grid import Cell, grouped
from healthd.aggregator.ui.overview.readings import Reading
from healthd.core.model import Health

STEPS = 7
BEYOND = ", beyond its limit"
NOT_NOW = ", measured before the node became unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    """
    One node: `step` of the scale (None: no value), and its value as people read it. `old`: it may be another by now,
    because the node is silent or its evidence stale.
    """

    node: str
    step: int | None
    outside: bool
    old: bool
    shown: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatGroup:
    """The cells that share a value of the label; `shown` is the median of the group."""

    name: str
    cells: tuple[HeatCell, ...]
    shown: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The map, and its scale: the smallest value of each step."""

    groups: tuple[HeatGroup, ...]
    scale: tuple[str, ...]
    low: str
    middle: str
    high: str
    measured: int
    outside: int


def heat_map(cells: Sequence[Cell], values: Mapping[str, Reading], plain: str, by: str) -> HeatMap:
    """
    Cells by group; `plain` is the measurement's name, whose ending is its unit.

    Values that are not finite count as none.
    """
    known = {node: one for node, one in values.items() if math.isfinite(one.value)}
    here = [known[cell.node].value for cell in cells if cell.node in known]
    low, high = (min(here), max(here)) if here else (0.0, 0.0)
    middle = median(here) if here else 0.0

    def step(value: float) -> int:
        span = high - low
        if not 0 < span < math.inf:
            return STEPS // 2
        return min(STEPS - 1, int((value - low) / span * STEPS))

    def one(cell: Cell) -> HeatCell:
        found = known.get(cell.node)
        if found is None:
            label = f"{cell.node}: not measured"
            return HeatCell(node=cell.node, step=None, outside=False, old=False, shown="", label=label)
        shown, old = quantity(plain, found.value), cell.health is Health.UNKNOWN
        marks = (BEYOND if found.outside else "") + (NOT_NOW if old else "")
        return HeatCell(
            node=cell.node,
            step=step(found.value),
            outside=found.outside,
            old=old,
            shown=shown,
            label=f"{cell.node}: {shown}{_compared(found.value, middle)}{marks}",
        )

    groups = []
    for group in grouped(cells, by):
        values_here = [known[cell.node].value for cell in group.cells if cell.node in known]
        shown = quantity(plain, median(values_here)) if values_here else ""
        groups.append(HeatGroup(name=group.name, cells=tuple(map(one, group.cells)), shown=shown))
    return HeatMap(
        groups=tuple(groups),
        scale=tuple(quantity(plain, low + (high - low) * i / STEPS) for i in range(STEPS)) if high > low else (),
        low=quantity(plain, low),
        middle=quantity(plain, middle),
        high=quantity(plain, high),
        measured=len(here),
        outside=sum(known[cell.node].outside for cell in cells if cell.node in known),
    )


def _compared(value: float, middle: float) -> str:
    """How far from the median, where that says something."""
    if middle <= 0 or value == middle:
        return ""
    percent = 100 * (value / middle - 1)
    return f", {abs(percent):.2g} % {'above' if percent > 0 else 'below'} the median" if abs(percent) < 1000 else ""
