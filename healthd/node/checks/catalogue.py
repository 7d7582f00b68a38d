"""Decides which checks are enabled on this node, how often each runs and when its result is stale: pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from checks.contract import CheckInfo, Tier
from healthd.core.errors import ConfigError
from healthd.core.model import CheckSpec
from healthd.node.occupancy.model import Scheduled
from healthd.node.settings import NodeSettings, Unprompted

# A result is stale once the next two rounds are missing; a shorter expiry would be noise on a busy machine.
SHORTEST_EXPIRY_SECONDS = 60.0


def enabled_checks(catalogue: Mapping[str, CheckInfo], settings: NodeSettings) -> tuple[CheckSpec, ...]:
    """
    The enabled checks, lightest tier first. ConfigError for a name that matches nothing, or when none is left.
    """
    for key, names in (("checks", settings.checks), ("disabled", settings.disabled)):
        for name in names:
            if name not in catalogue:
                import difflib

                near = difflib.get_close_matches(name, catalogue, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "; see 'healthd checks' for those there are"
                raise ConfigError(f"node.{key}: no such check: {name!r}{hint}")
    wanted = [name for name in settings.checks or catalogue if name not in settings.disabled]
    if not wanted:
        raise ConfigError("node.checks: no check is enabled, so nothing would ever be known; enable some")
    infos = sorted((catalogue[name] for name in dict.fromkeys(wanted)), key=lambda info: info.tier.rank)
    return tuple(_spec(info, settings) for info in infos)


def _spec(info: CheckInfo, settings: NodeSettings) -> CheckSpec:
    if info.tier is Tier.PASSIVE:
        interval = max(info.interval_seconds, settings.passive_floor_seconds)
        expires: float | None = max(3 * interval + info.timeout_seconds, SHORTEST_EXPIRY_SECONDS)
    else:
        interval = settings.active.interval_seconds if info.tier is Tier.QUICK else info.interval_seconds
        # Until the host's rule is known (None) results expire.
        expires = _expiry(info.tier, interval, settings.active.unprompted or Unprompted.IDLE)
    return CheckSpec(
        name=info.name,
        tier=info.tier,
        interval_seconds=interval,
        timeout_seconds=info.timeout_seconds,
        expires_seconds=expires,
        scope=info.scope.value,
        doc=_summary(info.doc),
        accelerators=info.accelerators,
        accelerator_faults=info.accelerator_faults,
        collective=info.collective,
        series=info.series,
    )


def _expiry(tier: Tier, interval: float, rule: Unprompted) -> float | None:
    """When an active result is stale; None for never. Only the idle rule renews the quick tier; other results stand."""
    return 2.5 * interval if tier is Tier.QUICK and rule is Unprompted.IDLE else None


def unprompted_by(scheduled: Scheduled) -> tuple[Unprompted, str]:
    """
    The rule for unprompted active checks where none is set, and why: idle, but boot beside a job scheduler whose
    allocations cannot be seen.
    """
    if scheduled.unseen:
        return Unprompted.BOOT, scheduled.unseen
    names = " and ".join(reading.scheduler for reading in scheduled.readings)
    return Unprompted.IDLE, f"what {names} gives away can be seen" if names else "no job scheduler is on this host"


def under_rule(specs: Iterable[CheckSpec], rule: Unprompted) -> tuple[CheckSpec, ...]:
    """The same checks while active ones run unprompted by this rule."""
    return tuple(
        spec
        if spec.tier is Tier.PASSIVE
        else dataclasses.replace(spec, expires_seconds=_expiry(spec.tier, spec.interval_seconds, rule))
        for spec in specs
    )


def _summary(doc: str) -> str:
    """The first paragraph of a docstring in one bounded line: it travels with every state."""
    return " ".join(doc.strip().split("\n\n")[0].split())[:200]


def in_tier(specs: Iterable[CheckSpec], tier: Tier) -> tuple[str, ...]:
    """The names that a run of `tier` runs: its own and all lighter ones."""
    return tuple(spec.name for spec in specs if spec.tier.rank <= tier.rank)
