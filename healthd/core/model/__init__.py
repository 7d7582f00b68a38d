"""
The data of healthd: frozen, one definition for memory and wire (JSON by `healthd.core.wire`).

Nothing here does anything. Ages cross the wire, not clocks: `age_seconds` counts up to the moment of sending;
times (`*_at`, seconds since the epoch) are for people to read and never decide anything.

`reasons` is why a node is not healthy, `results` what checks came to, `node` what is known of a node, `questions` and
`gates` are the question of a gate and its answer, `orders` what an aggregator wants of a node, `sync` how the two talk.
Import from here: a module is loaded when a name in it is first asked for, because a record costs a millisecond to
define and a hook or a passive round of `healthd check` needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthd.core.model.gates import (
        AdmittedNode,
        Claim,
        ClaimList,
        Decision,
        ExcludedNode,
        HandshakeAnswer,
        HandshakeBody,
        HandshakeEvent,
        WellNode,
    )
    from healthd.core.model.node import Allocation, DeviceRecord, Inventory, Lease, NodeState, Quarantine
    from healthd.core.model.orders import (
        FINAL_STATUSES,
        RANK_READY,
        CollectiveOrder,
        NccomGroup,
        Order,
        OrderKind,
        OrderReport,
        OrderStatus,
        RankReport,
        RunOrder,
    )
    from healthd.core.model.questions import (
        LARGEST_ATTEMPT,
        GateRequest,
        GateTerm,
        Join,
        Mode,
        ValidationKind,
        Verdict,
    )
    from healthd.core.model.reasons import Health, Reason
    from healthd.core.model.results import CheckResult, CheckSpec, WorkDigest
    from healthd.core.model.sync import PROTOCOL, Problem, StepBlock, SyncAnswer, SyncRequest, Use

__all__ = [
    "FINAL_STATUSES",
    "LARGEST_ATTEMPT",
    "PROTOCOL",
    "RANK_READY",
    "AdmittedNode",
    "Allocation",
    "CheckResult",
    "CheckSpec",
    "Claim",
    "ClaimList",
    "CollectiveOrder",
    "Decision",
    "DeviceRecord",
    "ExcludedNode",
    "GateRequest",
    "GateTerm",
    "HandshakeAnswer",
    "HandshakeBody",
    "HandshakeEvent",
    "Health",
    "Inventory",
    "Join",
    "Lease",
    "Mode",
    "NccomGroup",
    "NodeState",
    "Order",
    "OrderKind",
    "OrderReport",
    "OrderStatus",
    "Problem",
    "Quarantine",
    "RankReport",
    "Reason",
    "RunOrder",
    "StepBlock",
    "SyncAnswer",
    "SyncRequest",
    "Use",
    "ValidationKind",
    "Verdict",
    "WellNode",
    "WorkDigest",
]

if not TYPE_CHECKING:
    import importlib
    import sys

    MODULES = {
        "questions": {
            "LARGEST_ATTEMPT",
            "GateRequest",
            "GateTerm",
            "Join",
            "Mode",
            "ValidationKind",
            "Verdict",
        },
        "gates": {
            "AdmittedNode",
            "Claim",
            "ClaimList",
            "Decision",
            "ExcludedNode",
            "HandshakeAnswer",
            "HandshakeBody",
            "HandshakeEvent",
            "WellNode",
        },
        "node": {
            "Allocation",
            "DeviceRecord",
            "Inventory",
            "Lease",
            "NodeState",
            "Quarantine",
        },
        "orders": {
            "FINAL_STATUSES",
            "RANK_READY",
            "CollectiveOrder",
            "NccomGroup",
            "Order",
            "OrderKind",
            "OrderReport",
            "OrderStatus",
            "RankReport",
            "RunOrder",
        },
        "reasons": {
            "Health",
            "Reason",
        },
        "results": {
            "CheckResult",
            "CheckSpec",
            "WorkDigest",
        },
        "sync": {
            "PROTOCOL",
            "Problem",
            "StepBlock",
            "SyncAnswer",
            "SyncRequest",
            "Use",
        },
    }

    def __getattr__(name: str) -> object:
        """A name out of the module that has it (PEP 562)."""
        for module, names in MODULES.items():
            if name in names:
                found = vars(importlib.import_module(f"{__name__}.{module}"))[name]
                setattr(sys.modules[__name__], name, found)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
