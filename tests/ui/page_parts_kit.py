"""What the tests of page parts, and those beside them, are made with."""

from __future__ import annotations

from typing import Any

from healthd.aggregator.fleet.registry import Fleet
from tests.aggregator.parts import Clock, Node, fleet, state


def member(registry: Fleet, clock: Clock, name: str, **of: Any) -> Node:
    """A node with a key of its own: one key under two names is one machine that was renamed."""
    return Node(registry, clock, name, key=f"key of {name}", **of)


async def filled(**nodes: Any) -> tuple[Any, Clock]:
    clock = Clock()
    registry = fleet(clock, max_nodes=10_000)
    for name, changes in nodes.items():
        await member(registry, clock, name).join(state(name, **changes))
    return registry, clock
