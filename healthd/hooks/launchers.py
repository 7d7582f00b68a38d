"""
The place of a process in its job, as its launcher describes it: rank, size, address of rank 0.

Each launcher is a `Launcher` of an integration. What was found, and from which variables, is logged. A job may run
inside several launchers (torchrun in a container of AWS Batch): the innermost decides, because it started this process,
and what it does not provide (the job's name, the address of rank 0) comes from the next one outwards. The order,
innermost first: torchrun and Open MPI start processes on a node; srun starts the tasks of a job step; an Indexed Job, a
SageMaker training job and an AWS Batch job start the container around all of them. `Launcher.order` defines it.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from healthd.core.config import record_at
from healthd.core.errors import ConfigError
from healthd.integrations import INTEGRATIONS

OTHER_TRACES = (
    *("NODE_RANK", "TF_CONFIG", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PALS_RANKID", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_RANK", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID"),
    *("_CONDOR_JOB_AD", "VC_TASK_INDEX", "RAY_JOB_ID", "ECS_CONTAINER_METADATA_URI_V4", "CLUSTER_SPEC"),
    *("AZ_BATCH_JOB_ID", "NOMAD_ALLOC_ID", "SKYPILOT_NODE_RANK"),
)
"""Variables of launchers and schedulers without a `Launcher`: they say that there is a job, and not which place."""

SOMEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737): to ask the kernel which of our own it would speak from."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher of jobs. An integration names it as `launcher` in its descriptor."""

    order: int
    """Innermost first, lowest number first: who started the process last."""

    variables: tuple[str, ...]
    """Variables that it sets for the processes of a job. Where one is set, a process may be one of many, also where
    `find` cannot read which one."""

    find: Callable[[Mapping[str, str]], Place | None]
    """The place that its variables describe, None where it did not start us; ConfigError for half-set ones."""

    size_told_by: tuple[str, str] | None = None
    """Where the first of these variables is set and the user says the number of nodes, that is the second variable."""


class Renumber(Protocol):
    """A launcher's own variables for a job of `size` nodes of which this is number `rank`."""

    def __call__(self, environ: Mapping[str, str], *, rank: int, size: int, main: str) -> dict[str, str]:
        """Only what changes."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """
    The place of this process in its job.

    `rank` and `size` count nodes, not processes; `local_rank` and `local_size` the processes of this node: only local
    rank 0 probes. `main` is the host of rank 0, empty where the launcher does not tell. `source` says which launcher
    this was read from and `evidence` from what. `attempt_told` false: the launcher counts no attempts. `main_counts`:
    the launcher takes the exit code of rank 0 for that of the job, whatever the others do. `main_remedy`: what the user
    can do, beside naming it, where the launcher does not tell where rank 0 is; ends with "or ". `renumber` None: the
    launcher has no variables to change where a job starts with fewer nodes.
    """

    job: str | None
    attempt: int
    rank: int
    size: int
    main: str
    local_rank: int
    local_size: int
    source: str
    evidence: str = ""
    attempt_told: bool = True
    main_counts: bool = False
    main_remedy: str = ""
    renumber: Renumber | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.source != "options" and (
            not 0 <= self.rank < self.size or not 0 <= self.local_rank < max(1, self.local_size)
        ):
            raise ConfigError(
                f"{self.source}: rank {self.rank} of {self.size} nodes, process {self.local_rank} of "
                f"{self.local_size} on the node, is impossible ({self.evidence or 'its variables'})"
            )


def trace_names() -> tuple[str, ...]:
    """The variables by which a process may be one of many: those of the launchers here, then those of others."""
    return (*(name for one in _launchers() for name in one.variables), *OTHER_TRACES)


def traces(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables by which this process may be one of many; none: nobody has started it as a part of anything."""
    return tuple(name for name in trace_names() if environ.get(name))


def find_places(environ: Mapping[str, str]) -> tuple[Place, ...]:
    """What every launcher that knows its own variables says, innermost first; ConfigError for half-set ones."""
    found = (launcher.find(environ) for launcher in _launchers())
    return tuple(place for place in found if place is not None)


@functools.cache
def _launchers() -> tuple[Launcher, ...]:
    """The launchers of all integrations, innermost first."""
    found: list[Launcher] = [record_at(one.launcher) for one in INTEGRATIONS if one.launcher is not None]
    return tuple(sorted(found, key=lambda one: one.order))


def find_place(environ: Mapping[str, str], *, size: int | None = None, main: str | None = None) -> Place | None:
    """
    What the innermost launcher says, completed by the others; None when there is none.

    `size` and `main` are what the user says of the number of nodes and the host of rank 0: they complete what the
    launcher does not tell. ConfigError where the number contradicts it, and where nobody says where rank 0 of several
    nodes is.
    """
    for launcher in _launchers():
        if size is not None and launcher.size_told_by is not None and environ.get(launcher.size_told_by[0]):
            environ = {**environ, launcher.size_told_by[1]: str(size)}
    places = find_places(environ)
    return innermost(places, size=size, main=main) if places else None


def innermost(places: Sequence[Place], *, size: int | None = None, main: str | None = None) -> Place:
    """The first place, completed by the others and by what the user says, as in `find_place`: pure. ConfigError."""
    inner, *outer = places
    for other in outer:
        if not inner.attempt_told and other.attempt_told:
            inner = dataclasses.replace(inner, attempt=other.attempt, attempt_told=True)
        alike = other.size == inner.size and other.rank == inner.rank
        if alike or not inner.main:
            inner = dataclasses.replace(inner, main=inner.main or other.main)
        inner = dataclasses.replace(
            inner, job=inner.job or other.job, main_counts=inner.main_counts or (alike and other.main_counts)
        )
    if size is not None and size != inner.size:
        raise ConfigError(f"{size} nodes were requested, but {inner.source} has {inner.size} ({inner.evidence})")
    inner = dataclasses.replace(inner, main=main or inner.main or ("127.0.0.1" if inner.size == 1 else ""))
    if not inner.main:
        raise ConfigError(
            f"{inner.source} does not provide the address of rank 0: {inner.main_remedy}set MASTER_ADDR to its host "
            "for all processes, or use --main HOST"
        )
    return inner


def describe(place: Place) -> str:
    """One line for people: who we are, and who said so."""
    where = f", rank 0 at {place.main}" if place.main and place.size > 1 else ""
    read = f" ({place.evidence})" if place.evidence else ""
    return f"rank {place.rank} of {place.size} by {place.source}{read}{where}"


def number(environ: Mapping[str, str], name: str) -> int:
    """A whole number that is not negative, out of a variable; ConfigError names it."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise ConfigError(f"environment: {name}={text!r} is not a number; is this really the launcher's environment?")
    return int(text)


def whole(environ: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    """ConfigError when some of the variables are set and others are not: half an environment is nobody's."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if environ.get(name)]
        raise ConfigError(
            f"{source}: {', '.join(there) or 'nothing'} is set but {', '.join(missing)} is not; pass on the whole "
            "environment, or use --nnodes N --node-rank R --main HOST"
        )


def own_address() -> str:
    """The address by which this machine speaks to others, else its name. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((SOMEWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """The address by which the network of a host sees this machine; our host name where that cannot be told."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket sends nothing here: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
