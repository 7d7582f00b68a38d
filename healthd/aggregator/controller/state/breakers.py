"""The breakers of the rules: quarantines by rule stop at a share of a pool, until a person has looked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.controller.state.fleet_state import FleetState
from healthd.aggregator.controller.state.quarantine_memory import QuarantineMemory
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import PoolLimit
from healthd.aggregator.model.quarantines import Breaker, Mode, OpenBreaker

log = logging.getLogger(__name__)


class Breakers:
    """By pool; "" are the nodes without one. Kept in `memory`, which is as on disk."""

    def __init__(
        self,
        memory: QuarantineMemory,
        fleet_state: FleetState,
        registry: Fleet,
        policy: Policy,
        *,
        pool_of: Callable[[str], str | None],
        present: Callable[[str, float], bool],
    ) -> None:
        self._memory = memory
        self._fleet_state = fleet_state
        self._registry = registry
        self._policy = policy
        self._pool_of = pool_of
        self._present = present
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        """A turn begins: pools are counted anew."""
        self._sizes.clear()

    def all(self) -> Mapping[str, Breaker]:
        """Those that are open, by pool."""
        return dict(self._memory.breakers)

    def room(self, now: float, pool: str | None) -> PoolLimit:
        """
        How many nodes of a pool the rules keep out, and may. Nodes that are gone count for nothing: a terminated one
        would keep its place for ever.
        """
        key = pool or ""
        if key not in self._sizes:
            unlabelled = (name for name in self._registry.names() if self._pool_of(name) is None)
            names = self._registry.pool(key) if key else unlabelled
            self._sizes[key] = sum(self._present(name, now) for name in names)
        kept = sum(
            one.owner_kind == "rule" and (self._pool_of(name) or "") == key and self._present(name, now)
            for name, one in self._fleet_state.quarantines.items()
        )
        size = self._sizes[key]
        most = self._policy.most_out(size)
        return PoolLimit(pool=key, size=size, kept=kept, most=most, open=key in self._memory.breakers)

    def trip(self, batch: Batch, effect: OpenBreaker) -> None:
        """The rules want more nodes of a pool out than they may: a person is to look first."""
        if effect.pool in self._memory.breakers:
            return
        log.error("the breaker of the rules has tripped: %s", effect.reason)
        self._memory.put_breaker(batch, effect.pool, Breaker(at=batch.now, reason=effect.reason))
        batch.event("fleet", "breaker tripped", effect.reason)

    def reset(self, batch: Batch, owner: str, pool: str | None) -> tuple[str, ...]:
        """A person has looked; the pools whose breaker is closed again: all, or the one that is named."""
        closed = tuple(name for name in self._memory.breakers if pool is None or name == pool)
        for name in closed:
            batch.event("fleet", "breaker reset", f"by {owner}: {name or 'nodes without a pool'}")
            self._memory.put_breaker(batch, name, None)
        if closed:
            for name, record in self._memory.records.items():
                if record.word is not None and record.word.mode is Mode.HELD:
                    self._memory.set(self._memory.due, name, batch.now)
        return closed
