"""
The records that are written to the database. Writing each of them again changes nothing, except for `PutEvent`. `rows`
has their SQL, `reading` what is read back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.aggregator.model.calibration import GateFacts
from healthd.aggregator.model.claims import LeaseRow, Override
from healthd.aggregator.model.gates import Gate
from healthd.aggregator.model.nodes import Duplicate
from healthd.aggregator.model.quarantines import Latch, RuleRecord
from healthd.core.model import NodeState, Quarantine


@dataclass(frozen=True, kw_only=True)
class PutGate:
    """A gate."""

    gate: Gate


@dataclass(frozen=True, kw_only=True)
class PutEvidence:
    """The states that a decision is based on."""

    gate: str
    states: tuple[NodeState, ...]


@dataclass(frozen=True, kw_only=True)
class PutFacts:
    """The facts of a decided gate that figures are computed from."""

    facts: GateFacts


@dataclass(frozen=True, kw_only=True)
class PutLease:
    """A lease."""

    row: LeaseRow


@dataclass(frozen=True, kw_only=True)
class PutOutcome:
    """How an admitted job ended."""

    gate: str
    job: str
    attempt: int
    status: str
    message: str
    told_at: float


@dataclass(frozen=True, kw_only=True)
class PutNode:
    """A node that has reported; its key is left as it is."""

    node: str
    labels: Mapping[str, str]
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class PutKey:
    """The key of a node; None lets the next one enrol."""

    node: str
    key_hash: str | None
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class PutDuplicate:
    """That two daemons claim the name of a node; None: an admin has decided. No effect on an unknown node."""

    node: str
    duplicate: Duplicate | None


@dataclass(frozen=True, kw_only=True)
class ForgetNode:
    """Deletes a node that is gone for good, with its quarantine and what the rules remember of it."""

    node: str


@dataclass(frozen=True, kw_only=True)
class PutEvent:
    """A line of the audit trail; `subject` is a node's name or `job:NAME`. The one change that is not an upsert."""

    at: float
    subject: str
    kind: str
    message: str


class Kind(str, enum.Enum):
    """What a record of the table `records` is."""

    QUARANTINE = "quarantine"
    """A `Quarantine`, by node."""
    OVERRIDE = "override"
    """An `Override`, by job."""
    RULES = "rules"
    """The `RuleRecord` of a node without its latches, while there is anything to remember."""
    LATCHES = "latches"
    """Each `Latch` on a device or machine, by its serial number, its instance id, else its node's name."""
    MACHINE = "machine"
    """Which machine a node was last, as `healthd.aggregator.inventory.machine_identity.machine_of` writes it."""


Record = Quarantine | Override | RuleRecord | tuple[Latch, ...] | str


@dataclass(frozen=True, kw_only=True)
class PutRecord:
    """A record of a kind; None: there is none."""

    kind: Kind
    key: str
    record: Record | None


@dataclass(frozen=True, kw_only=True)
class PutMeta:
    """A fact about the database as a whole."""

    key: str
    value: str


Change = (
    PutGate
    | PutEvidence
    | PutFacts
    | PutLease
    | PutOutcome
    | PutNode
    | PutKey
    | PutDuplicate
    | ForgetNode
    | PutEvent
    | PutMeta
    | PutRecord
)
