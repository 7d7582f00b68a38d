"""
What risk and the planner of screenings work on, what they give, and what is remembered of a node. Frozen data.

All `*_at` are seconds of the engine's clock; -inf stands for never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checks.contract import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """
    What the risk of a node is computed from. None: not known.

    `days_since_pass` is the age of the oldest check of the screening's tier that passed; None: one of them never has.
    `corrected_per_hour` counts corrected memory errors of all devices now, `corrected_before_per_hour` the same at the
    last pass. `failures` are screenings that failed, `quarantines` all that the node has had. `age_days` is how long
    its devices are known to be in service. `changed`: its firmware or driver is another one than at the last pass.
    `neighbour_failed`: a node with the same switch or delivery failed lately.
    """

    node: str
    pool: str | None
    days_since_pass: float | None
    corrected_per_hour: float | None = None
    corrected_before_per_hour: float | None = None
    failures: int = 0
    quarantines: int = 0
    age_days: float | None = None
    changed: bool | None = None
    neighbour_failed: bool | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a risk: the name of what it counts, its value, and the points that it adds."""

    name: str
    value: float
    points: float


@dataclass(frozen=True, slots=True)
class Risk:
    """
    How urgent the screening of a node is: `total` is the sum of the points of `terms`, which has no empty ones.
    `unknown` names what is not known of the node and adds nothing.
    """

    total: float
    terms: tuple[Term, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """
    A node as the planner sees it. `pool` is empty for a node without one.

    `tier_at` is when the oldest check of the tier passed, `pair_at` when the node last passed collectives with another
    one. `changed`: it is due whatever these say. `kind` is its accelerator; None: it runs no collectives. It rests
    until `not_before`.
    """

    node: str
    pool: str
    risk: float
    tier_at: float
    pair_at: float
    kind: str | None = None
    changed: bool = False
    not_before: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A screening to start: the tier on `node`, or collectives between it and `partner`."""

    node: str
    partner: str | None = None


@dataclass(frozen=True, kw_only=True)
class Screened:
    """
    What is remembered of the screenings of a node, as it is on disk.

    `machine` tells one machine from another, and is known since `known_at`; with another machine all begins again.
    `passed` says by check when it last passed in a run of `tier` or a heavier one. `paired_at` is when the node last
    passed collectives with another one, `tried_at` when a screening last ended without a pass. `corrected_per_hour` and
    `versions` are as they were when the tier last passed as a whole.
    """

    node: str
    machine: str
    known_at: float
    tier: Tier
    passed: Mapping[str, float] = field(default_factory=dict)
    paired_at: float | None = None
    failures: int = 0
    failed_at: float | None = None
    tried_at: float | None = None
    corrected_per_hour: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """
    A node in the list of screenings, in the order in which nodes are due. `work` is what it runs now: the tier, or
    `collectives with NODE`; None while it runs nothing. `due`: it was not screened within the time of the settings.
    """

    candidate: Candidate
    risk: Risk
    passed_at: float | None
    paired_at: float | None
    due: bool
    work: str | None
