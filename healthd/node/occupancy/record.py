"""What a job scheduler says of its own workloads on this host: records alone."""

from __future__ import annotations

from dataclasses import dataclass

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
