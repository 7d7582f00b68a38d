"""What the hooks of a job ask of a standing aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checks.words import Tier
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, GateTerm, Mode


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """What `healthd gate` asks. Every key is an option of that command, but for `callers_may` of the aggregator."""

    aggregator: str = "http://127.0.0.1:8090"
    """URL of the aggregator; where there are several, all of them, separated by commas: the next one is asked where one
    does not answer."""

    token_file: Path | None = None
    """File with the bearer token."""

    ca_file: Path | None = None
    """CA of the aggregator's certificate; None is the system's."""

    job: str | None = None
    """The job's name."""

    attempt: int = 0
    """Which attempt of the job."""

    node: tuple[str, ...] = ()
    """The nodes by name."""

    hostfile: Path | None = None
    """The nodes from a file."""

    pool: str | None = None
    """Nodes from a pool instead."""

    count: int | None = None
    """How many of the pool."""

    join: str | None = None
    """A group of hooks that come together instead, one on each node."""

    size: int | None = None
    """How many members the group has; None: as the launcher says."""

    rank: int | None = None
    """Which member this is; None: as the launcher says."""

    member: str | None = None
    """What tells this process from a former one of its rank; None: something new each time."""

    execute: bool = False
    """Whether the hook runs the ordered checks itself, in the job's own container."""

    min_nodes: int | None = None
    """Minimum number of healthy nodes to admit; None: all."""

    tier: Tier | None = None
    """Evidence asked; None: the aggregator's policy."""

    max_age_seconds: float | None = None
    """How old it may be; None: the aggregator's policy."""

    wait_seconds: float | None = None
    """How long to hold; None: the aggregator's policy."""

    runtime_seconds: float | None = None
    """How long the job is expected to run, so that nodes are left out that EC2 will stop or reboot before its end; 0:
    such events only warn; None: the aggregator's policy. Not looked at by on_unreachable = local."""

    mode: Mode | None = None
    """enforce or observe; None: the aggregator's policy."""

    collective: bool | None = None
    """Run collectives over the nodes together first; None: the aggregator's policy."""

    workload: str | None = None
    """What the lease ends with: `pid:NUMBER`, `pod:NAMESPACE/NAME/UID`, `slurm:JOB`, `ecs:TASK-ARN`. None: the job of
    Slurm or the pod that the hook runs in (POD_NAMESPACE, POD_NAME, POD_UID), if any."""

    lease_seconds: float | None = None
    """How long the lease lasts where no node can see when the job ends, counted from when it was last seen; None: the
    aggregator's policy."""

    exit_style: Literal["plain", "npd", "slurm"] = "plain"
    """Exit codes for those who know others than ours. npd: 0 admitted, 1 not, 2 and above unknown. slurm: 0 or not."""

    on_unreachable: Literal["hold", "local", "admit"] = "hold"
    """What to do while the aggregator is away. hold: not knowing is not health. local: `/readyz` of the daemon of the
    one node that is asked for; with more nodes nothing is admitted. admit: start without a gate."""

    local_url: str = "http://127.0.0.1:8080"
    """Where this node's daemon is, for on_unreachable = local."""

    hostfile_out: Path | None = None
    """Where to write the admitted nodes."""

    callers_may: tuple[GateTerm, ...] = ()
    """Read by the aggregator alone: the terms in which a token of scope `gate` may ask for less than the aggregator's
    settings do (`mode`, `tier`, `max_age`, `collective`, `lease`). None: who holds a hook's token must not be able to
    switch the gate off. A token of scope `admin` may ask for anything."""

    def __post_init__(self) -> None:
        check_attempt(self.attempt)

    def request(self, job: str) -> GateRequest:
        """The question for a job: every term that these settings set. Which nodes it is about, the hook adds."""
        return GateRequest(
            job=job,
            attempt=self.attempt,
            tier=self.tier,
            max_age_seconds=self.max_age_seconds,
            wait_seconds=self.wait_seconds,
            runtime_seconds=self.runtime_seconds,
            mode=self.mode,
            workload=self.workload,
            lease_seconds=self.lease_seconds,
            collective=self.collective,
        )


def check_attempt(attempt: int | None) -> None:
    """ValueError for one that no database holds."""
    if attempt is not None and not 0 <= attempt <= LARGEST_ATTEMPT:
        raise ValueError(f"attempt: must be from 0 to {LARGEST_ATTEMPT}, not {attempt}")
