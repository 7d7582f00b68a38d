"""Effects: what a step wants done, committed with gate' in one transaction, then carried out; each may be repeated."""

from __future__ import annotations

from dataclasses import dataclass

from checks.contract import Tier
from healthd.core.model import Reason


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """These nodes belong to this gate until Unreserve."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Unreserve:
    """These nodes are anybody's again (those with a lease stay with the lease)."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OrderRun:
    """The node is to run a tier; an order of an earlier round is cancelled by it."""

    node: str
    order_id: str
    tier: Tier
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True)
class GrantLease:
    """The node is to store this lease."""

    node: str
    lease_id: str


@dataclass(frozen=True, kw_only=True)
class RevokeLease:
    """The node is to forget this lease; `why` is for people."""

    node: str
    lease_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class StartGroups:
    """Nodes get the orders of the groups that the gate's validation tests now; earlier ones are called off."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Accuse:
    """A validation found the node at fault."""

    node: str
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Step the gate again at this time, if nothing wakes it before."""

    at: float


Effect = Reserve | Unreserve | OrderRun | StartGroups | Accuse | GrantLease | RevokeLease | WakeAt
