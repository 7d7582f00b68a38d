"""What risk and the planner of screenings work on, and what they give. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """
    What the risk of a node is computed from.

    `days_since_pass` is the age of the oldest check of the screening's tier that passed; None: one of them never has.
    `corrected_per_hour` counts corrected memory errors of all devices now, `corrected_before_per_hour` the same at the
    last pass. `failures` are screenings that failed, `quarantines` all that the node has had. `age_days` is how long
    its devices are known to be in service; None where that is not known. `changed`: its firmware or driver is another
    one than at the last pass. `neighbour_failed`: a node with the same switch or delivery failed lately.
    """

    node: str
    pool: str | None
    days_since_pass: float | None
    corrected_per_hour: float = 0.0
    corrected_before_per_hour: float = 0.0
    failures: int = 0
    quarantines: int = 0
    age_days: float | None = None
    changed: bool = False
    neighbour_failed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand of a risk: the name of what it counts, its value, and the points that it adds."""

    name: str
    value: float
    points: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Risk:
    """How urgent the screening of a node is: `total` is the sum of the points of `terms`, which has no empty ones."""

    total: float
    terms: tuple[Term, ...]
