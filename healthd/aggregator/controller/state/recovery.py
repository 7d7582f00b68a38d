"""
Whether this database knows its fleet. A new one does not, nor does an old copy; then nothing is admitted for a while.

The nodes tell: one that took orders from another database, or has a lease or quarantine that this one must have given
and does not know, is a witness of the loss. A node can say anything, so a share of the fleet decides, and only for a
while after the database was opened: later it cannot have been replaced. What a single node claims is `reports`' matter,
for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store.changes import PutMeta

LEAST_WITNESSES = 2
"""Nodes that must be witnesses in the smallest fleet: one alone is never believed about the others."""


class Recovery:
    """See the module. What outlives a restart is kept in the database as `recovering_until` and `established`."""

    def __init__(self, policy: Policy, meta: Mapping[str, str], *, started_at: float) -> None:
        self._policy = policy
        self._established = "established" in meta
        self._proved_at = started_at + policy.recovery_seconds
        self._until = float(meta.get("recovering_until", "-inf"))
        self._witnesses: set[str] = set()

    @property
    def established(self) -> bool:
        """Whether the database has proved itself, now or before a restart."""
        return self._established

    def why(self, now: float) -> str | None:
        """Why nothing is admitted; None in good days."""
        if now >= self._until:
            return None
        return (
            "nodes tell leases or quarantines that this database does not know, so it may have been lost: nothing is "
            "admitted until "
            f"{self._policy.recovery_seconds:.0f} s have passed or somebody says `healthd fleet recover`"
        )

    def ends(self) -> Iterator[float]:
        """When time alone changes something."""
        yield self._until
        if not self._established:
            yield self._proved_at

    def prove(self, batch: Batch) -> None:
        """The time of proof is over, and nothing speaks against the database."""
        if not self._established and batch.now >= max(self._proved_at, self._until):
            self._set(batch, until=-math.inf, established=True)

    def witness(self, node: str) -> None:
        """Take in that this node knows another database, or another state of this one."""
        self._witnesses.add(node)

    def forget(self, node: str) -> None:
        """Drop what a node said that is gone."""
        self._witnesses.discard(node)

    def judge(self, batch: Batch, size: Callable[[], int]) -> None:
        """Begin to recover when enough nodes of the fleet are witnesses; `size`: how many were heard within a day."""
        if batch.now < self._until or batch.now >= self._proved_at or len(self._witnesses) < LEAST_WITNESSES:
            return
        fleet = size()
        if len(self._witnesses) >= math.ceil(self._policy.recovery_ratio * fleet):
            self._set(batch, until=batch.now + self._policy.recovery_seconds, established=False)
            some = ", ".join(sorted(self._witnesses)[:3])
            text = f"{len(self._witnesses)} of {fleet} nodes ({some}, ...) know another database"
            batch.event("fleet", "recovering", text)

    def end(self, batch: Batch, owner: str) -> bool:
        """A person says that the fleet is known again; false when nothing was to recover from."""
        was = batch.now < self._until
        self._set(batch, until=-math.inf, established=True)
        self._proved_at = batch.now
        batch.event("fleet", "recovered", f"by {owner}")
        return was

    def _set(self, batch: Batch, *, until: float, established: bool) -> None:
        self._until, self._established = until, established
        batch.changes.append(PutMeta(key="recovering_until", value=str(until)))
        if established:
            batch.changes.append(PutMeta(key="established", value="yes"))
