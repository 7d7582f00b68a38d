"""Gates: the question whether a job may start, and which answers there are."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from checks.words import Tier
from healthd.core.wire import FROM_OUTSIDE

LARGEST_ATTEMPT = 2**31 - 1
"""The largest attempt of a job: what the database's column holds, and seconds since the epoch until 2038."""

GateTerm = Literal["mode", "tier", "max_age", "collective", "lease"]
"""A term in which a request may ask for less than the settings of the aggregator do, if it is allowed to."""


class Mode(str, enum.Enum):
    """ENFORCE means what it says; OBSERVE admits always and records what it would have said."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class ValidationKind(str, enum.Enum):
    """What nodes run together: COLLECTIVES, and from the deep tier on training steps too; TRAINING: these alone."""

    COLLECTIVES = "collectives"
    TRAINING = "training"


class Verdict(str, enum.Enum):
    """The answer of a gate. HOLD is "not yet" and never the last word."""

    ADMIT = "admit"
    HOLD = "hold"
    REJECT = "reject"


@dataclass(frozen=True, kw_only=True)
class Join:
    """A hook that knows only itself: number `rank` of the `size` members of `group`, on `node`."""

    __pydantic_config__ = FROM_OUTSIDE

    group: str
    size: int
    rank: int
    member: str
    """This very process: the same again is the same member asking once more, another one takes its rank's place."""
    node: str
    execute: bool = False
    """The process itself is the executor of its node."""


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """
    May this job start on these nodes, now?

    Either `nodes`, or `pool` and `count`, or `join`. None as `tier`, `max_age_seconds`, `wait_seconds`,
    `runtime_seconds`, `lease_seconds`, `mode` or `collective` means the aggregator's policy.
    """

    __pydantic_config__ = FROM_OUTSIDE

    job: str
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    """How many nodes of the pool."""
    min_nodes: int | None = None
    """With how many of them the job may start. None: with all."""
    tier: Tier | None = None
    """Which checks a node must have passed."""
    max_age_seconds: float | None = None
    """How old their results may be."""
    wait_seconds: float | None = None
    """How long the gate may hold before it is decided."""
    runtime_seconds: float | None = None
    """How long the job will run: nodes with a scheduled event before its end are left out. 0: events only warn."""
    lease_seconds: float | None = None
    """How long the lease lasts where no node can see the end of the job."""
    mode: Mode | None = None
    workload: str | None = None
    """The job's process or pod, with which the lease ends (see `healthd.core.workload`)."""
    collective: bool | None = None
    """Several nodes run collectives together before they are admitted, or what `kind` says."""
    kind: ValidationKind = ValidationKind.COLLECTIVES
    lease: bool = True
    """False asks for nothing but the answer: the nodes are free again as soon as it is given."""
    join: Join | None = None
    """Who asks is one member of a group: all who ask for one job, attempt and group are one gate."""
