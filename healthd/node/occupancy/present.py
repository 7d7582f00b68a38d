"""Finds the job schedulers of this host by their processes, their files, or the variables of their containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.node.occupancy.processes import Process

# Names of processes as the kernel has them: cut after 15 characters.
_PROCESSES = {
    "slurmd": "Slurm",
    "slurmstepd": "Slurm",  # jobs go on while slurmd is restarted, which has no file of its process then
    "kubelet": "Kubernetes",
    "ecs-agent": "ECS",
    "amazon-ecs-agent"[:15]: "ECS",
    "amazon-ecs-init": "ECS",
}
_PATHS = {
    "run/slurmd.pid": "Slurm",
    "var/run/slurmd.pid": "Slurm",
    "var/lib/kubelet/config.yaml": "Kubernetes",
    "var/lib/kubelet/pod-resources": "Kubernetes",
    "var/lib/ecs": "ECS",
}
# Variables that a scheduler sets in its containers, where nothing else of the host may be visible.
_VARIABLES = {
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "ECS_CONTAINER_METADATA_URI": "ECS",
    "ECS_CONTAINER_METADATA_URI_V4": "ECS",
}


@dataclass(frozen=True, kw_only=True)
class Present:
    """A job scheduler that is on this host, and what tells so."""

    scheduler: str
    why: str


def find_schedulers(root: Path, processes: Sequence[Process], environ: Mapping[str, str]) -> tuple[Present, ...]:
    """The job schedulers of this host, each once."""
    found: dict[str, str] = {}
    for process in processes:
        if process.name in _PROCESSES and not process.zombie:
            found.setdefault(_PROCESSES[process.name], f"process {process.pid} ({process.name})")
    for path, scheduler in _PATHS.items():
        try:
            (root / path).lstat()
        except OSError:
            continue
        found.setdefault(scheduler, f"/{path}")
    for name, scheduler in _VARIABLES.items():
        if environ.get(name):
            found.setdefault(scheduler, f"the variable {name}")
    return tuple(Present(scheduler=name, why=f"{name} is on this host: {why}") for name, why in found.items())
