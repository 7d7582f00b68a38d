"""What is old goes: gates, events, what rules remember, and nodes that are gone for good."""

from __future__ import annotations

from collections.abc import Container

from sqlalchemy import Connection

from healthd.aggregator.controller.bulkheads import Where, contained
from healthd.aggregator.controller.memory import Memory
from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store import reading
from healthd.aggregator.store.changes import Change, Kind, PutRecord
from healthd.aggregator.store.rows import apply_changes
from healthd.aggregator.store.store import LONG_SECONDS, Store

PRUNE_SECONDS = 3600.0
"""How often what is old is dropped from the database: it grows by some MB an hour at the very most."""
DAY_SECONDS = 86400.0


class Pruning:
    """
    When it is time, and the two halves of it: `run` between two passes of the loop, then `expire` in the next one.

    `expiring` is whether the second is still to be done.
    """

    def __init__(self, now: float) -> None:
        self.due_at = now + PRUNE_SECONDS
        self.expiring = False

    async def run(self, store: Store, memory: Memory, policy: Policy, now: float) -> None:
        """
        Drop gates and events beyond their bounds and write down which nodes were there, in one transaction.

        StoreError, and memory stays; it is tried again after the usual time.
        """
        self.due_at = now + PRUNE_SECONDS
        before, history = now - policy.keep_days * DAY_SECONDS, now - policy.history_days * DAY_SECONDS
        forgotten, times = memory.rules.old(now), memory.reconciler.unwritten_times()
        written: list[Change] = [*(PutRecord(kind=Kind.RULES, key=node, record=None) for node in forgotten), *times]

        def work(connection: Connection) -> tuple[str, ...]:
            dropped = reading.prune(
                connection,
                before=before,
                most_gates=policy.keep_gates,
                most_events=policy.keep_events,
                history_before=history,
            )
            apply_changes(connection, written)
            return dropped

        memory.fleet_state.drop(await store.run(work, seconds=LONG_SECONDS))
        memory.rules.drop(forgotten)
        memory.reconciler.mark_written(times)
        self.expiring = True

    def expire(self, batch: Batch, memory: Memory, policy: Policy, resting: Container[str]) -> None:
        """
        After `run`: end overrides whose time is over, and drop nodes that are gone for good.

        ContainedError names a node that failed; those of `resting` are left for the next time.
        """
        if not self.expiring:
            return
        self.expiring = False  # first, because what fails here must not fail every pass
        fleet_state = memory.fleet_state
        for job, override in list(fleet_state.overrides.items()):
            if override.until <= batch.now:
                fleet_state.put_override(batch, job, None)
        _forget_gone(batch, memory, policy, resting)


def _forget_gone(batch: Batch, memory: Memory, policy: Policy, resting: Container[str]) -> None:
    """
    Drop nodes that were silent for so long that they do not come back, quarantined by rule or not.

    One that a person keeps out or a job has stays: only they can say that it is over.
    """
    fleet_state, rules, reconciler = memory.fleet_state, memory.rules, memory.reconciler
    for name in reconciler.silent(batch.now, policy.forget_days * DAY_SECONDS):
        kept = fleet_state.quarantines.get(name)
        by_person = kept is not None and kept.owner_kind != "rule"
        if by_person or name in resting or name in fleet_state.leases_of or name in fleet_state.reserved:
            continue
        with contained(Where.NODE, name):
            rules.forget(batch, name)
            reconciler.forget(batch, name, f"the aggregator: not heard for {policy.forget_days:g} days")
