"""Limits that were learned of healthy machines and approved by a person, as an aggregator hands them on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearnedBounds:
    """A learned limit of one measurement."""

    lower: float | None
    upper: float | None


@dataclass(frozen=True, kw_only=True)
class LearnedLimits:
    """
    The approved baselines of one kind of machine, by names of limits (`matmul_flops_per_second/bf16`).

    They hold for machines of this `hardware` (see `checks.learned`) and these library versions alone. `digest` names
    them; a node says which it has. Without limits: what was told before is revoked.
    """

    digest: str
    hardware: str
    accelerator: str
    versions: Mapping[str, str]
    limits: Mapping[str, LearnedBounds]
