"""
Records of what the host's job schedulers have allocated, and of the devices' users. Pure. Unknown counts as in use.

Also here:

- reads the process table as far as schedulers show in it: names, parents, and the arguments of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.core.model import Allocation, Lease
from healthd.core.workload import names_of
from healthd.node.settings import AllocationSettings

# More holders are summed up: on a node with 64 devices one job would be 64 lines in every outlet.
MAX_HOLDERS = 8

MAX_READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """All schedulers of the host at `read_at` (CLOCK_BOOTTIME); `readings` is empty where there is none."""

    readings: tuple[Reading, ...]
    read_at: float

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The workloads that have devices, as far as the schedulers say."""
        return tuple(one for reading in self.readings for one in (*(reading.workloads or ()), *reading.remembered))

    @property
    def unseen(self) -> str:
        """Why allocations cannot be seen, in one line; empty when all can."""
        return "; ".join(reading.unseen for reading in self.readings if reading.unseen)

    def of(self, workload: str | None) -> Reading | None:
        """The reading of the scheduler of this workload; None where there is no such scheduler on the host."""
        kind, separator, _ = (workload or "").partition(":")
        return next((reading for reading in self.readings if separator and reading.kind == kind), None)


@dataclass(frozen=True, kw_only=True)
class JobScheduler:
    """
    A job scheduler that gives devices of hosts to jobs. An integration names it as `job_scheduler` in its descriptor.

    It is on a host where one of its processes runs, one of its paths exists, or one of its variables is set.
    """

    name: str
    """As people know it, and as readings have it."""

    kind: str
    """How the names of its workloads begin: `slurm` of `slurm:123`."""

    read: Callable[[Look], Reading]
    """Reads its allocations within `timeout_seconds` of the settings, in a thread. Raises nothing."""

    own: Callable[[Path, Mapping[str, str]], frozenset[str]] = lambda root, environ: frozenset()
    """Names of the workload that this process belongs to, by the files below a root and its variables."""

    processes: tuple[str, ...] = ()
    """Names as the kernel has them: cut after 15 characters."""

    paths: tuple[str, ...] = ()
    """Files and folders below the host's root."""

    variables: tuple[str, ...] = ()
    """What it sets in its containers, where nothing else of the host may be visible."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at one scheduler."""

    scheduler: str
    kind: str = ""
    """How the names of its workloads begin: `slurm` of `slurm:123`."""
    workloads: tuple[Workload, ...] | None
    """Those that are seen now, without our own; None where nothing could be read."""
    unseen: str = ""
    """Why there may be more workloads, and what to do, in one line; empty when all are seen."""
    remembered: tuple[Workload, ...] = ()
    """Those that were there when the scheduler last answered: one that does not answer ends nothing."""
    ended: tuple[Workload, ...] = ()
    """Those that the scheduler knows to have ended; it need not tell of any."""

    def shows(self, name: str) -> bool:
        """Whether that workload is seen now."""
        return _among(name, self.workloads or ())

    def has_ended(self, name: str) -> bool:
        """Whether the scheduler knows that this workload has ended."""
        return _among(name, self.ended)

    def remembers(self, name: str) -> bool:
        """Whether that workload was there when the scheduler last answered."""
        return _among(name, self.remembered)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a scheduler may be read with. `processes` are those of the host, whose files are below `root`."""

    root: Path
    processes: Sequence[Process]
    environ: Mapping[str, str]
    settings: AllocationSettings


def allocations(
    *,
    surveyed: bool,
    holders: Sequence[str] | None,
    leases: Sequence[Lease],
    scheduled: Sequence[str] = (),
    unseen: str = "",
    doubt: str = "",
) -> tuple[Allocation, ...]:
    """
    All allocations of the devices; empty when they are free.

    `surveyed` is false before the first survey. `holders` are processes other than our own probes, None where they
    cannot be seen. `scheduled` are the names of workloads of the host's schedulers; `unseen` is why there may be more
    of them, empty when all are seen. `doubt` is why there may be unknown leases; empty when all are known.
    """
    found: list[Allocation] = []
    if not surveyed:
        found.append(Allocation(by="unseen", holder="the devices have not been checked yet"))
    elif holders is None:
        why = f"; what a scheduler has allocated cannot be seen either: {unseen}" if unseen else ""
        found.append(Allocation(by="unseen", holder=f"holders of the devices cannot be seen{why}"))
    else:
        found += _bounded("process", holders)
    found += _bounded("scheduler", scheduled)
    found += [
        Allocation(by="lease", holder=f"job {lease.job} attempt {lease.attempt}{_of_gate(lease.gate)}")
        for lease in leases
    ]
    if doubt:
        found.append(Allocation(by="unseen", holder=doubt))
    return tuple(found)


def foreign(
    claims: Sequence[Allocation],
    workloads: Sequence[Workload],
    asking: Collection[str | None],
    past: Collection[str | None] = (),
) -> tuple[Allocation, ...]:
    """
    The allocations without those of the host's schedulers to the jobs with the names `asking`: a hook runs inside of
    the allocation of its job. The leases of the gates `past` do not count either: their jobs have died.
    """
    names = {name for one in asking for name in names_of(one)}
    own = {workload.name for workload in workloads if not names.isdisjoint(workload.names)}
    over = tuple(_of_gate(gate) for gate in past if gate)
    return tuple(
        claim
        for claim in claims
        if not (claim.by == "scheduler" and claim.holder in own)
        and not (claim.by == "lease" and claim.holder.endswith(over))
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to which a scheduler has allocated devices of this host."""

    name: str
    """Its name in leases and gates: `slurm:123`, `pod:NAMESPACE/NAME`, `ecs:TASK-ARN`."""
    aliases: tuple[str, ...] = ()
    """Other names by which it can be asked for or ignored."""
    uses: str = ""
    """What it has, in words; empty where the scheduler does not say."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def describe(claims: Sequence[Allocation]) -> str:
    """The first allocation and how many more there are, in one line."""
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return f"{claims[0].holder}{more}" if claims else "nobody"


def read_processes(proc: Path) -> tuple[Process, ...]:
    """All processes that can be seen, by id. Never touches their memory, where a read can wait for ever."""
    found = []
    for folder in proc.glob("[0-9]*"):
        if not folder.name.isdecimal():
            continue
        process = read_process(proc, int(folder.name))
        if process is not None:
            found.append(process)
    return tuple(sorted(found, key=lambda process: process.pid))


def read_process(proc: Path, pid: int) -> Process | None:
    """One process; None when it has ended or may not be looked into. OSError where nothing can be read just now."""
    folder = proc / str(pid)
    name = _read_if_there(folder / "comm")
    if name is None:
        return None
    # The second field of `stat` may hold any characters; source of the numbers: proc_pid_stat(5).
    fields = (_read_if_there(folder / "stat") or "").rpartition(")")[2].split()
    parent, started = (_number(fields, place) for place in (1, 19))
    return Process(pid=pid, name=name.strip(), parent=parent, zombie=fields[:1] in (["Z"], ["X"]), started=started)


@dataclass(frozen=True, kw_only=True)
class Process:
    """
    One process. `name` is the kernel's, cut after 15 characters; `parent` and `started` (in clock ticks after boot) are
    None where they are unknown.
    """

    pid: int
    name: str
    parent: int | None
    zombie: bool
    started: int | None


def read_arguments(proc: Path, pid: int) -> tuple[str, ...] | None:
    """The argument vector as it is now (programs rewrite it); None when it cannot be read."""
    text = _read(proc / str(pid) / "cmdline")
    return None if text is None else tuple(part for part in text.split("\0") if part)


def read_environment(proc: Path, pid: int) -> Mapping[str, str] | None:
    """The variables that it was started with; None when they may not be read: root's right, or its own user's."""
    text = _read(proc / str(pid) / "environ")
    if text is None:
        return None
    return {name: value for name, _, value in (part.partition("=") for part in text.split("\0")) if name}


def _among(name: str, workloads: Sequence[Workload]) -> bool:
    names = set(names_of(name))
    return any(not names.isdisjoint(workload.names) for workload in workloads)


def _of_gate(gate: str) -> str:
    """How the holder of a lease's allocation ends."""
    return f" (gate {gate})"


def _bounded(by: str, holders: Sequence[str]) -> list[Allocation]:
    """One allocation each, at most MAX_HOLDERS and one that says how many more."""
    found = [Allocation(by=by, holder=holder) for holder in holders[:MAX_HOLDERS]]
    if len(holders) > MAX_HOLDERS:
        found.append(Allocation(by=by, holder=f"and {len(holders) - MAX_HOLDERS} more"))
    return found


def _number(fields: Sequence[str], place: int) -> int | None:
    return int(fields[place]) if len(fields) > place and fields[place].isdecimal() else None


def _read_if_there(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError, PermissionError):
        return None  # any other error, such as too many open files, is no sign that the process has ended


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


NO_SCHEDULERS = Scheduled(readings=(), read_at=0.0)
