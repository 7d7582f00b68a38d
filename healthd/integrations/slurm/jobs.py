"""What slurmctld tells its prolog and epilog of a job, as a request to the aggregator. Pure but for the host names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from checks.contract import Blame, Status
from healthd.aggregator.jobs.ungated import HookedJob
from healthd.cli.settings.gate import GateSettings
from healthd.core.errors import ConfigError
from healthd.core.model import Decision, GateRequest, Reason
from healthd.integrations.slurm.launcher import expand
from healthd.integrations.slurm.scontrol import Scontrol, SlurmError

WORKLOAD = "slurm:"
"""How leases, gates and nodes call a job of Slurm: this and its id."""

MAX_JOB = 2**32


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """
    A job that slurmctld is about to start on `nodes` (empty: Slurm says that it has 0).

    `attempt` is how often it was put back into the queue. `workload` is what its nodes will show it as.
    """

    id: str
    attempt: int
    nodes: tuple[str, ...]
    workload: str

    @property
    def name(self) -> str:
        """What its gate is called."""
        return gate_name(self.id)

    def request(self, asked: GateSettings) -> GateRequest:
        """The question to the aggregator. Slurm has chosen the nodes, so all of them must be good."""
        request = asked.request(self.name)
        return replace(request, attempt=self.attempt, nodes=self.nodes, workload=self.workload)


def read_ids(environ: Mapping[str, str]) -> tuple[str, int]:
    """The job's id and how often it was put back into the queue. ConfigError outside of slurmctld's hooks."""
    job = environ.get("SLURM_JOB_ID", "")
    if not (job.isascii() and job.isdecimal() and 0 < int(job) < MAX_JOB):
        raise ConfigError(
            f"SLURM_JOB_ID={job[:40]!r} is not a job id; slurmctld sets it for PrologSlurmctld and EpilogSlurmctld"
        )
    count = environ.get("SLURM_JOB_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or "0"
    if not (count.isascii() and count.isdecimal() and int(count) < MAX_JOB):
        raise ConfigError(f"SLURM_JOB_RESTART_COUNT={count[:40]!r} is not a number")
    return job, int(count)


def read_job(environ: Mapping[str, str], scontrol: Scontrol) -> SlurmJob:
    """The job of slurmctld's variables. ConfigError for what cannot be read: a part of its nodes is never asked for."""
    job, attempt = read_ids(environ)
    text = environ.get("SLURM_JOB_NODELIST", "")
    text = "" if text == "(null)" else text
    nodes = _hosts(text, scontrol) if text else ()
    said = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_JOB_NNODES")
    if said is not None and said != str(len(nodes)):
        raise ConfigError(f"Slurm: job {job} has {said[:20]} nodes, but {text[:80]!r} lists {len(nodes)}")
    if not nodes and (text or said is None):
        raise ConfigError(f"Slurm: job {job} has no list of nodes: SLURM_JOB_NODELIST={text[:80]!r}; not admitted")
    if len(set(nodes)) != len(nodes):
        raise ConfigError(f"Slurm: {text[:80]!r} lists a node twice")
    shown = environ.get("SLURM_HET_JOB_ID", "")
    leader = shown if shown.isascii() and shown.isdecimal() and int(shown) > 0 else job
    return SlurmJob(id=job, attempt=attempt, nodes=nodes, workload=f"{WORKLOAD}{leader}")


def _hosts(text: str, scontrol: Scontrol) -> tuple[str, ...]:
    """
    The nodes of a hostlist expression, by Slurm itself, else as it is documented.

    scontrol answers what it cannot read with exit code 0, so the two must agree wherever both have an answer.
    """
    try:
        by_slurm = scontrol.hostnames(text)
    except SlurmError:
        return expand(text)
    try:
        by_us = expand(text)
    except ConfigError:
        by_us = by_slurm
    if set(by_us) != set(by_slurm):
        raise ConfigError(f"Slurm: {text[:80]!r} is ambiguous: scontrol reads it as {','.join(by_slurm)[:80]!r}")
    return by_slurm


def outcome_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """How the job ended as `healthd gate outcome` says it, and a line for people. Slurm does not say whose fault."""
    code, _, number = environ.get("SLURM_JOB_EXIT_CODE2", "").partition(":")
    if (code, number) == ("0", "0"):
        return "ok", "exit code 0"
    return "failed", f"exit code {code or 'unknown'}" + (f", signal {number}" if number not in ("", "0") else "")


def _coded(reason: Reason) -> str:
    """The code first: `sinfo -R` shows twenty columns, of which our mark takes nine."""
    return reason.message if reason.message.startswith(reason.code) else f"{reason.code}: {reason.message}"


def at_fault(decision: Decision) -> tuple[tuple[str, str], ...]:
    """
    The nodes that a decision leaves out for their own fault, with the reason: what failed by positive evidence.

    A node that is silent, busy or unknown is no evidence against it.
    """
    found: list[tuple[str, str]] = []
    for node in decision.excluded:
        for reason in node.reasons:
            if reason.code == "Quarantined" or (reason.status is Status.FAIL and reason.blame is Blame.NODE):
                found.append((node.asked or node.node, _coded(reason)))
                break
    return tuple(found)


def gate_name(job: str) -> str:
    """What the gate of a job is called; `healthd preflight` inside the job uses the same name."""
    return f"slurm-{job}"


def hooked_job(workload: str) -> HookedJob | None:
    """The job that a workload is; None for one of another scheduler."""
    job = workload.removeprefix(WORKLOAD)
    if job == workload or not job.isascii() or not job.isdecimal():
        return None
    return HookedJob(id=job, gate=gate_name(job))
