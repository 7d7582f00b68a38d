"""What one pass of the engine's loop changes: rows of its transaction, and whom it concerns."""

from __future__ import annotations

from dataclasses import dataclass, field

from healthd.aggregator.model.effects import Accuse
from healthd.aggregator.model.gates import Gate
from healthd.aggregator.store.changes import Change, PutEvent
from healthd.core.model import Quarantine
from healthd.core.text import plain

MOST_MESSAGE = 4096
"""Characters of a line of the audit trail: people read it, and sentences of ours stay far below."""


@dataclass
class Batch:
    """What one pass changes."""

    now: float
    changes: list[Change] = field(default_factory=list)
    """What is written to the database."""
    touched: set[str] = field(default_factory=set)
    """Nodes whose orders may have changed."""
    freed: set[str] = field(default_factory=set)
    """Nodes that another gate may be able to reserve now."""
    decided: list[Gate] = field(default_factory=list)
    """Gates that were decided."""
    ready: list[Gate] = field(default_factory=list)
    """Gates that have granted their first leases."""
    accused: list[Accuse] = field(default_factory=list)
    """What validations said of nodes."""
    inherited: dict[str, Quarantine] = field(default_factory=dict)
    """By node: what the rules of another database said of it, as the node tells."""
    forgotten: set[str] = field(default_factory=set)
    """Nodes that are gone for good."""

    def event(self, subject: str, kind: str, message: str) -> None:
        """Add a line to the audit trail; it is one line whatever a node has put into it."""
        self.changes.append(PutEvent(at=self.now, subject=subject, kind=kind, message=plain(message, MOST_MESSAGE)))
