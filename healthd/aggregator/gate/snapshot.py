"""The registry as one turn of the engine sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from healthd.aggregator.model import FleetNode, Registry


class LookedUp(Mapping[str, FleetNode]):
    """The registry as a mapping, each node looked up once a turn so that all steps of the turn see the same."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: dict[str, FleetNode | None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """As of a mapping; None for a node that nobody heard of."""
        if key not in self._seen:
            self._seen[key] = self._registry.node(key)
        found = self._seen[key]
        return default if found is None else found

    def __getitem__(self, key: str) -> FleetNode:
        found: FleetNode | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.names())

    def __len__(self) -> int:
        return len(self._registry.names())
