"""Tables, migrations and rows: the one place with SQL. It knows records, never logic."""

from healthd.aggregator.store.database import RefusedWorkError, UnsureError, is_shared
from healthd.aggregator.store.leadership import (
    LEASE_SECONDS,
    FencedError,
    Leadership,
    NotVacantError,
    boot_seconds,
)
from healthd.aggregator.store.reading import HistoryEvent, Loaded
from healthd.aggregator.store.rows import (
    Change,
    ForgetNode,
    Kind,
    PutDuplicate,
    PutEvent,
    PutEvidence,
    PutGate,
    PutLease,
    PutMeta,
    PutNode,
    PutNotes,
    PutOutcome,
    PutPostmortem,
    PutQuarantined,
    PutRecord,
    apply_changes,
)
from healthd.aggregator.store.store import ANSWER_SECONDS, LONG_SECONDS, Store
from healthd.aggregator.store.watch import Look, Watch, step_down

__all__ = [
    "ANSWER_SECONDS",
    "LEASE_SECONDS",
    "LONG_SECONDS",
    "Change",
    "FencedError",
    "ForgetNode",
    "HistoryEvent",
    "Kind",
    "Leadership",
    "Loaded",
    "Look",
    "NotVacantError",
    "PutDuplicate",
    "PutEvent",
    "PutEvidence",
    "PutGate",
    "PutLease",
    "PutMeta",
    "PutNode",
    "PutNotes",
    "PutOutcome",
    "PutPostmortem",
    "PutQuarantined",
    "PutRecord",
    "RefusedWorkError",
    "Store",
    "UnsureError",
    "Watch",
    "apply_changes",
    "boot_seconds",
    "is_shared",
    "reading",
    "rows",
    "step_down",
]
