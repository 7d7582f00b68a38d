"""
Leases and the fates of orders: on disk before anybody is told of them, in one file, so that neither is half done.

A lease lives as long as its workload: a process of this host by its id and start time, what a job scheduler of the
host shows by its name, else whoever holds the devices or has been given them; with a grace for its start and a bound
for what nobody can see. Deciding is pure (`fate`); nothing here reads /proc.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.core.model import Lease, OrderReport, OrderStatus
from healthd.node.clock import Clock
from healthd.node.occupancy import NONE_THERE, Scheduled
from healthd.node.state import files

log = logging.getLogger(__name__)

# Fates remembered: an aggregator lists a handful of orders at a time, and forgets them within minutes.
MAX_FATES = 512
MAX_LEASES = 16


@dataclass(frozen=True, kw_only=True)
class Held:
    """
    A lease on this node, since `taken_at` by CLOCK_BOOTTIME.

    `issuer` is the database that listed it last: only that one can cancel it by leaving it out. `process_start` is the
    start time of its process in clock ticks once it was seen; `seen_at` when its workload was last seen, None never.
    """

    lease: Lease
    taken_at: float
    issuer: str
    process_start: int | None = None
    seen_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class SavedLedger:
    """The file. `fates` are final reports by order id, oldest first; `doubt` is that of the ledger."""

    version: int
    boot_id: str | None
    held: tuple[Held, ...]
    fates: dict[str, OrderReport]
    doubt: str = ""


class Ledger:
    """
    The leases in force and the final reports of orders. Every change is on disk when its method returns.

    `doubt` says why leases may be missing here, or be over already; it outlives restarts until `certain`.
    """

    def __init__(self, path: Path, *, clock: Clock, boot_id: str | None) -> None:
        self._path = path
        self._clock = clock
        self._boot_id = boot_id
        self._held: dict[str, Held] = {}
        self._fates: dict[str, OrderReport] = {}
        self._doubt = ""
        try:
            saved = files.read(path, SavedLedger)
        except files.DamagedError as error:
            self._doubt = "the file of the leases was damaged, so a job may have the node"
            aside = files.keep_copy(path)
            log.error(
                "%s: cannot be used (%s); kept as %s, the node counts as taken until an aggregator lists its leases",
                path,
                error,
                aside.name,
            )
            self._try_commit({}, {})
            return
        if saved is None:
            return
        self._fates = dict(saved.fates)
        self._doubt = saved.doubt
        if boot_id is None or saved.boot_id is None:
            self._keep_unsure(saved.held)
            return
        if saved.boot_id == boot_id:
            # Whoever was there is given the time to be seen again.
            now = clock.boot()
            self._held = {
                held.lease.id: held if held.seen_at is None else dataclasses.replace(held, seen_at=now)
                for held in saved.held
            }
            return
        for held in saved.held:
            log.info("lease %s of job %s ended: the machine was started again", held.lease.id, held.lease.job)
            self._fates[held.lease.id] = OrderReport(status=OrderStatus.DONE, message="the machine was started again")

    def _keep_unsure(self, saved: Sequence[Held]) -> None:
        """Whether this is another boot is not known: no lease ends for that, and its time counts from now."""
        if not saved:
            return
        now = self._clock.boot()
        self._held = {
            held.lease.id: dataclasses.replace(held, taken_at=now, seen_at=None if held.seen_at is None else now)
            for held in saved
        }
        self._doubt = self._doubt or "it cannot be told whether the machine was started again since its lease"
        log.warning("the boot id is not known: %d leases are kept, %s", len(saved), self._doubt)
        self._try_commit(self._held, self._fates)

    @property
    def doubt(self) -> str:
        """Why an aggregator must list the leases before the node can be free; empty when they are known."""
        return self._doubt

    def certain(self) -> None:
        """An aggregator has listed the leases, and all of them are here."""
        self._doubt = ""
        self._try_commit(self._held, self._fates)

    @property
    def held(self) -> tuple[Held, ...]:
        """The leases in force."""
        return tuple(self._held.values())

    def stamped(self) -> tuple[tuple[Lease, float], ...]:
        """The leases with the stamps from which their ages count."""
        return tuple((held.lease, held.taken_at) for held in self._held.values())

    def fate(self, order_id: str) -> OrderReport | None:
        """How an order ended, as far as that is remembered."""
        return self._fates.get(order_id)

    def take(self, lease: Lease, issuer: str) -> None:
        """Store a lease that counts from now. Raises OSError when it cannot be stored; then it is not taken."""
        now = self._clock.boot()
        self._commit({**self._held, lease.id: Held(lease=lease, taken_at=now, issuer=issuer)}, self._fates)

    def listed(self, lease_ids: Sequence[str], issuer: str) -> None:
        """A database lists these leases among its orders: from now on they are its to cancel."""
        changed = {
            lease_id: dataclasses.replace(self._held[lease_id], issuer=issuer)
            for lease_id in lease_ids
            if lease_id in self._held and self._held[lease_id].issuer != issuer
        }
        if changed:
            self._try_commit({**self._held, **changed}, self._fates)

    def release(self, lease_id: str, report: OrderReport) -> None:
        """The lease is over, and that is its fate."""
        left = {key: held for key, held in self._held.items() if key != lease_id}
        self._try_commit(left, {**self._fates, lease_id: report})

    def settle(self, order_id: str, report: OrderReport) -> None:
        """An order has ended so, for good."""
        self._try_commit(self._held, {**self._fates, order_id: report})

    def seen(self, lease_id: str, *, process_start: int | None) -> None:
        """The workload of a lease was seen now. On disk only when it is news."""
        before = self._held[lease_id]
        after = dataclasses.replace(before, seen_at=self._clock.boot(), process_start=process_start)
        held = {**self._held, lease_id: after}
        if before.seen_at is None or before.process_start != process_start:
            self._try_commit(held, self._fates)
        else:
            self._held = held

    def _commit(self, held: dict[str, Held], fates: dict[str, OrderReport]) -> None:
        bounded = dict(list(fates.items())[-MAX_FATES:])
        saved = SavedLedger(
            version=1, boot_id=self._boot_id, held=tuple(held.values()), fates=bounded, doubt=self._doubt
        )
        files.save(self._path, saved, durable=True)
        self._held, self._fates = held, bounded

    def _try_commit(self, held: dict[str, Held], fates: dict[str, OrderReport]) -> None:
        """As `_commit`; what ends is over even when the disk is full, and a restart finds that out again."""
        try:
            self._commit(held, fates)
        except OSError as error:
            log.error("%s: cannot be written (%s); free some space", self._path, error.strerror)
            self._held, self._fates = held, dict(list(fates.items())[-MAX_FATES:])


@dataclass(frozen=True, kw_only=True)
class Sight:
    """
    What can be seen of workloads now. `start_of` gives the start time of a process in clock ticks, None when there is
    none; `holders` are processes that held devices at `looked_at`, None where that cannot be seen. `jobs_hold` is false
    on plain CPUs: a job need not open a device there, so that nobody holds one says nothing before somebody did.
    `scheduled` is what the host's job schedulers have given away.
    """

    start_of: Callable[[int], int | None]
    holders: Sequence[str] | None
    looked_at: float
    jobs_hold: bool = True
    scheduled: Scheduled = NONE_THERE


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of a lease: `ended` says why it is over (empty: it goes on); `seen` that its workload is there."""

    ended: str
    seen: bool = False
    process_start: int | None = None


