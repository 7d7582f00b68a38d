"""
Finds the job of this process by its variables, its control group, or its parent processes.

Apart from `occupancy`, because every `healthd check` asks this, and needs nothing else of the node's daemon.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from healthd.core.config import record_at
from healthd.integrations import INTEGRATIONS
from healthd.node.occupancy.model import JobScheduler


def job_variables() -> tuple[str, ...]:
    """What the schedulers that give devices away tell those whom they have started."""
    return tuple(name for one in INTEGRATIONS for name in one.job_variables)


@functools.cache
def job_schedulers() -> tuple[JobScheduler, ...]:
    return tuple(record_at(one.job_scheduler) for one in INTEGRATIONS if one.job_scheduler is not None)


def own_jobs(known: Iterable[JobScheduler], environ: Mapping[str, str], root: Path = Path("/")) -> frozenset[str]:
    """The workloads that this process belongs to, also where its variables are not inherited (ssh, sudo)."""
    return frozenset[str]().union(*(one.own(root, environ) for one in known))


def inside_a_job(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether a scheduler has started this process: then its allocation here is our own job's."""
    return any(environ.get(name) for name in job_variables()) or bool(own_jobs(job_schedulers(), environ, root))
