"""
The list of repairs: what healthd advises for a node or device, and what people decided about it. Frozen data.

All `*_at` and `since` are seconds of the engine's clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from checks.contract import Action

MOST_STEPS = 20
"""Of one repair; beyond that the oldest go, except for the first."""


class RepairState(str, enum.Enum):
    """How far a repair is."""

    ADVISED = "advised"
    """No person has decided."""
    ACCEPTED = "accepted"
    """A person has taken it on."""
    REJECTED = "rejected"
    """A person decided against it. The node stays quarantined until the finding is cleared or it is released."""
    DONE = "done"
    """The repair was made. The node stays quarantined until it passes the deep tier."""
    CLOSED = "closed"
    """Nothing is left to do; see `RepairEnd`."""


class RepairDecision(str, enum.Enum):
    """What a person decides about a repair."""

    ACCEPT = "accept"
    REJECT = "reject"
    DONE = "done"


class RepairEnd(str, enum.Enum):
    """Why a repair was closed."""

    PASSED = "passed"
    """It was made, and the node passed the deep tier afterwards."""
    CLEARED = "cleared"
    """Newer results cleared the finding, such as a pass after a reboot."""
    RELEASED = "released"
    """A person released the node."""
    GONE = "gone"
    """The node was forgotten."""


REPAIRED = (RepairEnd.PASSED, RepairEnd.CLEARED)
"""The ends after which the node is known to be repaired."""


@dataclass(frozen=True, kw_only=True)
class RepairStep:
    """A change of state: when, by whom (`healthd`, or a person), and why."""

    at: float
    state: RepairState
    by: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Repair:
    """
    One repair that healthd advises. `device` is the device, or `node` for the whole node; `identity` is what the fault
    is latched on. `advice` is the strongest action among the faults there; `check`, `code` and `message` are of the
    fault that advises it. `since` is when the first of them was found. `steps` are oldest first.
    """

    node: str
    device: str
    identity: str
    advice: Action
    check: str
    code: str
    message: str
    since: float
    state: RepairState
    steps: tuple[RepairStep, ...]
    closed_at: float | None = None
    end: RepairEnd | None = None

    @property
    def repaired_seconds(self) -> float | None:
        """From the finding to the end of a repair that was made; None for any other."""
        rejected = any(step.state is RepairState.REJECTED for step in self.steps[-2:-1])
        if self.closed_at is None or self.end not in REPAIRED or rejected:
            return None
        return max(0.0, self.closed_at - self.since)
