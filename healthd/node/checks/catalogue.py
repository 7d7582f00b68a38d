"""
Decides which checks are enabled on this node, how often each runs and when its result is stale: pure.

Also here:

- computes when checks are due: pure, in seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import CheckDeclaration, CheckInfo, Tier
from healthd.core.errors import ConfigError
from healthd.core.model import CheckSpec
from healthd.node.occupancy.model import Scheduled
from healthd.node.settings import ActiveSettings, NodeSettings, Unprompted
from healthd.node.state.store import StampedResult, ended_well

# A result is stale once the next two rounds are missing; a shorter expiry would be noise on a busy machine.
SHORTEST_EXPIRY_SECONDS = 60.0

# After a release the quick tier is due at once, but not repeatedly when the devices are taken and released in turn.
RELEASE_PAUSE_SECONDS = 10.0


def enabled_checks(catalogue: Mapping[str, CheckInfo], settings: NodeSettings) -> tuple[CheckSpec, ...]:
    """
    The enabled checks, lightest tier first. ConfigError for a name that matches nothing, or when none is left.
    """
    for key, names in (("checks", settings.checks), ("disabled", settings.disabled)):
        for name in names:
            if name not in catalogue:
                import difflib

                near = difflib.get_close_matches(name, catalogue, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "; see 'healthd checks' for a list"
                raise ConfigError(f"node.{key}: no such check: {name!r}{hint}")
    wanted = [name for name in settings.checks or catalogue if name not in settings.disabled]
    if not wanted:
        raise ConfigError("node.checks: no check is enabled, so the health would always be unknown; enable some")
    infos = sorted((catalogue[name] for name in dict.fromkeys(wanted)), key=lambda info: info.tier.rank)
    return tuple(_spec(info, settings) for info in infos)


def unprompted_by(scheduled: Scheduled) -> tuple[Unprompted, str]:
    """
    The rule for unprompted active checks where none is set, and why: idle, but boot beside a job scheduler whose
    allocations cannot be seen.
    """
    if scheduled.unseen:
        return Unprompted.BOOT, scheduled.unseen
    names = " and ".join(reading.scheduler for reading in scheduled.readings)
    return Unprompted.IDLE, f"it can be seen what {names} allocates" if names else "no job scheduler is on this host"


def under_rule(specs: Iterable[CheckSpec], rule: Unprompted) -> tuple[CheckSpec, ...]:
    """The same checks while active ones run unprompted by this rule."""
    return tuple(
        spec
        if spec.tier is Tier.PASSIVE
        else dataclasses.replace(spec, expires_seconds=_expiry(spec.tier, spec.interval_seconds, rule))
        for spec in specs
    )


def in_tier(specs: Iterable[CheckSpec], tier: Tier) -> tuple[str, ...]:
    """The names that a run of `tier` runs: its own and all lighter ones."""
    return tuple(spec.name for spec in specs if spec.tier.rank <= tier.rank)


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


def _spec(info: CheckInfo, settings: NodeSettings) -> CheckSpec:
    if info.tier is Tier.PASSIVE:
        interval = max(info.interval_seconds, settings.passive_floor_seconds)
        expires: float | None = max(3 * interval + info.timeout_seconds, SHORTEST_EXPIRY_SECONDS)
    else:
        interval = settings.active.interval_seconds if info.tier is Tier.QUICK else info.interval_seconds
        # Until the host's rule is known (None) results expire.
        expires = _expiry(info.tier, interval, settings.active.unprompted or Unprompted.IDLE)
    told = {field.name: getattr(info, field.name) for field in dataclasses.fields(CheckDeclaration)}
    return CheckSpec(**told | {"interval_seconds": interval, "doc": _summary(info.doc)}, expires_seconds=expires)


def _expiry(tier: Tier, interval: float, rule: Unprompted) -> float | None:
    """When an active result is stale; None for never. Only the idle rule renews the quick tier; other results stand."""
    return 2.5 * interval if tier is Tier.QUICK and rule is Unprompted.IDLE else None


def _summary(doc: str) -> str:
    """The first paragraph of a docstring in one bounded line: it travels with every state."""
    return " ".join(doc.strip().split("\n\n")[0].split())[:200]
