"""What is old goes: gates, events, what rules remember, and nodes that are gone for good."""

from __future__ import annotations

from collections.abc import Container

from sqlalchemy import Connection

from healthd.aggregator.controller.bulkheads import Where, contained
from healthd.aggregator.controller.fleet_state import Batch, FleetState
from healthd.aggregator.controller.lease_reconciler import LeaseReconciler
from healthd.aggregator.controller.quarantines import Quarantines
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store import changes
from healthd.aggregator.store.changes import Change, PutRecord
from healthd.aggregator.store.rows import apply_changes
from healthd.aggregator.store.store import LONG_SECONDS, Store

DAY_SECONDS = 86400.0


async def prune(
    store: Store, fleet_state: FleetState, rules: Quarantines, reconciler: LeaseReconciler, policy: Policy, now: float
) -> None:
    """
    Drop gates and events beyond their bounds and write down which nodes were there, in one transaction. StoreError, and
    memory stays.

    Runs between two passes of the loop. `FleetState.end_expired` and `forget_gone` do the rest in the next pass.
    """
    before, history = now - policy.keep_days * DAY_SECONDS, now - policy.history_days * DAY_SECONDS
    forgotten, times = rules.old(now), reconciler.unwritten_times()
    written: list[Change] = [*(PutRecord(node=node, record=None) for node in forgotten), *times]

    def work(connection: Connection) -> tuple[str, ...]:
        dropped = changes.prune(
            connection,
            before=before,
            most_gates=policy.keep_gates,
            most_events=policy.keep_events,
            history_before=history,
        )
        apply_changes(connection, written)
        return dropped

    dropped = await store.run(work, seconds=LONG_SECONDS)
    fleet_state.drop(dropped)
    rules.drop(forgotten)
    reconciler.mark_written(times)


def forget_gone(
    batch: Batch,
    fleet_state: FleetState,
    rules: Quarantines,
    reconciler: LeaseReconciler,
    policy: Policy,
    resting: Container[str],
) -> None:
    """
    Drop nodes that were silent for so long that they do not come back, quarantined by rule or not.

    One that a person keeps out or a job has stays: only they can say that it is over. ContainedError names a node that
    failed; those of `resting` are left for the next time.
    """
    for name in reconciler.silent(batch.now, policy.forget_days * DAY_SECONDS):
        kept = fleet_state.quarantines.get(name)
        by_person = kept is not None and kept.owner_kind != "rule"
        if by_person or name in resting or name in fleet_state.leases_of or name in fleet_state.reserved:
            continue
        with contained(Where.NODE, name):
            rules.forget(batch, name)
            reconciler.forget(batch, name, f"the aggregator: not heard for {policy.forget_days:g} days")
