"""Who has a node, by the engine: claims, leases as the aggregator keeps them, and overrides."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from healthd.core.model import Lease


class ClaimKind(str, enum.Enum):
    """RESERVED by an open gate, or LEASED to an admitted job."""

    RESERVED = "reserved"
    LEASED = "leased"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who has a node, so that no other gate may take it."""

    kind: ClaimKind
    gate: str
    job: str
    attempt: int


class LeaseState(str, enum.Enum):
    """
    GRANTED: on disk here, the node has not confirmed it. ACKNOWLEDGED: the node has stored it. ENDING: withdrawn,
    but the node may still hold it. CLOSED: gone on both sides; on disk for as long as its gate.
    """

    GRANTED = "granted"
    ACKNOWLEDGED = "acknowledged"
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    """
    One lease on one node, as the aggregator keeps it. `lease.age_seconds` is 0; the age follows from `granted_at`.

    `adopted` marks one that this database learned of from the node: another one granted it, or this one before an old
    copy was put back. `why` says why it ended.
    """

    node: str
    lease: Lease
    state: LeaseState
    granted_at: float
    adopted: bool = False
    closed_at: float | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """A person admits a job by hand, whatever its nodes are; `until` is in seconds since the epoch."""

    job: str
    reason: str
    owner: str
    since: float
    until: float
