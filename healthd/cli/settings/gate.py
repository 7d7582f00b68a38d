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
    """URL of the aggregator. If there are several, list all, separated by commas: if one does not answer, the next
    is asked."""

    token_file: Path | None = None
    """File with the bearer token."""

    ca_file: Path | None = None
    """PEM file of the CA that signed the aggregator's certificate; None trusts the system's."""

    job: str | None = None
    """The job's name."""

    attempt: int = 0
    """Number of this attempt of the job."""

    node: tuple[str, ...] = ()
    """Names of the job's nodes."""

    hostfile: Path | None = None
    """File with the names of the job's nodes."""

    pool: str | None = None
    """Take nodes from this pool instead."""

    count: int | None = None
    """Number of nodes to take from the pool."""

    join: str | None = None
    """Name of a group of hooks that ask together instead, one on each node."""

    size: int | None = None
    """Number of members of the group; None: from the launcher."""

    rank: int | None = None
    """Rank of this member; None: from the launcher."""

    member: str | None = None
    """Identity that distinguishes this process from an earlier one of its rank; None: a new one each time."""

    execute: bool = False
    """Whether the hook runs the ordered checks itself, in the job's own container."""

    min_nodes: int | None = None
    """Minimum number of healthy nodes to admit; None: all."""

    tier: Tier | None = None
    """Tier of the required evidence; None: the aggregator's policy."""

    max_age_seconds: float | None = None
    """Maximum age of the evidence; None: the aggregator's policy."""

    wait_seconds: float | None = None
    """Maximum time to wait for the admission; None: the aggregator's policy."""

    runtime_seconds: float | None = None
    """Expected runtime of the job: nodes that EC2 will stop or reboot before its end are excluded. 0: such events
    only warn. None: the aggregator's policy. Ignored by on_unreachable = local."""

    mode: Mode | None = None
    """enforce or observe; None: the aggregator's policy."""

    collective: bool | None = None
    """Run collectives over the nodes together first; None: the aggregator's policy."""

    workload: str | None = None
    """Workload whose end ends the lease: `pid:NUMBER`, `pod:NAMESPACE/NAME/UID`, `slurm:JOB`, `ecs:TASK-ARN`. None:
    the Slurm job or the pod in which the hook runs (POD_NAMESPACE, POD_NAME, POD_UID), if any."""

    lease_seconds: float | None = None
    """How long the lease lasts if no node can observe the job's end, counted from when the job was last seen; None:
    the aggregator's policy."""

    exit_style: Literal["plain", "npd", "slurm"] = "plain"
    """Exit codes for callers with another convention. npd: 0 admitted, 1 not, 2 and above unknown. slurm: 0 or not."""

    on_unreachable: Literal["hold", "local", "admit"] = "hold"
    """What to do while no aggregator responds. hold: do not admit, because missing evidence is not health. local:
    ask `/readyz` of the daemon of the one requested node; with more nodes the job is not admitted. admit: start
    without a gate."""

    local_url: str = "http://127.0.0.1:8080"
    """URL of this node's daemon, for on_unreachable = local."""

    hostfile_out: Path | None = None
    """File for the names of the admitted nodes."""

    callers_may: tuple[GateTerm, ...] = ()
    """Read only by the aggregator: the terms in which a token of scope `gate` may ask for less than the aggregator's
    settings (`mode`, `tier`, `max_age`, `collective`, `lease`). None by default, so that a hook's token cannot turn
    the gate off. A token of scope `admin` may ask for anything."""

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
