"""Records of what the host's job schedulers have allocated, and who has the devices: pure. What is unknown is taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from healthd.core.model import Allocation, Lease

# Holders listed one by one; on a node with 64 devices one job is otherwise 64 lines in every outlet.
MAX_HOLDERS = 8
# Beginning of a workload's name, as leases and gates write it -> the scheduler that can see such workloads.
KINDS = {"pod": "Kubernetes", "ecs": "ECS", "slurm": "Slurm"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """
    Something that the scheduler has given this host's devices to.

    `name` is what a lease or a gate calls it: `slurm:123`, `pod:NAMESPACE/NAME`, `ecs:TASK-ARN`. `aliases` are other
    names by which it may be asked for or ignored. `uses` says what it has, for people; empty where that is not told.
    """

    name: str
    aliases: tuple[str, ...] = ()
    uses: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """
    One look at one scheduler.

    `workloads` are those seen now, without our own; None where nothing at all could be read. `blind` says in one line
    why there may be more than was seen and what to do; empty when all is seen. `remembered` were there when the
    scheduler last spoke: a silent one starts nothing, but does not end anything either.
    """

    scheduler: str
    workloads: tuple[Workload, ...] | None
    blind: str = ""
    remembered: tuple[Workload, ...] = ()

    def shows(self, name: str) -> bool:
        """Whether that workload is seen now."""
        return any(name in workload.names for workload in self.workloads or ())

    def remembers(self, name: str) -> bool:
        """Whether that workload was there when the scheduler fell silent."""
        return any(name in workload.names for workload in self.remembered)


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """All schedulers of the host at `read_at` by CLOCK_BOOTTIME; `readings` is empty where there is none."""

    readings: tuple[Reading, ...]
    read_at: float

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What the devices are given to, as far as anybody says."""
        return tuple(one for reading in self.readings for one in (*(reading.workloads or ()), *reading.remembered))

    @property
    def blind(self) -> str:
        """Why allocations cannot be seen, in one line; empty when all can."""
        return "; ".join(reading.blind for reading in self.readings if reading.blind)

    def of(self, workload: str | None) -> Reading | None:
        """The scheduler that would know this workload; None where there is no such scheduler on the host."""
        wanted = KINDS.get((workload or "").partition(":")[0])
        return next((reading for reading in self.readings if reading.scheduler == wanted), None)


NONE_THERE = Scheduled(readings=(), read_at=0.0)


def allocations(
    *,
    surveyed: bool,
    holders: Sequence[str] | None,
    leases: Sequence[Lease],
    scheduled: Sequence[str] = (),
    blind: str = "",
    doubt: str = "",
) -> tuple[Allocation, ...]:
    """
    All claims on the devices; empty means free.

    `surveyed` is false until the devices have been looked at for the first time. `holders` are processes other than our
    own probes, None where they cannot be seen. `scheduled` are workloads that the host's schedulers have here, by the
    names that gates and leases use; `blind` is why there may be more of them, empty when all are seen. `doubt` is why
    there may be leases that are not known here; empty when there are none.
    """
    found: list[Allocation] = []
    if not surveyed:
        found.append(Allocation(by="unseen", holder="the devices have not been looked at yet"))
    elif holders is None:
        why = f"; nor what a scheduler has given away: {blind}" if blind else ""
        found.append(Allocation(by="unseen", holder=f"it cannot be seen who holds the devices{why}"))
    else:
        found += _bounded("process", holders)
    found += _bounded("scheduler", scheduled)
    found += [
        Allocation(by="lease", holder=f"job {lease.job} attempt {lease.attempt} (gate {lease.gate})")
        for lease in leases
    ]
    if doubt:
        found.append(Allocation(by="unseen", holder=doubt))
    return tuple(found)


def foreign(
    claims: Sequence[Allocation], workloads: Sequence[Workload], asking: Collection[str | None]
) -> tuple[Allocation, ...]:
    """
    The claims without those by which the host's schedulers have given the devices to the jobs that ask, by their names:
    a hook runs inside of its job's allocation.
    """
    own = {workload.name for workload in workloads if not set(asking).isdisjoint(workload.names)}
    return tuple(claim for claim in claims if not (claim.by == "scheduler" and claim.holder in own))


def _bounded(by: str, holders: Sequence[str]) -> list[Allocation]:
    """One claim each, at most MAX_HOLDERS and one that says how many more."""
    found = [Allocation(by=by, holder=holder) for holder in holders[:MAX_HOLDERS]]
    if len(holders) > MAX_HOLDERS:
        found.append(Allocation(by=by, holder=f"and {len(holders) - MAX_HOLDERS} more"))
    return found


def describe(claims: Sequence[Allocation]) -> str:
    """The first claim and how many more there are, for one line."""
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return f"{claims[0].holder}{more}" if claims else "nobody"
