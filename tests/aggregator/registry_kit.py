"""What the tests of registry, and those beside them, are made with."""

from __future__ import annotations

from healthd.aggregator.fleet.registry import Fleet
from tests.aggregator.parts import Clock, Node, state


async def joined(registry: Fleet, clock: Clock, name: str = "n1", **changes: object) -> Node:
    node = Node(registry, clock, name=name)
    await node.join(state(name, **changes))  # type: ignore[arg-type]
    return node
