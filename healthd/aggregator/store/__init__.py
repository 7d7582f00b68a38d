"""Tables, migrations and rows: the one place with SQL. It knows records, never logic."""

from healthd.aggregator.store.reading import HistoryEvent, Loaded
from healthd.aggregator.store.rows import (
    Change,
    ForgetNode,
    Kind,
    PutDuplicate,
    PutEvent,
    PutEvidence,
    PutFacts,
    PutGate,
    PutLease,
    PutMeta,
    PutNode,
    PutNotes,
    PutOutcome,
    PutPostmortem,
    PutRecord,
    apply_changes,
)
from healthd.aggregator.store.session import FencedError, RefusedWorkError, UnsureError
from healthd.aggregator.store.store import ANSWER_SECONDS, LONG_SECONDS, Store

__all__ = [
    "ANSWER_SECONDS",
    "LONG_SECONDS",
    "Change",
    "FencedError",
    "ForgetNode",
    "HistoryEvent",
    "Kind",
    "Loaded",
    "PutDuplicate",
    "PutEvent",
    "PutEvidence",
    "PutFacts",
    "PutGate",
    "PutLease",
    "PutMeta",
    "PutNode",
    "PutNotes",
    "PutOutcome",
    "PutPostmortem",
    "PutRecord",
    "RefusedWorkError",
    "Store",
    "UnsureError",
    "apply_changes",
    "reading",
    "rows",
]
