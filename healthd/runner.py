"""
Run a plan of checks in child processes, bound them, kill them, and turn anything into a CheckResult.

Raises nothing but CancelledError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checks.contract import Limit, Tier
from healthd.model import CheckResult, Inventory


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run: names of enabled checks, lightest tier first. `tier` is recorded in the results."""

    tier: Tier
    checks: tuple[str, ...]
    executor: str
    order: str | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the standard-library child says of the machine before anything runs. Ids are None where unknown."""

    inventory: Inventory
    boot_id: str | None
    instance_id: str | None
    instance_type: str | None
    versions: Mapping[str, str]
    holders: tuple[str, ...] | None  # who holds devices ("pid 123 (python)"); None: cannot be seen
    raw: Mapping[str, Any] = field(default_factory=dict)


OnResult = Callable[[CheckResult], None]
Limits = Mapping[str, Limit]
