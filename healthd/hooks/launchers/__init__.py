"""
Who am I among how many: what the launcher of a job tells each of its processes.

One file a launcher, each with `find(environ) -> Place | None`. What was found, and from what, is said. A job may be
inside of several (torchrun in a container of AWS Batch): the innermost says who we are, because it started us last,
and what it does not know (the job's name, where rank 0 is) is asked of the next one outwards. The order, innermost
first: torchrun and Open MPI start processes on a node; srun starts the tasks of a job step; an Indexed Job, a SageMaker
training job and an AWS Batch job start the container around all of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.core.errors import ConfigError

NAMES = ("torchrun", "openmpi", "slurm", "kubernetes", "sagemaker", "batch")
"""Innermost first."""

TRACES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TF_CONFIG"),
    *("PET_NNODES", "PET_NODE_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PALS_RANKID", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID", "SLURM_NODEID"),
    *("PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID", "_CONDOR_JOB_AD"),
    *("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOBSET_NAME", "VC_TASK_INDEX", "RAY_JOB_ID"),
    *("ECS_CONTAINER_METADATA_URI_V4", "AWS_BATCH_JOB_ID", "SM_HOSTS", "CLUSTER_SPEC", "AZ_BATCH_JOB_ID"),
    *("NOMAD_ALLOC_ID", "SKYPILOT_NODE_RANK"),
)
"""
Variables that launchers and schedulers set for the processes of a job. Where one is set, a process may be one of many,
also where no launcher here can read which one.
"""

SOMEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737): to ask the kernel which of our own it would speak from."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """
    The place of this process in its job.

    `rank` and `size` count nodes, not processes; `local_rank` and `local_size` the processes of this node: only local
    rank 0 probes. `main` is the host of rank 0, empty where the launcher does not tell. `source` says which launcher
    this was read from and `evidence` from what. `attempt_told` false: the launcher counts no attempts. `main_counts`:
    the launcher takes the exit code of rank 0 for that of the job, whatever the others do.
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

    def __post_init__(self) -> None:
        if self.source != "options" and (
            not 0 <= self.rank < self.size or not 0 <= self.local_rank < max(1, self.local_size)
        ):
            raise ConfigError(
                f"{self.source}: rank {self.rank} of {self.size} nodes, process {self.local_rank} of {self.local_size} "
                f"on the node, cannot be ({self.evidence or 'its variables'})"
            )


def traces(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables by which this process may be one of many; none: nobody has started it as a part of anything."""
    return tuple(name for name in TRACES if environ.get(name))


def find_places(environ: Mapping[str, str]) -> tuple[Place, ...]:
    """What every launcher that knows its own variables says, innermost first; ConfigError for half-set ones."""
    found = (importlib.import_module(f"{__name__}.{name}").find(environ) for name in NAMES)
    return tuple(place for place in found if place is not None)


def find_place(environ: Mapping[str, str], *, size: int | None = None, main: str | None = None) -> Place | None:
    """
    What the innermost launcher says, completed by the others; None when there is none.

    `size` and `main` are what the user says of the number of nodes and the host of rank 0: they complete what the
    launcher does not tell. ConfigError where the number contradicts it, and where nobody says where rank 0 of several
    nodes is.
    """
    if size is not None and environ.get("JOB_COMPLETION_INDEX"):
        environ = {**environ, "JOB_COMPLETIONS": str(size)}  # Kubernetes tells a pod its index and not their number
    places = find_places(environ)
    if not places:
        return None
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
        raise ConfigError(f"{size} nodes are asked for, and {inner.source} says {inner.size} ({inner.evidence})")
    inner = dataclasses.replace(inner, main=main or inner.main or ("127.0.0.1" if inner.size == 1 else ""))
    if not inner.main:
        service = "give its pods a headless Service (spec.subdomain), or " if "Kubernetes" in inner.source else ""
        raise ConfigError(
            f"{inner.source} does not say where rank 0 is: {service}set MASTER_ADDR to its host for all processes, "
            "or say --main HOST"
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
            "environment, or say --nnodes N --node-rank R --main HOST"
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
