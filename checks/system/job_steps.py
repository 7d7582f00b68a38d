"""The steps of running jobs, from what their ranks have reported to the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Finding, Measurement, Status, check
from checks.host.machine import HostError
from checks.json_text import parse_json
from checks.limits import quantity, within

MAX_JOBS = 4
MAX_SLOW = 8


@dataclass(frozen=True)
class Params:
    """Where the daemon records the steps, and how old they may be. The daemon sets `file` to its own."""

    file: str = "/run/healthd/steps.json"
    max_age_seconds: float = 300.0


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def job_steps(ctx: Context[Params]) -> Iterator[Finding]:
    """
    No rank of a running job on this node is slower by its own time than the others.

    Reads:   what the ranks report of each step (healthd_steps.StepReporter), as the daemon has recorded it.
    Judges:  warn SlowRank: by its own time, without waiting, a rank took more than 5 % longer than the median of its
             peers on this node, in 4 of the last 5 windows of 50 steps; or a step is over its limit
             (`job_step_seconds`). Never a fail: data may be to blame, and any process of the host may report. Ranks
             that take turns at being late accuse nobody | unknown NoData | skip NotApplicable (no job reports). The
             aggregator adds the same warning where a node of a job is slow among the job's other nodes.
    Cost:    under 1 ms; harmless to jobs.
    """
    try:
        recorded = parse_json(ctx.host.read(ctx.params.file))
        jobs = [one for one in recorded["jobs"] if _is_recent(ctx, recorded, one)][:MAX_JOBS]
    except HostError as error:
        if error.reason != "NoData":
            raise
        jobs = []
    except (ValueError, KeyError, TypeError):
        text = f"{ctx.params.file} contains no steps; the daemon will write it again"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    if not jobs:
        yield Finding(status=Status.SKIP, reason="NotApplicable", message="no job reports its steps", target="node")
    for job in jobs:
        yield from _judge(ctx, job)


def _is_recent(ctx: Context[Params], recorded: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    age = ctx.host.uptime_seconds() - float(recorded["boot_seconds"]) + float(job["heard_seconds"])
    return job["step_seconds"] is not None and age <= ctx.params.max_age_seconds


def _judge(ctx: Context[Params], job: Mapping[str, Any]) -> Iterator[Finding]:
    name = str(job["job"])
    count = len(job["own_seconds"])
    yield within(
        float(job["step_seconds"]),
        name="job_step_seconds",
        target="node",
        limit=ctx.limit("job_step_seconds"),
        reason="SlowRank",
        subject=f"job {name}: one step over {count} rank{'s' if count != 1 else ''} of this node takes",
        outside=Status.WARN,
    )
    for slow in list(job["slow"])[:MAX_SLOW]:
        own, peers = float(slow["own_seconds"]), float(slow["peers_seconds"])
        since = (
            "for as long as it has been observed" if slow["since_step"] is None else f"since step {slow['since_step']}"
        )
        text = (
            f"job {name}: rank {slow['rank']} works {quantity('x_seconds', own)} in each step (own time), its peers "
            f"here {quantity('x_seconds', peers)}: {100 * float(slow['excess_ratio']):.3g} % longer in "
            f"{slow['windows']} of the last {slow['of_windows']} windows, {since}"
        )
        measured = Measurement(name="job_rank_own_seconds", value=own, lower=None, upper=None, origin="none")
        yield Finding(
            status=Status.WARN,
            reason="SlowRank",
            message=text,
            target=f"rank:{slow['rank']}",
            measurements=(measured,),
        )
