"""
The last state of a node as the aggregator keeps it: as bytes, with the few things beside it that are asked for often.

Ten thousand states as objects are millions of them: the garbage collector would stop the aggregator for more than a
second each time it walks over them. As bytes they are ten thousand, and the few that somebody looks at are opened.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import TypeVar

from checks.contract import Tier
from healthd.model import CheckResult, Lease, NodeState
from healthd.wire import decode, encode

R = TypeVar("R", CheckResult, Lease)


class KeptState:
    """
    A state whose ages stand for the moment `at`, on the registry's clock.

    `stale_at` is when the first result outlives its bound, if nothing more is heard. `version` differs between any two
    states and ages of one process.
    """

    __slots__ = (
        "_ages",
        "_bytes",
        "_expiring",
        "_opened",
        "_taken_at",
        "address",
        "at",
        "health",
        "instance_type",
        "labels",
        "stale_at",
        "version",
    )

    def __init__(self, state: NodeState, at: float, version: int) -> None:
        self._bytes = encode(state)
        self._ages: Mapping[str, float] = {}
        self._opened: NodeState | None = None
        self._taken_at = self.at = at
        self.version = version
        self.health = state.health
        self.labels = dict(state.labels)
        self.address = state.address
        self.instance_type = state.instance_type
        bounds = {
            spec.name: spec.expires_seconds
            for spec in state.checks
            if spec.expires_seconds is not None and not (state.allocated and spec.tier is not Tier.PASSIVE)
        }
        # What grows stale: check, age as it was sent, bound.
        self._expiring = tuple(
            (sys.intern(r.check), r.age_seconds, bounds[r.check]) for r in state.results if r.check in bounds
        )
        self.stale_at = self._stale_at()

    def refresh(self, ages: Mapping[str, float], at: float, version: int) -> None:
        """Newer ages of the same state; those that are not among them count on."""
        self._ages, self.at, self.version, self._opened = ages, at, version, None
        self.stale_at = self._stale_at()

    def open(self) -> NodeState:
        """The state itself, with ages as of `at`."""
        if self._opened is None:
            state = decode(self._bytes, NodeState, what="kept state")
            moved = self.at - self._taken_at
            self._opened = dataclasses.replace(
                state,
                results=tuple(_of_age(r, self._ages.get(r.check, r.age_seconds + moved)) for r in state.results),
                leases=tuple(_of_age(lease, lease.age_seconds + moved) for lease in state.leases),
            )
        return self._opened

    def close(self) -> None:
        """Forget what `open` made; the next look makes it anew."""
        self._opened = None

    def _stale_at(self) -> float:
        ages, at, taken_at = self._ages, self.at, self._taken_at
        return min(
            (bound + (at - ages[c] if c in ages else taken_at - age) for c, age, bound in self._expiring),
            default=math.inf,
        )


def _of_age(record: R, age_seconds: float) -> R:
    """A copy with another age: what dataclasses.replace does, at a fifth of its cost, for it is done at every look."""
    copy: R = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, age_seconds=age_seconds)
    return copy
