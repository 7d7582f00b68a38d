"""Gives the devices of the node to a lease: stores it first, so that no probe starts, then looks at who has them."""

from __future__ import annotations

import asyncio

from healthd.core.model import Lease, OrderReport, OrderStatus
from healthd.node.checks.scheduler import Scheduler
from healthd.node.occupancy.model import describe
from healthd.node.orders.leases import LeaseStore, others_than
from healthd.node.state.store import NodeStore

LOOKS, LOOK_AGAIN_SECONDS = 10, 0.5  # until a node with processes on its devices refuses a lease
# Looks that fail until it does. One may on a busy host; each may take 10 s, and a lease is confirmed within 30 s.
FAILED_LOOKS = 2


async def claim_devices(lease: Lease, *, leases: LeaseStore, store: NodeStore, scheduler: Scheduler) -> OrderReport:
    """
    Accepted once it is stored that nobody else was seen to have the devices; else refused, and the lease is over.

    One that is stored and was not accepted yet, such as one that a restart came between, is looked at again. Raises
    OSError when something cannot be stored.
    """
    if other := [held.lease for held in leases.held if held.lease.id != lease.id]:
        why = f"job {other[0].job} has a lease on the node"
    else:
        if not leases.held:
            leases.add(lease)
            store.set_leases(leases.with_stamps())
        await scheduler.stop_active(f"job {lease.job} gets the node")
        why = await _taken(lease, leases, store, scheduler)
    if not why:
        leases.note_claimed(lease.id)
        return OrderReport(status=OrderStatus.ACCEPTED)
    report = OrderReport(status=OrderStatus.REFUSED, message=why)
    if any(held.lease.id == lease.id for held in leases.held):
        leases.release(lease.id, report)
        store.set_leases(leases.with_stamps())
    return report


async def _taken(lease: Lease, leases: LeaseStore, store: NodeStore, scheduler: Scheduler) -> str:
    """Why a lease cannot have the devices: somebody was seen to have them, or looks failed; empty when it can."""
    why, failures = "", 0
    for look in range(LOOKS):  # the ranks of a validation, or of the job before, may be about to end
        await asyncio.sleep(LOOK_AGAIN_SECONDS if look else 0)
        failed = await scheduler.refresh()
        if leases.doubt:
            return ""  # it may be in force from before, and its job running
        if failed:
            why, failures = f"the devices could not be looked at: {failed}", failures + 1
            if failures == FAILED_LOOKS:
                break
            continue
        others = others_than(lease, store.allocated, store.scheduled.workloads)
        why = f"the devices are taken: {describe(others)}" if others else ""
        if all(one.by == "scheduler" for one in others):
            break
    return why
