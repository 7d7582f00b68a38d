"""
Finds the job of this process by its variables, its control group, or its parent processes.

Apart from `occupancy`, because every `healthd check` asks this, and needs nothing else of the node's daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from healthd.node.occupancy.model import Process, read_arguments, read_environment, read_process
from healthd.node.occupancy.slurm import of_step

# What the schedulers that give devices away tell those whom they have started.
VARIABLES = (
    "SLURM_JOB_ID",
    "KUBERNETES_SERVICE_HOST",
    "ECS_CONTAINER_METADATA_URI",
    "ECS_CONTAINER_METADATA_URI_V4",
    "AWS_BATCH_JOB_ID",
    "TRAINING_JOB_NAME",
)
# Deeper than any process tree; ends a loop in recorded data.
MOST_ANCESTORS = 64

# Slurm's control groups: /system.slice/slurmstepd.scope/job_123/step_0, /slurm/uid_0/job_123.
_GROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


def own_jobs(proc: Path, environ: Mapping[str, str]) -> frozenset[str]:
    """The Slurm job that this process belongs to, also where its variables are not inherited (ssh, sudo)."""
    numbers = {environ["SLURM_JOB_ID"]} if environ.get("SLURM_JOB_ID") else set()
    try:
        text = (proc / "self/cgroup").read_text(errors="replace")
    except OSError:
        text = ""
    numbers.update(match[1] for line in text.splitlines() if "slurm" in line for match in _GROUP.finditer(line))
    found = {f"slurm:{number}" for number in numbers}
    for process in _ancestors(proc):
        if process.name == "slurmstepd":
            step = of_step(read_arguments(proc, process.pid), read_environment(proc, process.pid))
            found |= {step.name} if step is not None else set()
    return frozenset(found)


def inside_a_job(environ: Mapping[str, str], proc: Path = Path("/proc")) -> bool:
    """Whether a scheduler has started this process: then its allocation here is our own job's."""
    return any(environ.get(name) for name in VARIABLES) or bool(own_jobs(proc, environ))


def _ancestors(proc: Path) -> Iterator[Process]:
    """The processes above this one, the nearest first."""
    try:
        pid: int | None = int((proc / "self/stat").read_text(errors="replace").partition(" ")[0])
    except (OSError, ValueError):
        return
    for _ in range(MOST_ANCESTORS):
        process = read_process(proc, pid) if pid else None
        if process is None:
            return
        yield process
        pid = process.parent
