"""
Names of workloads: what a job is called by those who see its end. Pure, except `with_start`.

    pid:123                     a process of the node's host
    pid:123@4567                the same, with its start time: known again also from another PID namespace
    pod:NAMESPACE/NAME/UID      a pod of Kubernetes; `pod:NAMESPACE/NAME` where its UID is not known
    slurm:123                   a job of Slurm
    ecs:TASK-ARN                a task of ECS
    kueue:CLUSTER/NAMESPACE/NAME/UID    a Workload of Kueue: no node sees its end, `healthd kueue` does
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LONGEST = 512
"""Characters of a name: a namespace, a pod and a UID have 63, 253 and 36 at most, an ARN 2,048 by its grammar and 200
as ECS makes it."""

KUEUE = "kueue:"
"""What the names of Workloads of Kueue begin with."""

_POD = r"pod:([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)/([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)(/([0-9A-Za-z-]{1,64}))?"
_PROCESS = r"pid:([1-9]\d{0,9})(@([1-9]\d{0,17}))?"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod; `uid` None where it is not known, so that another pod of that name cannot be told from it."""

    namespace: str
    name: str
    uid: str | None = None

    @property
    def full_name(self) -> str:
        """NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process by its id in its own PID namespace; `started` in clock ticks after boot, None where it is not known."""

    pid: int
    started: int | None = None


def pod_of(workload: str | None) -> Pod | None:
    """The pod that a workload is; None for another kind of workload, for none, and where only a UID is given."""
    found = re.fullmatch(_POD, workload or "")
    return Pod(namespace=found[1], name=found[3], uid=found[6]) if found else None


def process_of(workload: str | None) -> Process | None:
    """The process that a workload is; None for another kind of workload or none."""
    found = re.fullmatch(_PROCESS, workload or "")
    if found is None or int(found[1]) >= 2**31:
        return None
    return Process(pid=int(found[1]), started=int(found[3]) if found[3] else None)


def names_of(workload: str | None) -> tuple[str, ...]:
    """All names by which schedulers may call this workload, its own first; empty for none."""
    if not workload:
        return ()
    pod = pod_of(workload)
    if pod is None or pod.uid is None:
        return (workload,)
    return (workload, f"pod:{pod.full_name}", f"pod:{pod.uid}")


def problem_of(workload: str) -> str:
    """What is wrong with a name of a workload, and how it must be; empty for one that is valid."""
    kind = workload.partition(":")[0]
    if not workload.isprintable() or len(workload) > LONGEST:
        return f"must be at most {LONGEST} printable characters"
    if kind == "pid" and process_of(workload) is None:
        return "must be pid:NUMBER or pid:NUMBER@START, START in clock ticks after boot"
    if kind == "pod" and "/" in workload and pod_of(workload) is None:
        return "must be pod:NAMESPACE/NAME or pod:NAMESPACE/NAME/UID"
    return ""


def own_pod(environ: Mapping[str, str]) -> str | None:
    """The pod of this process by POD_NAMESPACE, POD_NAME and POD_UID (downward API); None where they do not say it."""
    namespace, name, uid = (environ.get(f"POD_{key}", "") for key in ("NAMESPACE", "NAME", "UID"))
    if not namespace or not name:
        return None
    return f"pod:{namespace}/{name}/{uid}" if uid else f"pod:{namespace}/{name}"


def with_start(workload: str, proc: Path = Path("/proc")) -> str:
    """
    A process of this machine with its start time; any other workload as it is.

    Without it a daemon in another PID namespace would take a stranger with the same id for the job.
    """
    process = process_of(workload)
    if process is None or process.started is not None:
        return workload
    try:
        fields = (proc / str(process.pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"pid:{process.pid}@{int(fields[19])}"
    except (OSError, IndexError, ValueError):
        return workload
