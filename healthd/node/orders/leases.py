"""
Stores leases and the final reports of orders in one file: they are on disk before they are reported.

A lease lives as long as its workload: a process of this host by its id and start time, a workload that a job scheduler
of the host shows by its name, else any process that holds the devices or any workload that they are given to. It has
a grace period for its start, and a bound where the workload cannot be seen. `judge_lease` is pure; nothing here reads
/proc, except `process_start`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.core.model import Allocation, Lease, OrderReport, OrderStatus
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.occupancy.model import NO_SCHEDULERS, Scheduled, Workload, describe, foreign, read_process
from healthd.node.state import files
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

# Final reports that are stored: an aggregator lists a handful of orders at a time, and drops them within minutes.
MAX_FINAL_REPORTS = 512
MAX_LEASES = 16


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease on this node."""

    lease: Lease
    taken_at: float
    """When it was stored (CLOCK_BOOTTIME)."""
    process_start: int | None = None
    """The start time of its process in clock ticks; None before it was seen."""
    seen_at: float | None = None
    """When its workload was last seen (CLOCK_BOOTTIME); None before it was seen."""
    claimed: bool = True
    """The devices were looked at and nobody else was seen to have them: then it is accepted. Old files do not say."""


@dataclass(frozen=True, kw_only=True)
class SavedLeases:
    """The file. `fates` are final reports by order id, oldest first; for `doubt` see `LeaseStore`."""

    version: int
    boot_id: str | None
    held: tuple[HeldLease, ...]
    fates: dict[str, OrderReport]
    doubt: str = ""


class LeaseStore:
    """
    The leases in force and the final reports of orders. Every change is on disk when its method returns.

    `doubt` says why leases may be missing here, or be over already; it outlives restarts, until `clear_doubt`.
    """

    def __init__(self, path: Path, *, clock: Clock, boot_id: str | None) -> None:
        self._path = path
        self._clock = clock
        self._boot_id = boot_id
        self._held: dict[str, HeldLease] = {}
        self._final_reports: dict[str, OrderReport] = {}
        self._doubt = ""
        try:
            saved = files.read(path, SavedLeases)
        except files.DamagedError as error:
            self._doubt = "the file of the leases was damaged, so a job may have the node"
            aside = files.copy_aside(path)
            log.error(
                "%s: cannot be used (%s); copied to %s, the node counts as allocated until its leases are listed",
                path,
                error,
                aside.name,
            )
            self._try_commit({}, {})
            return
        if saved is None:
            return
        self._final_reports = dict(saved.fates)
        self._doubt = saved.doubt
        if boot_id is None or saved.boot_id is None:
            self._restore_in_doubt(saved.held)
            return
        if saved.boot_id == boot_id:
            # A workload that was seen before has some time to be seen again.
            now = clock.boot()
            self._held = {
                held.lease.id: held if held.seen_at is None else dataclasses.replace(held, seen_at=now)
                for held in saved.held
            }
            return
        for held in saved.held:
            log.info("lease %s of job %s ended: the machine was started again", held.lease.id, held.lease.job)
            self._final_reports[held.lease.id] = OrderReport(
                status=OrderStatus.DONE, message="the machine was started again"
            )

    def _restore_in_doubt(self, saved: Sequence[HeldLease]) -> None:
        """Where it is not known whether this is another boot, the leases stay, and their time counts from now."""
        if not saved:
            return
        now = self._clock.boot()
        self._held = {
            held.lease.id: dataclasses.replace(held, taken_at=now, seen_at=None if held.seen_at is None else now)
            for held in saved
        }
        self._doubt = self._doubt or "it is not known whether the machine was started again since its lease"
        log.warning("the boot id is not known: %d leases are kept, %s", len(saved), self._doubt)
        self._try_commit(self._held, self._final_reports)

    @property
    def doubt(self) -> str:
        """Why an aggregator must list the leases before the node can be free; empty when they are all known."""
        return self._doubt

    def clear_doubt(self) -> None:
        """An aggregator has listed the leases, and all of them are here."""
        self._doubt = ""
        self._try_commit(self._held, self._final_reports)

    @property
    def held(self) -> tuple[HeldLease, ...]:
        """The leases in force."""
        return tuple(self._held.values())

    def with_stamps(self) -> tuple[tuple[Lease, float], ...]:
        """The leases with the CLOCK_BOOTTIME stamps from which their ages count."""
        return tuple((held.lease, held.taken_at) for held in self._held.values())

    def final_report(self, order_id: str) -> OrderReport | None:
        """The final report of an order; None where it has not ended, or that is long ago."""
        return self._final_reports.get(order_id)

    def add(self, lease: Lease) -> None:
        """
        Store a lease that counts from now, and is not claimed yet. Raises OSError when it cannot be stored; then it is
        not in force.
        """
        held = HeldLease(lease=lease, taken_at=self._clock.boot(), claimed=False)
        self._commit({**self._held, lease.id: held}, self._final_reports)

    def note_claimed(self, lease_id: str) -> None:
        """The devices were looked at for a lease. Raises OSError when that cannot be stored."""
        if lease_id in self._held:
            after = dataclasses.replace(self._held[lease_id], claimed=True)
            self._commit({**self._held, lease_id: after}, self._final_reports)

    def release(self, lease_id: str, report: OrderReport) -> None:
        """End a lease, with its final report."""
        left = {key: held for key, held in self._held.items() if key != lease_id}
        self._try_commit(left, {**self._final_reports, lease_id: report})

    def add_final_report(self, order_id: str, report: OrderReport) -> None:
        """Store the final report of an order."""
        self._try_commit(self._held, {**self._final_reports, order_id: report})

    def note_seen(self, lease_id: str, *, process_start: int | None) -> None:
        """The workload of a lease was seen now. That is written to disk only the first time."""
        before = self._held[lease_id]
        after = dataclasses.replace(before, seen_at=self._clock.boot(), process_start=process_start)
        held = {**self._held, lease_id: after}
        if before.seen_at is None or before.process_start != process_start:
            self._try_commit(held, self._final_reports)
        else:
            self._held = held

    def _commit(self, held: dict[str, HeldLease], fates: dict[str, OrderReport]) -> None:
        bounded = dict(list(fates.items())[-MAX_FINAL_REPORTS:])
        saved = SavedLeases(
            version=1, boot_id=self._boot_id, held=tuple(held.values()), fates=bounded, doubt=self._doubt
        )
        files.save(self._path, saved, durable=True)
        self._held, self._final_reports = held, bounded

    def _try_commit(self, held: dict[str, HeldLease], fates: dict[str, OrderReport]) -> None:
        """As `_commit`; what has ended is over even when the disk is full, and a restart finds that out again."""
        try:
            self._commit(held, fates)
        except OSError as error:
            log.error("%s: cannot be written (%s); free some space", self._path, error.strerror)
            self._held, self._final_reports = held, dict(list(fates.items())[-MAX_FINAL_REPORTS:])


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What can be seen of workloads now."""

    start_of: Callable[[int], int | None]
    """The start time of a process in clock ticks; None when there is no such process."""
    holders: Sequence[str] | None
    """The processes that held devices at `surveyed_at`; None where they cannot be seen."""
    surveyed_at: float
    """When the devices were last looked at (CLOCK_BOOTTIME)."""
    jobs_hold: bool = True
    """False on plain CPUs: a job need not open a device there, so free devices mean nothing before one was held."""
    scheduled: Scheduled = NO_SCHEDULERS
    """The allocations of the host's job schedulers."""


