"""
Kubernetes: the pods of an Indexed Job, and of the Jobs of a JobSet.

Kubernetes sets JOB_COMPLETION_INDEX and the host name (JOB-INDEX, followed by the headless Service). It does not tell a
pod how many there are: the user says `--nnodes` (`--size` of a join), or the manifest sets JOB_COMPLETIONS. All other
variables are optional, written by the manifest from its own numbers and from labels by the downward API:

  JOB_COMPLETIONS      pods of the Job (`spec.completions`); of a JobSet all pods that start together
  JOB_SUBDOMAIN        the headless Service; else it is read off the pod's own full name
  JOB_NAME             label `batch.kubernetes.io/job-name`; else the pod's host name without its index
  JOBSET_NAME          label `jobset.sigs.k8s.io/jobset-name`
  JOBSET_JOB_INDEX     label `jobset.sigs.k8s.io/job-global-index`, where the JobSet has several Jobs; then also
  JOBSET_JOB_COMPLETIONS  pods of each Job
  JOBSET_RESTART       label `jobset.sigs.k8s.io/restart-attempt`
  JOBSET_COORDINATOR   label `jobset.sigs.k8s.io/coordinator`: the host of rank 0

PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR, which Kubeflow Trainer sets, are read as well. Without a restart label no
attempt is told: a gate that is joined (`healthd gate --join`) counts by itself.

Source: Kubernetes, "Indexed Job" and batch/v1; JobSet v1alpha2; Kubeflow Trainer v2. Indexed Jobs ran on a real
Kubernetes 1.37; JobSet and Trainer are unverified on a cluster.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping

from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Launcher, Place, number


def find(environ: Mapping[str, str], *, full_name: Callable[[], str] = socket.getfqdn) -> Place | None:
    """The place of this pod, or None where it is of no Indexed Job. `full_name` gives host, subdomain and domain."""
    if "PET_NODE_RANK" in environ and "PET_NNODES" in environ:
        return _trainer(environ)
    if "JOB_COMPLETION_INDEX" not in environ:
        if stray := [name for name in ("JOBSET_NAME", "JOBSET_JOB_INDEX") if environ.get(name)]:
            raise ConfigError(
                f"Kubernetes: {stray[0]} is set but JOB_COMPLETION_INDEX is not: the Job needs completionMode: Indexed"
            )
        return None
    index = number(environ, "JOB_COMPLETION_INDEX")
    if "JOB_COMPLETIONS" not in environ:
        raise ConfigError(
            "Kubernetes does not give a pod the number of pods of its Job: use --nnodes N (--size N with --join), "
            "which is spec.completions of the Job, or set JOB_COMPLETIONS to it"
        )
    size = number(environ, "JOB_COMPLETIONS")
    rank, first_job = _rank(environ, index)
    restart = environ.get("JOBSET_RESTART")
    return Place(
        job=environ.get("JOBSET_NAME") or _job_name(environ, index),
        attempt=number(environ, "JOBSET_RESTART") if restart else 0,
        rank=rank,
        size=size,
        main=_main(environ, index, size, full_name, first_job=first_job),
        local_rank=0,
        local_size=1,
        source="a Kubernetes JobSet" if environ.get("JOBSET_NAME") else "an Indexed Job of Kubernetes",
        evidence=f"JOB_COMPLETION_INDEX={index}, JOB_COMPLETIONS={size}",
        attempt_told=bool(restart),
        main_remedy="give its pods a headless Service (spec.subdomain), or ",
    )


def _rank(environ: Mapping[str, str], index: int) -> tuple[int, bool]:
    """The number of this pod among those of all Jobs of its JobSet, and whether its Job is the first of them."""
    job_index = number(environ, "JOBSET_JOB_INDEX") if environ.get("JOBSET_JOB_INDEX") else 0
    if not job_index:
        return index, True
    each = environ.get("JOBSET_JOB_COMPLETIONS")
    if not each:
        raise ConfigError(
            f"Kubernetes: JOBSET_JOB_INDEX={job_index} is set but JOBSET_JOB_COMPLETIONS is not; set that variable "
            "to the number of pods of each Job"
        )
    return job_index * number(environ, "JOBSET_JOB_COMPLETIONS") + index, False


def _trainer(environ: Mapping[str, str]) -> Place:
    size, rank = number(environ, "PET_NNODES"), number(environ, "PET_NODE_RANK")
    return Place(
        job=environ.get("JOBSET_NAME") or environ.get("JOB_NAME"),
        attempt=number(environ, "JOBSET_RESTART") if environ.get("JOBSET_RESTART") else 0,
        rank=rank,
        size=size,
        main=environ.get("PET_MASTER_ADDR", ""),
        local_rank=0,
        local_size=1,
        source="Kubeflow Trainer",
        evidence=f"PET_NODE_RANK={rank} of PET_NNODES={size}",
        attempt_told=bool(environ.get("JOBSET_RESTART")),
    )


def _job_name(environ: Mapping[str, str], index: int) -> str | None:
    """The Job's own name; an Indexed Job calls the hosts of its pods JOB-INDEX."""
    if name := environ.get("JOB_NAME"):
        return name
    match = re.fullmatch(rf"(.+)-0*{index}", environ.get("HOSTNAME", ""))
    return match[1] if match else None


def _main(environ: Mapping[str, str], index: int, size: int, full_name: Callable[[], str], *, first_job: bool) -> str:
    """The host of rank 0 by the headless Service; empty where neither its name nor the Service's is known."""
    if size == 1:
        return "127.0.0.1"
    if told := environ.get("JOBSET_COORDINATOR") or environ.get("MASTER_ADDR"):
        return told
    if not first_job:
        return ""
    job = _job_name(environ, index)
    subdomain = environ.get("JOB_SUBDOMAIN")
    if subdomain is None:
        host, _, rest = full_name().partition(".")
        subdomain = rest if job is not None and re.fullmatch(rf"{re.escape(job)}-0*{index}", host) else None
    if not job or not subdomain:
        return ""
    return f"{job}-0.{subdomain}"


LAUNCHER = Launcher(
    order=30,
    variables=("JOB_COMPLETION_INDEX", "JOBSET_NAME", "PET_NNODES", "PET_NODE_RANK", "KUBERNETES_SERVICE_HOST"),
    find=find,
    size_told_by=("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),  # a pod is told its index and not how many there are
)
