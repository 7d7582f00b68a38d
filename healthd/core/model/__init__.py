"""
The data of healthd: frozen, one definition for memory and wire (JSON by `healthd.core.wire`).

Nothing here does anything. Ages cross the wire, not clocks: `age_seconds` counts up to the moment of sending;
times (`*_at`, seconds since the epoch) are for people to read and never decide anything.

`results` is what checks came to, `node` what is known of a node, `modes` the words of gates, `gates` the question and
its answer, `orders` what an aggregator wants of a node, `sync` how the two talk. Import from here: a module is loaded
when a name in it is first asked for, because a record costs a millisecond to define and a passive round of `healthd
check` needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthd.core.model.gates import (
        LARGEST_ATTEMPT,
        AdmittedNode,
        Claim,
        ClaimList,
        Decision,
        ExcludedNode,
        GateRequest,
        GateTerm,
        HandshakeAnswer,
        HandshakeBody,
        HandshakeEvent,
        Join,
        Mode,
        ValidationKind,
        Verdict,
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
    from healthd.core.model.results import CheckResult, CheckSpec, Health, Reason, WorkDigest
    from healthd.core.model.sync import PROTOCOL, Problem, StepBlock, SyncAnswer, SyncRequest

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
    "ValidationKind",
    "Verdict",
    "WellNode",
    "WorkDigest",
]

if not TYPE_CHECKING:
    import importlib
    import sys

    def __getattr__(name: str) -> object:
        """A name out of the first module that has it (PEP 562)."""
        if name in __all__:
            # In the order in which they need each other, the lightest first.
            for module in ("results", "node", "orders", "gates", "sync"):
                found = vars(importlib.import_module(f"{__name__}.{module}"))
                if name in found:
                    setattr(sys.modules[__name__], name, found[name])
                    return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