@dataclass(frozen=True, kw_only=True)
class LeaseFate:
    """Whether a lease goes on: `ended` says why it is over (empty: it goes on); `seen` that its workload was seen."""

    ended: str
    seen: bool = False
    process_start: int | None = None


def judge_lease(held: HeldLease, seen: Observations, *, now: float, settle_seconds: float) -> LeaseFate:
    """Whether a lease goes on: pure."""
    lease = held.lease
    age = now - held.taken_at
    pid = process_of(lease.workload)
    if pid is not None:
        start = seen.start_of(pid)
        if start is not None and held.process_start in (None, start):
            return LeaseFate(ended="", seen=True, process_start=start)
        if held.process_start is not None:
            return LeaseFate(ended=f"process {pid} has ended")
        return _unseen(lease, age, f"process {pid} was not seen")
    if (known := _by_scheduler(held, seen, age, settle_seconds)) is not None:
        return known
    if seen.holders or any(reading.workloads for reading in seen.scheduled.readings):
        return LeaseFate(ended="", seen=True)  # a job may compile for long before it opens a device
    if seen.holders is None or (held.seen_at is None and not seen.jobs_hold):
        return LeaseFate(ended="" if age < lease.max_seconds else f"its bound of {lease.max_seconds:.0f} s is over")
    # Only the time until the last survey counts: after a long sleep of this process nothing is known about the rest.
    if held.seen_at is None:
        return _unseen(lease, seen.surveyed_at - held.taken_at, "no process took the devices")
    free = seen.surveyed_at - held.seen_at
    return LeaseFate(ended="" if free < settle_seconds else f"the devices have been free for {free:.0f} s")


def _by_scheduler(held: HeldLease, seen: Observations, age: float, settle_seconds: float) -> LeaseFate | None:
    """By the scheduler that knows workloads of this kind; None where there is none, or it cannot see them."""
    lease = held.lease
    name = lease.workload or ""
    reading = seen.scheduled.of(name)
    if reading is None:
        return None
    if reading.shows(name):
        return LeaseFate(ended="", seen=True)
    if reading.remembers(name):
        return LeaseFate(ended="" if age < lease.max_seconds else f"its bound of {lease.max_seconds:.0f} s is over")
    if reading.unseen:
        return None
    if held.seen_at is None:
        return _unseen(lease, seen.scheduled.read_at - held.taken_at, f"{name} was not seen")
    # A scheduler that was just restarted may not know its workloads yet.
    gone = seen.scheduled.read_at - held.seen_at
    return LeaseFate(ended="" if gone < settle_seconds else f"{name} has ended")


def _unseen(lease: Lease, age: float, what: str) -> LeaseFate:
    grace = min(lease.grace_seconds, lease.max_seconds)
    return LeaseFate(ended="" if age < grace else f"{what} within {grace:.0f} s")


def others_than(lease: Lease, claims: Sequence[Allocation], workloads: Sequence[Workload]) -> list[Allocation]:
    """
    Who is seen to have devices beside the workload of a lease: processes, and jobs of a scheduler.

    Where that cannot be seen, a gate takes the node for busy. It grants a lease there only after a hook in the
    job's own container has looked at the devices.
    """
    own = f"pid {process_of(lease.workload)} "
    beside = foreign(claims, workloads, {lease.workload, lease.job})
    return [one for one in beside if one.by in ("process", "scheduler") and own not in f"{one.holder} "]


def process_of(workload: str | None) -> int | None:
    """The process id in `pid:N`; None for another kind of workload or none."""
    kind, _, number = (workload or "").partition(":")
    known = kind == "pid" and number.isdecimal() and len(number) < 11 and 0 < int(number) < 2**31
    return int(number) if known else None


def process_start(proc: Path, pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when it is gone or a zombie."""
    process = read_process(proc, pid)
    return None if process is None or process.zombie else process.started


# Gives the devices of the node to a lease: stores it first, so that no probe starts, then looks at who has them.


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
