"""Settings of the steps of jobs: keys `step_*` of `[node]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Whether a node takes reports."""

    reports: bool = True
    """Whether jobs on this host may report their steps, at `steps.sock` in `run_dir`. Every user may write to it;
    reports lead to warnings at most."""
