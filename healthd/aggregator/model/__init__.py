"""
The seam of the aggregator: what the registry tells the gate, what the gate is, and what a step of it wants done.

Frozen data; nothing here acts. The engine uses the registry, `gate` sees only `Snapshot`. Times named `*_at` and
`deadline` are seconds of the engine's clock: seconds since the epoch when the process started, from there on by
CLOCK_BOOTTIME, so that a clock that jumps moves no deadline.

`claims` is who has which node, `nodes` the fleet as a step sees it, `gates` how far a gate is, `effects` what a step of
it wants done. Import from here.
"""

from __future__ import annotations

from healthd.aggregator.model.claims import Claim, ClaimKind, LeaseRow, LeaseState, Override
from healthd.aggregator.model.effects import (
    Accuse,
    Effect,
    GrantLease,
    RevokeLease,
    WakeAt,
)
from healthd.aggregator.model.gates import (
    Checking,
    Closing,
    Collecting,
    Decided,
    Gate,
    GateGroup,
    Grant,
    Granting,
    Member,
    OrderedRun,
    Phase,
    Progress,
    RunStatus,
    Terms,
    Validating,
    Waiting,
    phase_of,
)
from healthd.aggregator.model.nodes import Duplicate, FleetNode, Snapshot

__all__ = [
    "Accuse",
    "Checking",
    "Claim",
    "ClaimKind",
    "Closing",
    "Collecting",
    "Decided",
    "Duplicate",
    "Effect",
    "FleetNode",
    "Gate",
    "GateGroup",
    "Grant",
    "GrantLease",
    "Granting",
    "LeaseRow",
    "LeaseState",
    "Member",
    "OrderedRun",
    "Override",
    "Phase",
    "Progress",
    "RevokeLease",
    "RunStatus",
    "Snapshot",
    "Terms",
    "Validating",
    "Waiting",
    "WakeAt",
    "phase_of",
]
