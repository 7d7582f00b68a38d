"""The health of a node, and why it is not healthy."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from checks.words import Action, Blame, Status


class Health(str, enum.Enum):
    """Of a node."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """
    Why a node is not healthy, or a gate did not admit: one sentence with its address.

    `node`, `target` and `check` are None where they do not apply.
    """

    code: str
    message: str
    status: Status
    blame: Blame
    action: Action
    node: str | None = None
    target: str | None = None
    check: str | None = None
    injected: bool = False
