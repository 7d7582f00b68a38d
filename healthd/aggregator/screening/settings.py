"""What an operator can set of screening: `[screening]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_WINDOW = re.compile(r"([01]?\d|2[0-3])-([01]?\d|2[0-4])")


@dataclass(frozen=True, kw_only=True)
class ScreeningSettings:
    """Settings of screening in idle hours. ValueError names a value that is not allowed."""

    tier: Literal["off", "deep", "soak"] = "off"
    """The tier that free nodes run. off: no screening. deep takes minutes and finds what the quick tier has no time
    for; soak takes hours and finds what fails only when hot."""

    every_seconds: float = 21 * 86400.0
    """Within how long each node is screened, if its pool has idle time. Three weeks: operators of large fleets certify
    a node again every three to four weeks. A node that passed rests for half of it."""

    share: float = 0.05
    """The share of a pool that may be screened at a time, rounded down; always at least one node."""

    windows: tuple[str, ...] = ()
    """Hours of the day in UTC in which screenings start, as `22-6`; the end is not included. Empty: at any hour."""

    pools: tuple[str, ...] = ()
    """The pools that are screened. Empty: all nodes, those without a pool as one pool."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.every_seconds <= 366 * 86400.0:
            raise ValueError(f"every: must be from 1 s to 366 d, not {self.every_seconds:g} s")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: must be more than 0 and at most 1, not {self.share:g}")
        for window in self.windows:
            if not (found := _WINDOW.fullmatch(window)) or int(found[1]) == int(found[2]):
                raise ValueError(f"windows: {window!r} is not FIRST-LAST in hours of the day, as 22-6")

    @property
    def on(self) -> bool:
        """Whether nodes are screened at all."""
        return self.tier != "off"
