"""The record of what is saved of a node's state over a restart of its daemon."""

from __future__ import annotations

from dataclasses import dataclass

from healthd.core.model import Quarantine
from healthd.node.state.results import StampedResult


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state file."""

    version: int
    boot_id: str | None
    """The boot in which it was written; None where it is unknown."""
    results: tuple[StampedResult, ...]
    """Evidence of that boot."""
    history: tuple[StampedResult, ...]
    """Results of that boot and of earlier ones."""
    quarantine: Quarantine | None = None
    """Saved so that the node can report it to an aggregator that has lost its database."""
    quarantine_told: bool = False
    """An aggregator has said whether there is a quarantine."""
