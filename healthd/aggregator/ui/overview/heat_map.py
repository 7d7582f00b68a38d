"""
The fleet coloured by one measurement: from the lowest value on it to the highest, in the order of a label. Pure.

Nodes that differ by noise alone have one colour: a step of the scale is at least 8 % of the median.
"""

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
LEAST_STEP_RATIO = 0.08
"""Of the median. Healthy devices of one kind differ by some 6 %; what is worth a look differs by more."""
BEYOND = ", beyond its limit"
NOT_NOW = ", measured before the node became unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    """
    One node: `step` of the scale (None: no value), and its value as people read it. `old`: it may be another by now,
    because the node is silent or its evidence stale. `bad`: it is beyond its limit, or the node is unhealthy. `sign`
    stands in the cell, so that its colour is not alone.
    """

    node: str
    step: int | None
    bad: bool
    old: bool
    sign: str
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
    bottom, top = _scale(low, middle, high)

    def step(value: float) -> int:
        if not 0 < top - bottom < math.inf:
            return STEPS // 2
        return min(STEPS - 1, int((value - bottom) / (top - bottom) * STEPS))

    def one(cell: Cell) -> HeatCell:
        found = known.get(cell.node)
        shown = "" if found is None else quantity(plain, found.value)
        outside, old = found is not None and found.outside, found is not None and cell.health is Health.UNKNOWN
        bad = outside or cell.health is Health.UNHEALTHY
        ill = f", {cell.health.value}" if cell.health in (Health.UNHEALTHY, Health.DEGRADED) else ""
        ill += f" ({cell.reason})" if ill and cell.reason else ""
        said = "not measured" if found is None else f"{shown}{_compared(found.value, middle)}"
        marks = (BEYOND if outside else "") + (NOT_NOW if old else "") + ill + (", drill" if cell.injected else "")
        signs = (("✕", bad), ("?", old), ("!", cell.health is Health.DEGRADED), ("·", found is None))
        return HeatCell(
            node=cell.node,
            step=None if found is None else step(found.value),
            bad=bad,
            old=old,
            sign=next((sign for sign, shows in signs if shows), ""),
            shown=shown,
            label=f"{cell.node}: {said}{marks}",
        )

    groups = []
    for group in grouped(cells, by):
        values_here = [known[cell.node].value for cell in group.cells if cell.node in known]
        shown = quantity(plain, median(values_here)) if values_here else ""
        groups.append(HeatGroup(name=group.name, cells=tuple(map(one, group.cells)), shown=shown))
    return HeatMap(
        groups=tuple(groups),
        scale=tuple(quantity(plain, bottom + (top - bottom) * i / STEPS) for i in range(STEPS)) if top > bottom else (),
        low=quantity(plain, low),
        middle=quantity(plain, middle),
        high=quantity(plain, high),
        measured=len(here),
        outside=sum(known[cell.node].outside for cell in cells if cell.node in known),
    )


def _scale(low: float, middle: float, high: float) -> tuple[float, float]:
    """From where to where the colours go: the lowest and the highest value, wider where these are close together."""
    half = abs(middle) * LEAST_STEP_RATIO * STEPS / 2
    return min(low, middle - half), max(high, middle + half)


def _compared(value: float, middle: float) -> str:
    """How far from the median, where that says something."""
    if middle <= 0 or value == middle:
        return ""
    percent = 100 * (value / middle - 1)
    return f", {abs(percent):.2g} % {'above' if percent > 0 else 'below'} the median" if abs(percent) < 1000 else ""
