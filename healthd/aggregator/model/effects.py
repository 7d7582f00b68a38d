"""
Effects: what a step wants done, committed with gate' in one transaction, then carried out; each may be repeated.

What follows from gate' itself is none: which nodes it has reserved, and what it has them run.
"""

from __future__ import annotations

from dataclasses import dataclass

from healthd.core.model import Reason


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
class Accuse:
    """A validation found the node at fault."""

    node: str
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Step the gate again at this time, if nothing wakes it before."""

    at: float


Effect = Accuse | GrantLease | RevokeLease | WakeAt
