"""What else runs this host: a job scheduler gives the devices away without asking us."""

from __future__ import annotations

from pathlib import Path

from healthd.node.settings import Unprompted

# Names of processes as the kernel has them: cut after 15 characters.
_PROCESSES = {
    "slurmd": "Slurm",
    "kubelet": "Kubernetes",
    "ecs-agent": "ECS",
    "amazon-ecs-agent"[:15]: "ECS",
}
_PATHS = {
    "run/slurmd.pid": "Slurm",
    "var/run/slurmd.pid": "Slurm",
    "var/lib/kubelet/config.yaml": "Kubernetes",
    "var/lib/ecs": "ECS",
}


def unprompted_here(host_root: Path | None) -> tuple[Unprompted, str]:
    """The rule for active checks where nobody has set one, and why: boot beside a job scheduler, else idle."""
    found = _scheduler(host_root or Path("/"))
    return (Unprompted.IDLE, "no job scheduler is on this host") if found is None else (Unprompted.BOOT, found)


def _scheduler(root: Path) -> str | None:
    """What tells of a job scheduler; None without one."""
    for comm in (root / "proc").glob("[0-9]*/comm"):
        try:
            name = comm.read_text(errors="replace").strip()
        except OSError:
            continue  # it has just ended
        if name in _PROCESSES:
            return f"{_PROCESSES[name]} is on this host: process {comm.parent.name} ({name})"
    for path, scheduler in _PATHS.items():
        try:
            (root / path).lstat()
        except OSError:
            continue
        return f"{scheduler} is on this host: /{path}"
    return None
