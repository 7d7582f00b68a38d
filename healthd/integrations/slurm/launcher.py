"""
Slurm: what srun sets for every task of a job step.

In the batch script itself there is one process on the first node and no step: a preflight there would wait for peers
that nobody starts, so that is an error which names srun.

Source: Slurm man pages srun(1), "OUTPUT ENVIRONMENT VARIABLES", and sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Launcher, Place, number, whole

STEP = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
MOST_HOSTS = 100_000
_PART = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find(environ: Mapping[str, str]) -> Place | None:
    """The place of this task, or None outside of Slurm's jobs and in its prologs."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job or "SLURM_SCRIPT_CONTEXT" in environ:
        return None
    size_name = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in environ), "SLURM_NNODES")
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    attempt = number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    if not in_step:
        if not any(name in environ for name in STEP):
            return None  # a shell of salloc: what runs there is nobody's task
        if number(environ, size_name) > 1:
            raise ConfigError(
                f"Slurm: this is the batch script of job {job} on {environ[size_name]} nodes, not a task on each of "
                "them; use: srun --ntasks-per-node=1 healthd preflight ..."
            )
    whole(environ, (*STEP, size_name), "Slurm")
    size, rank, local_rank = (
        number(environ, size_name),
        number(environ, "SLURM_NODEID"),
        number(environ, "SLURM_LOCALID"),
    )
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    hosts = expand(text) if text else ()
    if hosts and len(hosts) != size:
        raise ConfigError(f"Slurm: {size_name}={size}, but {text!r} lists {len(hosts)} nodes")
    return Place(
        job=f"slurm-{job}",
        attempt=attempt,
        rank=rank,
        size=size,
        main=hosts[0] if hosts and size > 1 else ("127.0.0.1" if size == 1 else ""),
        local_rank=local_rank,
        local_size=_local_size(environ, rank, local_rank),
        source="Slurm",
        evidence=f"SLURM_NODEID={rank} of {size_name}={size}, job {job}",
    )


def _local_size(environ: Mapping[str, str], rank: int, local_rank: int) -> int:
    """How many tasks the step has on this node, out of `2(x3),1`; as many as are known of where it is silent."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in text.split(",") if text else ():
        match = _TASKS.fullmatch(part)
        if match is None or len(match[2] or "") > 6 or len(match[1]) > 6:
            raise ConfigError(f"Slurm: tasks per node {text[:80]!r} cannot be read; the expected form is '2(x3),1'")
        counts += [int(match[1])] * min(int(match[2] or 1), MOST_HOSTS)
    return max(local_rank + 1, counts[rank] if rank < len(counts) else 1)


def expand(text: str) -> tuple[str, ...]:
    """
    The hosts of a hostlist expression: `n[1-3,07]-ib,m` is n1-ib, n2-ib, n3-ib, n07-ib, m.

    For a process that has no `scontrol show hostnames` at hand. ConfigError for what is none.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or match.end() == position or not match[0].strip(","):
            raise ConfigError(f"Slurm: the list of nodes {text[:80]!r} cannot be read")
        position = match.end()
        before, numbers, after = match[1], match[2], match[3]
        hosts += [f"{before}{one}{after}" for one in (_numbers(numbers, text) if numbers is not None else ("",))]
        if len(hosts) > MOST_HOSTS:
            raise ConfigError(f"Slurm: the list of nodes {text[:80]!r} has more than {MOST_HOSTS}")
    if not hosts:
        raise ConfigError(f"Slurm: the list of nodes {text[:80]!r} is empty")
    return tuple(hosts)


def _numbers(text: str, whole_text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        good = first.isascii() and last.isascii() and first.isdecimal() and last.isdecimal()
        if not good or len(last) > 9 or int(last) < int(first) or int(last) - int(first) > MOST_HOSTS:
            raise ConfigError(f"Slurm: the list of nodes {whole_text[:80]!r} cannot be read at {part[:20]!r}")
        found += [str(one).zfill(len(first)) for one in range(int(first), int(last) + 1)]
    return found


LAUNCHER = Launcher(order=20, variables=("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_PROCID", "SLURM_NODEID"), find=find)
