"""
Reads Slurm's jobs on this host from its processes: no controller is asked, so nothing waits for one.

A job shows by its steps (`slurmstepd: [123.extern]`) and, before them, by its prolog, a child of slurmd with the job's
id among its variables. What does not show: the moment between the controller's decision and the prolog, and the time of
a PrologSlurmctld. Without `PrologFlags=Contain` a node of a job shows nothing before the job's first step there, which
may be never, so only with it is an empty list an answer.

Verified against slurmd 22.05.8 (Debian 12): batch jobs, allocations without a step, prologs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from healthd.node.occupancy.model import (
    JobScheduler,
    Process,
    Reading,
    Workload,
    read_arguments,
    read_environment,
    read_process,
)

NAME, KIND = "Slurm", "slurm"
# Where builds and distributions have it, the configless cache first; the file on slurmd's command line comes before.
CONFIGS = (
    "/run/slurm/conf/slurm.conf",
    "/etc/slurm/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
)
MAX_CONFIG_BYTES = 4 << 20
MAX_INCLUDES = 32

# Deeper than any process tree; ends a loop in recorded data.
MOST_ANCESTORS = 64

# Slurm's control groups: /system.slice/slurmstepd.scope/job_123/step_0, /slurm/uid_0/job_123.
_GROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)
_TITLE = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?\.[^\]]*\]")
_FLAGS = re.compile(r"^\s*PrologFlags\s*=\s*(\S+)", re.IGNORECASE)
_INCLUDE = re.compile(r"^\s*Include\s+(\S+)", re.IGNORECASE)

NOT_SEEN = (
    "slurmd is not running or its processes cannot be seen; start it, or run healthd with the host's process table "
    "(in a container: the host's PID namespace)"
)
NOT_ROOT = "the job of slurmd's running prolog cannot be read; run healthd as root"
NOT_CONTAINED = (
    "a Slurm job may not show on its nodes before its first step; set PrologFlags=Contain in slurm.conf, and let "
    "healthd read that file"
)


def read(root: Path, processes: Sequence[Process]) -> Reading:
    """Look at Slurm once, given the processes of the host."""
    proc = root / "proc"
    daemons = [process for process in processes if process.name == "slurmd" and not process.zombie]
    pids = {process.pid for process in daemons}
    jobs: dict[str, Workload] = {}
    for process in processes:
        if process.name == "slurmstepd" and not process.zombie:
            found = of_step(read_arguments(proc, process.pid), read_environment(proc, process.pid))
            if found is not None:
                jobs.setdefault(found.name, found)
    unseen = "" if daemons else NOT_SEEN
    for process in processes:
        if process.parent not in pids or process.name in ("slurmd", "slurmstepd") or process.zombie:
            continue
        variables = read_environment(proc, process.pid)
        if variables is None and (proc / str(process.pid)).exists():
            unseen = unseen or NOT_ROOT
        elif job := (variables or {}).get("SLURM_JOB_ID", ""):
            found = Workload(name=f"slurm:{job}", uses=f"{process.name} of slurmd is running")
            jobs.setdefault(found.name, found)
    if not unseen and not contained(read_config(root, _configured_file(proc, daemons))):
        unseen = NOT_CONTAINED
    return Reading(scheduler=NAME, kind=KIND, workloads=tuple(jobs.values()), unseen=unseen)


def of_step(arguments: Sequence[str] | None, variables: Mapping[str, str] | None) -> Workload | None:
    """
    The job of a slurmstepd; None for the one that only keeps a control group alive, or has just ended.

    One that does not show its job yet (it has just been started) is a job of unknown id.
    """
    if not arguments or arguments[1:] == ("infinity",):
        return None
    title = _TITLE.match(" ".join(arguments))
    job = title[1] if title else (variables or {}).get("SLURM_JOB_ID", "")
    return Workload(name=f"slurm:{job}" if job else "slurm:unknown")


def contained(config: str) -> bool:
    """Whether each job has a step on all its nodes from its start: pure. The last setting counts."""
    flags: list[str] = []
    for line in _lines(config):
        if match := _FLAGS.match(line):
            flags = match[1].lower().split(",")
    return not {"contain", "x11"}.isdisjoint(flags)


def read_config(root: Path, configured: str | None) -> str:
    """slurm.conf with what it includes; empty when there is none that can be read."""
    for name in (configured,) if configured else CONFIGS:
        text = "\n".join(_with_includes(root, name, [MAX_INCLUDES]))
        if text:
            return text
    return ""


def _with_includes(root: Path, name: str, left: list[int]) -> Iterator[str]:
    """The lines of a file and of those it names; `left` is how many more files may be opened."""
    if left[0] <= 0:
        return
    left[0] -= 1
    try:
        with (root / name.lstrip("/")).open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES).decode("utf-8", "replace")
    except OSError:
        return
    for line in _lines(text):
        match = _INCLUDE.match(line)
        if match is None:
            yield line
        else:
            yield from _with_includes(root, str(Path(name).parent / match[1]), left)


def _lines(text: str) -> Iterator[str]:
    """Lines without comments, continued ones joined."""
    for line in text.replace("\\\n", "").split("\n"):
        yield line.partition("#")[0]


def _configured_file(proc: Path, daemons: Sequence[Process]) -> str | None:
    """The configuration file that is given to slurmd by option or variable; None when it uses its default."""
    for process in daemons:
        arguments = read_arguments(proc, process.pid) or ()
        for option, value in itertools.pairwise(arguments):
            if option == "-f":
                return value
        if file := (read_environment(proc, process.pid) or {}).get("SLURM_CONF"):
            return file
    return None


def own_jobs(root: Path, environ: Mapping[str, str]) -> frozenset[str]:
    """The job that this process belongs to, also where its variables are not inherited (ssh, sudo)."""
    proc = root / "proc"
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


SCHEDULER = JobScheduler(
    name=NAME,
    kind=KIND,
    read=lambda look: read(look.root, look.processes),
    own=own_jobs,
    processes=("slurmd", "slurmstepd"),  # jobs go on while slurmd is restarted, which has no file of its process then
    paths=("run/slurmd.pid", "var/run/slurmd.pid"),
)
