"""Settings of the ECS agent: keys `ecs_*` of `[node.allocations]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EcsSettings:
    """Where the ECS agent of the host answers."""

    url: str = "http://127.0.0.1:51678"
    """Introspection endpoint of the ECS agent, at its fixed address."""
