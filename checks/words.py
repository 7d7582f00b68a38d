"""The words of checks: few of them, for programs that show what checks came to and run none."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping


class Status(str, enum.Enum):
    """Of a finding or a result. Ordered by `worst`, never by `<`: "unknown" is not "less than" fail."""

    SKIP = "skip"
    PASS = "pass"
    WARN = "warn"
    UNKNOWN = "unknown"
    FAIL = "fail"


SEVERITY: Mapping[Status, int] = {status: rank for rank, status in enumerate(Status)}


def worst(statuses: Iterable[Status]) -> Status:
    """The most severe status; UNKNOWN where there is none at all, because silence is not health."""
    return max(statuses, key=SEVERITY.__getitem__, default=Status.UNKNOWN)


class Tier(str, enum.Enum):
    """How much a run may cost. A run of one tier runs the checks of that tier and of all lighter ones."""

    PASSIVE = "passive"
    QUICK = "quick"
    DEEP = "deep"
    SOAK = "soak"

    @property
    def rank(self) -> int:
        """0 for passive up to 3 for soak."""
        return _TIER_RANK[self.value]


# Asked for each result of each node that a gate judges: a look-up, not a search.
_TIER_RANK: Mapping[str, int] = {tier.value: rank for rank, tier in enumerate(Tier)}


class Blame(str, enum.Enum):
    """Whose fault it is. Only NODE may mark a node."""

    NODE = "node"
    PATH = "path"
    CHECK = "check"
    CONTROL = "control"


class Action(str, enum.Enum):
    """What to do about a reason."""

    NONE = "none"
    RETRY = "retry"
    RESET_DEVICE = "reset_device"
    REBOOT = "reboot"
    REPLACE = "replace"
    INSPECT = "inspect"


class Scope(str, enum.Enum):
    """Where a check runs: once for the node, once on each device, or as one group with a rank on each device."""

    NODE = "node"
    DEVICE = "device"
    GROUP = "group"
