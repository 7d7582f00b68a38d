"""What is known of running jobs by the steps that their nodes tell. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SteppingJob:
    """A running job whose nodes tell the times of its steps; `step_seconds` null: nothing was compared yet."""

    job: str
    nodes: int
    ranks: int
    step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SlowNodeRow:
    """A node that is slow in a job by its own time. `ranks` are those it has."""

    job: str
    node: str
    ranks: tuple[int, ...]
    own_seconds: float
    peers_seconds: float
    message: str
