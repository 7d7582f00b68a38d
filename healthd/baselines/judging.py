"""
Learned limits as those who judge need them: for one kind of machine, below what the operator set. Pure.

A limit of the operator on a measurement, in whatever form, silences what was learned of it, but for other labels: who
set `matmul_flops_per_second` must not be overruled by a learned `matmul_flops_per_second/bf16`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from healthd.baselines.model import Kind, Learned, Series, State
from healthd.core import wire
from healthd.core.model import LearnedBounds, LearnedLimits

JUDGING = (State.APPROVED, State.FROZEN)


def judges(series: Series) -> bool:
    """Whether a series has a limit in force."""
    return series.in_force is not None and series.in_force.state in JUDGING and has_limit(series.in_force.learned)


def has_limit(learned: Learned) -> bool:
    """Whether a limit could be drawn at all."""
    return learned.lower is not None or learned.upper is not None


def limits_of(kind: Kind, series: Iterable[Series]) -> LearnedLimits | None:
    """
    What nodes of a kind are told; None where nobody has ever agreed to anything about them.

    Empty limits are a statement too: all that was in force was revoked.
    """
    known = [one for one in series if one.kind == kind and one.in_force is not None]
    if not known:
        return None
    limits = {
        one.name: LearnedBounds(lower=one.in_force.learned.lower, upper=one.in_force.learned.upper)
        for one in sorted(known, key=lambda one: one.name)
        if one.in_force is not None and judges(one)
    }
    versions = dict(kind.versions)
    body = wire.encode([kind.hardware, kind.accelerator, sorted(versions.items()), list(limits.items())])
    return LearnedLimits(
        digest=hashlib.sha256(body).hexdigest()[:16],
        hardware=kind.hardware,
        accelerator=kind.accelerator,
        versions=versions,
        limits=limits,
    )


def sets_of(series: Iterable[Series]) -> tuple[LearnedLimits, ...]:
    """The same of every kind that has a limit in force."""
    known = tuple(series)
    kinds = dict.fromkeys(one.kind for one in known)
    return tuple(found for kind in kinds if (found := limits_of(kind, known)) is not None and found.limits)


def unsilenced(learned: LearnedLimits, configured: Collection[str]) -> Mapping[str, LearnedBounds]:
    """What is left of learned limits beside those of the operator, by name of measurement, label and target."""
    return {
        name: bounds for name, bounds in learned.limits.items() if not any(_covers(other, name) for other in configured)
    }


def _covers(configured: str, learned: str) -> bool:
    name, _, label = configured.partition("@")[0].partition("/")
    plain, _, learned_label = learned.partition("/")
    return name == plain and label in ("", learned_label)
