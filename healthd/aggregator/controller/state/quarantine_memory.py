"""What the rules remember, in memory as it is on disk: what a failed transaction leaves is dropped."""

from __future__ import annotations

from typing import Any

from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.model.quarantines import Breaker, Latch, Rule, RuleRecord
from healthd.aggregator.quarantine.recheck import due_at
from healthd.aggregator.store.changes import Kind, PutMeta, PutRecord
from healthd.aggregator.store.reading import Loaded
from healthd.core import wire

BREAKERS = "rule_breakers"
"""The fact about the database under which open breakers are kept."""
MOST_LATCHED = 20_000
"""Devices and machines that latches are kept of: as many as nodes; beyond that the oldest go, and it is said."""


class QuarantineMemory:
    """
    `records` and `machines` by node, `latches` by what they are on, `breakers` by pool: as on disk. `versions` are the
    states that were looked at, `due` says when time alone may change a record.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.records: dict[str, RuleRecord] = dict(loaded.rules)
        self.latches: dict[str, tuple[Latch, ...]] = dict(loaded.latches)
        self.machines: dict[str, str] = dict(loaded.machines)
        self.breakers: dict[str, Breaker] = wire.decode(
            loaded.meta.get(BREAKERS, "{}").encode(), dict[str, Breaker], what="breakers of the rules"
        )
        self.versions: dict[str, int] = {}
        self.due: dict[str, float] = {name: due_at(record) for name, record in self.records.items() if record.word}
        self._doubted: frozenset[str] | None = None

    def doubted(self) -> frozenset[str]:
        """Nodes that a validation has accused and nothing has cleared."""
        if self._doubted is None:
            records = self.records.items()
            self._doubted = frozenset(n for n, r in records if any(count.rule is Rule.ACCUSED for count in r.counts))
        return self._doubted

    def set(self, where: dict[Any, Any], key: str, value: Any) -> None:
        """Change one entry; None drops it."""
        if where is self.records:
            self._doubted = None
        if value is None:
            where.pop(key, None)
        else:
            where[key] = value

    def put_record(self, batch: Batch, node: str, record: RuleRecord | None) -> None:
        """What is remembered of a node, without latches."""
        self.set(self.records, node, record)
        batch.changes.append(PutRecord(kind=Kind.RULES, key=node, record=record))

    def put_machine(self, batch: Batch, node: str, machine: str) -> None:
        """Which machine the node is."""
        self.set(self.machines, node, machine)
        batch.changes.append(PutRecord(kind=Kind.MACHINE, key=node, record=machine))

    def put_latches(self, batch: Batch, identity: str, latches: tuple[Latch, ...]) -> None:
        """All that is latched on one device or machine; nothing is written when it is the same."""
        if self.latches.get(identity, ()) == latches:
            return
        self.set(self.latches, identity, latches or None)
        batch.changes.append(PutRecord(kind=Kind.LATCHES, key=identity, record=latches or None))
        if len(self.latches) > MOST_LATCHED:
            oldest = min(self.latches, key=lambda key: max(latch.last_at for latch in self.latches[key]))
            batch.event("fleet", "latch dropped", f"{oldest}: more than {MOST_LATCHED} are latched")
            self.put_latches(batch, oldest, ())

    def put_breaker(self, batch: Batch, pool: str, breaker: Breaker | None) -> None:
        """A breaker opens; None closes it."""
        self.set(self.breakers, pool, breaker)
        batch.changes.append(PutMeta(key=BREAKERS, value=wire.encode(self.breakers).decode()))
