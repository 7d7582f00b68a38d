"""
Computes when checks are due: pure, in seconds of CLOCK_BOOTTIME.

Passive checks are aligned to ticks of one phase, so that those due together share one process; a tick that was missed
(the machine slept, a round took too long) is skipped. The quick tier is due by one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checks.contract import Tier
from healthd.core.model import CheckSpec
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.node.state.results import StampedResult, ended_well

# After a release the quick tier is due at once, but not repeatedly when the devices are taken and released in turn.
RELEASE_PAUSE_SECONDS = 10.0


class PassiveTimetable:
    """
    The ticks of the passive checks. All are due at `now`, the start; `phase_ratio` in [0, 1) spreads a fleet.

    The base of the ticks is the shortest interval; longer ones are rounded to a multiple of it.
    """

    def __init__(self, specs: Iterable[CheckSpec], *, now: float, phase_ratio: float) -> None:
        intervals = {spec.name: spec.interval_seconds for spec in specs if spec.tier is Tier.PASSIVE}
        self._base = min(intervals.values(), default=math.inf)
        self._phase = now + (phase_ratio * self._base if intervals else 0.0)
        self._every = {name: self._base * max(1, round(interval / self._base)) for name, interval in intervals.items()}
        self._due = dict.fromkeys(intervals, now)

    def due(self, now: float) -> tuple[str, ...]:
        """The checks whose tick has come, in their usual order."""
        return tuple(name for name, at in self._due.items() if at <= now)

    def started(self, names: Iterable[str], now: float) -> None:
        """Record that these run now: each is due again at its first tick after `now`."""
        for name in names:
            every = self._every[name]
            self._due[name] = self._phase + every * (math.floor((now - self._phase) / every) + 1)

    def force(self, names: Iterable[str], now: float) -> None:
        """Make these due at once."""
        self._due.update({name: now for name in names if name in self._due})

    def next_at(self) -> float:
        """When something is due next; infinite without passive checks."""
        return min(self._due.values(), default=math.inf)


@dataclass(frozen=True, kw_only=True)
class QuickFacts:
    """What decides when the quick tier runs unprompted."""

    specs: Sequence[CheckSpec]
    result: Callable[[str], StampedResult | None]
    attempted_at: float | None
    """When active checks last started (CLOCK_BOOTTIME); None before the first time."""
    released: bool
    """A job has released the devices since then."""
    forced: bool
    """An operator has changed faults since then."""
    untested: bool
    """There is a device that a result does not stand for."""
    jitter: float
    """In [-1, 1]: moves the interval by `ActiveSettings.jitter_ratio`."""


def quick_due_at(facts: QuickFacts, settings: ActiveSettings, *, now: float) -> float:
    """
    When the quick tier is due unprompted; infinite for never. Whether the devices are free is not considered here.
    """
    names = [spec.name for spec in facts.specs if spec.tier is Tier.QUICK]
    if not names:
        return math.inf
    if facts.forced:
        return now
    if settings.unprompted is Unprompted.OFF:
        return math.inf
    results = [facts.result(name) for name in names]
    there = [stamped for stamped in results if stamped is not None]
    complete = len(there) == len(names)
    if settings.unprompted is Unprompted.BOOT:
        # Once a boot: evidence of this boot, good or bad, or an attempt that came to nothing.
        return math.inf if there or facts.attempted_at is not None else now
    if facts.released:
        return now if facts.attempted_at is None else max(now, facts.attempted_at + RELEASE_PAUSE_SECONDS)
    if facts.untested or not complete or not all(ended_well(stamped.result) for stamped in there):
        return now if facts.attempted_at is None else facts.attempted_at + settings.retry_seconds
    interval = settings.interval_seconds * (1 + settings.jitter_ratio * facts.jitter)
    return min(stamped.measured_at for stamped in there) + interval
