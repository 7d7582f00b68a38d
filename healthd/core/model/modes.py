"""How a gate answers: in earnest or to watch, and which answers there are."""

from __future__ import annotations

import enum


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