def fate(held: Held, sight: Sight, *, now: float, settle_seconds: float) -> Fate:
    """Whether a lease goes on: pure."""
    lease = held.lease
    age = now - held.taken_at
    pid = process_of(lease.workload)
    if pid is not None:
        start = sight.start_of(pid)
        if start is not None and held.process_start in (None, start):
            return Fate(ended="", seen=True, process_start=start)
        if held.process_start is not None:
            return Fate(ended=f"process {pid} has ended")
        return _unseen(lease, age, f"process {pid} was not seen")
    if (known := _by_scheduler(held, sight, age, settle_seconds)) is not None:
        return known
    if sight.holders or any(reading.workloads for reading in sight.scheduled.readings):
        return Fate(ended="", seen=True)  # a job may compile for long before it opens a device
    if sight.holders is None or (held.seen_at is None and not sight.jobs_hold):
        return Fate(ended="" if age < lease.max_seconds else f"its bound of {lease.max_seconds:.0f} s is over")
    # Only a look counts: after a long sleep of this process the last one says nothing about the time since.
    if held.seen_at is None:
        return _unseen(lease, sight.looked_at - held.taken_at, "nobody took the devices")
    free = sight.looked_at - held.seen_at
    return Fate(ended="" if free < settle_seconds else f"the devices have been free for {free:.0f} s")


def _by_scheduler(held: Held, sight: Sight, age: float, settle_seconds: float) -> Fate | None:
    """By the word of the scheduler that would know the workload by its name; None where there is none that can say."""
    lease = held.lease
    name = lease.workload or ""
    reading = sight.scheduled.of(name)
    if reading is None:
        return None
    if reading.shows(name):
        return Fate(ended="", seen=True)
    if reading.remembers(name):
        return Fate(ended="" if age < lease.max_seconds else f"its bound of {lease.max_seconds:.0f} s is over")
    if reading.blind:
        return None
    if held.seen_at is None:
        return _unseen(lease, sight.scheduled.read_at - held.taken_at, f"{name} was not seen")
    # A scheduler that was just restarted may not know its workloads yet.
    gone = sight.scheduled.read_at - held.seen_at
    return Fate(ended="" if gone < settle_seconds else f"{name} has ended")


def _unseen(lease: Lease, age: float, what: str) -> Fate:
    grace = min(lease.grace_seconds, lease.max_seconds)
    return Fate(ended="" if age < grace else f"{what} within {grace:.0f} s")


def process_of(workload: str | None) -> int | None:
    """The process id in `pid:N`; None for another kind of workload or none."""
    kind, _, number = (workload or "").partition(":")
    known = kind == "pid" and number.isdecimal() and len(number) < 11 and 0 < int(number) < 2**31
    return int(number) if known else None


def process_start(proc: Path, pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when it is gone or a zombie."""
    try:
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" and fields[19].isdecimal() else None


def by_id(held: Sequence[Held]) -> Mapping[str, Held]:
    """Leases by their ids."""
    return {one.lease.id: one for one in held}
