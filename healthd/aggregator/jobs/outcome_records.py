"""Records of each decided gate and its outcome, for `calibration` and the store."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from healthd.core.model import Verdict

WORDS: Mapping[str, str] = {"ok": "ok", "succeeded": "ok", "failed": "failed", "infra": "infra"}
"""What a launcher may say of a job's end -> what it counts as; any other word counts as `other`."""


class GateEnding(str, enum.Enum):
    """
    How a gate ended. ADMITTED: all its nodes were fit. OBSERVED: observe mode admitted, whatever they were. OVERRIDDEN:
    a person did. REJECTED. WITHDRAWN: the one who asked took it back, or asked anew.
    """

    ADMITTED = "admitted"
    OBSERVED = "observed"
    OVERRIDDEN = "overridden"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"


STARTED = (GateEnding.ADMITTED, GateEnding.OBSERVED, GateEnding.OVERRIDDEN)
"""Ways after which a job may run."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """
    Something a gate knew against a node. `out`: the decision left the node out for it; else the job ran on it.

    `check` is empty where no check said it (a quarantine, a silent node).
    """

    node: str
    check: str
    code: str
    out: bool


@dataclass(frozen=True, kw_only=True)
class GateFacts:
    """
    Of one decided gate. `would` is what enforce mode says of it: the decision itself where that is the mode.

    `alarmed`: a check had failed on a node that the job was given. `clean`: enforce admits, and none had.
    `wait_seconds` is from the question to the decision; `device_seconds` what its runs and collectives have cost.
    """

    gate: str
    decided_at: float
    way: GateEnding
    would: Verdict
    alarmed: bool
    clean: bool
    wait_seconds: float
    device_seconds: float
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job's end as it is counted: `outcome` is ok, failed, infra or other."""

    outcome: str
    way: GateEnding
    alarmed: bool
    clean: bool


@dataclass(frozen=True, kw_only=True)
class EndRow:
    """Jobs that ended alike after alike gates; `status` is the launcher's own word."""

    status: str
    way: GateEnding
    would: Verdict
    alarmed: bool
    clean: bool
    count: int


@dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """Gates that were decided alike, and what they cost together."""

    way: GateEnding
    would: Verdict
    count: int
    device_seconds: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """
    What the store has counted. `since` is when the oldest gate of the window was decided, None without any.

    `failed` are (check, the launcher's word, gates in which it had failed on a node that the job ran on); `excluded`
    are (node, reason, gates that left it out for that). `told` is of gates whose jobs have told their end.
    """

    since: float | None
    ends: Sequence[EndRow]
    decisions: Sequence[DecisionRow]
    failed: Sequence[tuple[str, str, int]]
    excluded: Sequence[tuple[str, str, int]]
    out: Mapping[str, int]
    """By node, in how many gates it was left out at all."""
    waits: Mapping[GateEnding, Sequence[float]]
    """Seconds from the question to the decision, ascending."""
