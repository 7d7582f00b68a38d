"""
Stores leases and the final reports of orders in one file: they are on disk before they are reported.

A lease lives as long as its workload: a pod of Kubernetes, a process of this host by its id and start time, a workload
that a job scheduler of the host shows by its name, else any process that holds the devices or any workload that they
are given to. It has a grace period for its start, and a bound for the time in which the workload cannot be seen.
`judge_lease` is pure; nothing here reads /proc, except `process_start` and `ProcessFinder`.

`claim_devices` stores a lease first, so that no probe starts, and then looks at who has the devices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.core.model import Allocation, Lease, OrderReport, OrderStatus
from healthd.core.text import span
from healthd.core.workload import KUEUE, Pod, Process, pod_of, process_of
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.occupancy.model import (
    NO_SCHEDULERS,
    Scheduled,
    Workload,
    describe,
    foreign,
    read_process,
    read_processes,
)
from healthd.node.occupancy.watching import PodFate, unknown_fate
from healthd.node.state import files
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

# Final reports that are stored: an aggregator lists a handful of orders at a time, and drops them within minutes.
MAX_FINAL_REPORTS = 512
MAX_LEASES = 16
LOOKS, LOOK_AGAIN_SECONDS = 10, 0.5  # until a node with processes on its devices refuses a lease
# Looks that fail until it does. One may on a busy host; each may take 10 s, and a lease is confirmed within 30 s.
FAILED_LOOKS = 2


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease on this node."""

    lease: Lease
    taken_at: float
    """When it was stored (CLOCK_BOOTTIME)."""
    process_start: int | None = None
    """The start time of its process in clock ticks; None before it was seen."""
    pod_uid: str | None = None
    """The UID of its pod; None before it was seen."""
    seen_by: tuple[str, ...] = ()
    """Who has shown its pod: only such a source can tell that it is gone."""
    seen_at: float | None = None
    """When its workload was last seen (CLOCK_BOOTTIME); None before it was seen."""
    claimed: bool = True
    """The devices were looked at and nobody else was seen to have them: then it is accepted. Old files do not say."""

    @property
    def pod(self) -> Pod | None:
        """Its pod, with the UID that the hook told or that was seen first; None where it is none."""
        pod = pod_of(self.lease.workload)
        return pod if pod is None or pod.uid is not None else dataclasses.replace(pod, uid=self.pod_uid)


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
            self._doubt = "the lease file was damaged, so a job may have the node"
            aside = files.copy_aside(path)
            log.error(
                "%s: cannot be used (%s); copied to %s; the node counts as allocated until its leases are listed",
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
            log.info("lease %s of job %s ended: the machine was restarted", held.lease.id, held.lease.job)
            self._final_reports[held.lease.id] = OrderReport(
                status=OrderStatus.DONE, message="the machine was restarted"
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
        self._doubt = self._doubt or "it is unknown whether the machine was restarted since its lease"
        log.warning("the boot id is unknown: %d leases are kept, %s", len(saved), self._doubt)
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
        self._try_commit(self._held, {**self._final_reports, order_id: report})

    def note_seen(self, lease_id: str, fate: LeaseFate) -> None:
        """The workload of a lease was seen now. It is written to disk only as what was not known of it before."""
        before = self._held[lease_id]
        seen_by = tuple(dict.fromkeys((*before.seen_by, *fate.seen_by)))
        known = dataclasses.replace(
            before, process_start=fate.process_start, pod_uid=fate.pod_uid or before.pod_uid, seen_by=seen_by
        )
        after = dataclasses.replace(known, seen_at=self._clock.boot())
        held = {**self._held, lease_id: after}
        if before.seen_at is None or known != before:
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


# --- devices for a lease ----------------------------------------------------------------------------------------------


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
        await scheduler.stop_active(f"job {lease.job} is about to get the node")
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
            why, failures = f"the devices could not be checked: {failed}", failures + 1
            if failures == FAILED_LOOKS:
                break
            continue
        others = others_than(lease, store.allocated, store.scheduled.workloads)
        why = f"the devices are taken: {describe(others)}" if others else ""
        if all(one.by == "scheduler" for one in others):
            break
    return why


def others_than(lease: Lease, claims: Sequence[Allocation], workloads: Sequence[Workload]) -> list[Allocation]:
    """
    Who is seen to have devices beside the workload of a lease: processes, and jobs of a scheduler.

    Where that cannot be seen, a gate takes the node for busy. It grants a lease there only after a hook in the
    job's own container has looked at the devices.
    """
    process = process_of(lease.workload)
    own = "" if process is None else f"pid {process.pid} "
    beside = foreign(claims, workloads, {lease.workload, lease.job})
    return [one for one in beside if one.by in ("process", "scheduler") and not (own and own in f"{one.holder} ")]


# --- how a lease ends -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What can be seen of workloads now."""

    start_of: Callable[[Process], int | None]
    """The start time of a process in clock ticks; None when there is no such process to be seen."""
    holders: Sequence[str] | None
    """The processes that held devices at `surveyed_at`; None where they cannot be seen."""
    surveyed_at: float
    """When the devices were last looked at (CLOCK_BOOTTIME)."""
    jobs_hold: bool = True
    """False on plain CPUs: a job need not open a device there, so free devices mean nothing before one was held."""
    scheduled: Scheduled = NO_SCHEDULERS
    """The allocations of the host's job schedulers."""
    fate_of: Callable[[Pod, tuple[str, ...]], PodFate] = unknown_fate
    """What is known of a pod, by who has shown it until now."""


@dataclass(frozen=True, kw_only=True)
class LeaseFate:
    """
    Whether a lease goes on: `ended` says why it is over (empty: it goes on); `seen` that its workload was seen.

    The rest is what was seen of it: the start of its process, the UID of its pod and who shows that.
    """

    ended: str
    seen: bool = False
    process_start: int | None = None
    pod_uid: str | None = None
    seen_by: tuple[str, ...] = ()


def judge_lease(held: HeldLease, seen: Observations, *, now: float, settle_seconds: float) -> LeaseFate:
    """Whether a lease goes on: pure."""
    known = _by_pod(held, seen) or _by_process(held, seen, now) or _by_scheduler(held, seen, now, settle_seconds)
    if known is not None:
        return known
    if (held.lease.workload or "").startswith(KUEUE) and not seen.holders:
        return _while_unseen(held, now)  # its pods come after the lease, and again after an eviction
    if seen.holders or any(reading.workloads for reading in seen.scheduled.readings):
        return LeaseFate(ended="", seen=True)  # a job may compile for long before it opens a device
    if seen.holders is None or (held.seen_at is None and not seen.jobs_hold) or held.seen_by:
        return _while_unseen(held, now)
    # Only the time until the last survey counts: after a long sleep of this process nothing is known about the rest.
    if held.seen_at is None:
        return _unseen(held.lease, seen.surveyed_at - held.taken_at, "no process took the devices")
    free = seen.surveyed_at - held.seen_at
    return LeaseFate(ended="" if free < settle_seconds else f"the devices have been free for {free:.0f} s")


def _by_pod(held: HeldLease, seen: Observations) -> LeaseFate | None:
    """By those who see pods; None where its workload is no pod, and where nobody can tell."""
    pod = held.pod
    if pod is None:
        return None
    fate = seen.fate_of(pod, held.seen_by)
    if fate.ended:
        return LeaseFate(ended=fate.ended)
    return LeaseFate(ended="", seen=True, pod_uid=fate.uid, seen_by=fate.seen_by) if fate.there else None


def _by_process(held: HeldLease, seen: Observations, now: float) -> LeaseFate | None:
    """By the process table; None where its workload is no process, or one of a PID namespace that is not seen here."""
    process = process_of(held.lease.workload)
    if process is None:
        return None
    age = now - held.taken_at
    if process.started is not None and held.process_start is None and age >= held.lease.grace_seconds:
        return None  # looking for it costs a walk through all processes
    start = seen.start_of(process)
    if start is not None and held.process_start in (None, start):
        return LeaseFate(ended="", seen=True, process_start=start)
    if held.process_start is not None:
        return LeaseFate(ended=f"process {process.pid} has ended")
    if process.started is not None:
        return None
    return _unseen(held.lease, age, f"process {process.pid} was not seen")


def _while_unseen(held: HeldLease, now: float) -> LeaseFate:
    """Nobody can tell whether the job goes on: the lease lasts for its time from when the job was last seen."""
    most = held.lease.max_seconds
    since = held.taken_at if held.seen_at is None else held.seen_at
    return LeaseFate(
        ended="" if now - since < most else (f"its time of {span(most)} is over, and no node can observe its job")
    )


def _by_scheduler(held: HeldLease, seen: Observations, now: float, settle_seconds: float) -> LeaseFate | None:
    """By the scheduler that knows workloads of this kind; None where there is none, or it cannot see them."""
    lease = held.lease
    name = lease.workload or ""
    reading = seen.scheduled.of(name)
    if reading is None:
        return None
    if reading.shows(name):
        return LeaseFate(ended="", seen=True)
    if reading.has_ended(name):
        return LeaseFate(ended=f"{name} has ended")
    if reading.remembers(name):
        return _while_unseen(held, now)
    if reading.unseen or held.pod is not None:  # a pod need not have devices to be there: see `_by_pod`
        return None
    if held.seen_at is None:
        return _unseen(lease, seen.scheduled.read_at - held.taken_at, f"{name} was not seen")
    # A scheduler that was just restarted may not know its workloads yet.
    gone = seen.scheduled.read_at - held.seen_at
    return LeaseFate(ended="" if gone < settle_seconds else f"{name} has ended")


def _unseen(lease: Lease, age: float, what: str) -> LeaseFate:
    grace = min(lease.grace_seconds, lease.max_seconds)
    return LeaseFate(ended="" if age < grace else f"{what} within {grace:.0f} s")


# --- processes --------------------------------------------------------------------------------------------------------


def process_start(proc: Path, pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when it is gone or a zombie."""
    process = read_process(proc, pid)
    return None if process is None or process.zombie else process.started


class ProcessFinder:
    """
    Finds processes by what they are called in their own PID namespace.

    One that tells its start time is looked for among all processes, once: from then on by the id that it has here.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._here: dict[Process, int] = {}

    def start_of(self, process: Process) -> int | None:
        """Its start time in clock ticks after boot; None when it is gone, a zombie, or not to be seen here."""
        if process.started is None:
            return process_start(self._proc, process.pid)
        for pid in (self._here.get(process), process.pid):
            if pid is not None and process_start(self._proc, pid) == process.started:
                return process.started
        if self._here.pop(process, None) is not None:
            return None
        for one in read_processes(self._proc):
            if one.started == process.started and not one.zombie and process.pid in _ids(self._proc, one.pid):
                self._here[process] = one.pid
                return process.started
        return None


def _ids(proc: Path, pid: int) -> tuple[int, ...]:
    """The ids of a process in all PID namespaces that it is in; source: proc_pid_status(5), NSpid."""
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return ()
    row = next((line for line in text.splitlines() if line.startswith("NSpid:")), "")
    return tuple(int(word) for word in row.split()[1:] if word.isdecimal())
