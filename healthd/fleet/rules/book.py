"""
What the rules remember of the fleet, in memory as it is on disk, and what they decided carried out on the ledger.

A node at rest costs a look-up: it is looked at when its state is another, or while something is remembered of it.
Everything goes with the turn's transaction; `undo` takes the memory back when that fails.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthd import wire
from healthd.fleet.changes import Loaded, PutLatches, PutMachine, PutMeta, PutRecord
from healthd.fleet.ledger import Batch, Ledger
from healthd.fleet.model import FleetNode, Registry
from healthd.fleet.policy import Policy
from healthd.fleet.rules.facts import facts_of, failing, machine_of
from healthd.fleet.rules.judge import identities_of, inherited, judge, released
from healthd.fleet.rules.model import (
    Breaker,
    Effect,
    Facts,
    Keep,
    Latch,
    Lift,
    Mode,
    Note,
    Record,
    Room,
    Rule,
    Trip,
    Would,
)
from healthd.fleet.rules.probing import due_at
from healthd.model import Order, Reason, RunOrder

log = logging.getLogger(__name__)

BREAKERS = "rule_breakers"
"""The fact about the database under which open breakers are kept."""
MOST_LATCHED = 20_000
"""Devices and machines that latches are kept of: as many as nodes; beyond that the oldest go, and it is said."""

_ABSENT: Any = object()


class Rules:
    """See the module. On the event loop alone."""

    def __init__(self, ledger: Ledger, registry: Registry, policy: Policy, loaded: Loaded) -> None:
        self.counted: Counter[tuple[str, str]] = Counter()
        """How often a rule came to a word, by rule and what came of it, since the process began."""
        self._ledger = ledger
        self._registry = registry
        self._policy = policy
        self._records: dict[str, Record] = dict(loaded.rules)
        self._latches: dict[str, tuple[Latch, ...]] = dict(loaded.latches)
        self._machines: dict[str, str] = dict(loaded.machines)
        self._versions: dict[str, int] = {}
        self._breakers: dict[str, Breaker] = wire.decode(
            loaded.meta.get(BREAKERS, "{}").encode(), dict[str, Breaker], what="breakers of the rules"
        )
        self._due: dict[str, float] = {name: due_at(record) for name, record in self._records.items() if record.word}
        self._journal: list[tuple[dict[Any, Any], Any, Any]] = []
        self._told: list[tuple[str, str]] = []
        self._sizes: dict[str, int] = {}
        for name, record in self._records.items():
            ledger.set_probe(name, _order(record))

    # --- a turn -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new batch: what it changes can be undone."""
        self._journal.clear()
        self._told.clear()
        self._sizes.clear()

    def undo(self) -> None:
        """Back to where the batch began."""
        for where, key, before in reversed(self._journal):
            if before is _ABSENT:
                where.pop(key, None)
            else:
                where[key] = before
        self._journal.clear()
        self._told.clear()

    def committed(self) -> None:
        """What was decided is on disk: count it."""
        self.counted.update(self._told)
        self._told.clear()

    def take_in(self, batch: Batch, heard: Iterable[str]) -> None:
        """Look at the nodes that were heard, and at those whose time is up."""
        if not self._policy.rules:
            return
        due = [name for name, at in self._due.items() if at <= batch.now]
        for name in sorted({*heard, *due}):
            node = self._registry.node(name)
            if node is None or node.state is None or node.duplicate or not node.confirmed:
                self._set(self._due, name, None)  # nothing is known now; its next word brings it back
            elif self._concerns(node):
                self._look(batch, node, ())

    def accuse(self, batch: Batch) -> set[str]:
        """Take in what validations said in this turn; the nodes that are quarantined for it."""
        if not self._policy.rules or not batch.accused:
            return set()
        told: dict[str, list[Reason]] = {}
        for accusation in batch.accused:
            told.setdefault(accusation.node, []).append(accusation.reason)
        before = set(self._ledger.quarantines)
        for name, reasons in sorted(told.items()):
            node = self._registry.node(name)
            if node is not None and node.state is not None:
                self._look(batch, node, tuple(reasons))
        return set(self._ledger.quarantines) - before

    def next_due(self) -> float:
        """When time alone may change something."""
        return min(self._due.values(), default=math.inf)

    def _concerns(self, node: FleetNode) -> bool:
        """Whether there is anything new about the node, or anything remembered of it."""
        record = self._records.get(node.node)
        if record is not None and record.active:
            return True
        if self._versions.get(node.node) == node.version:
            return False
        assert node.state is not None  # the caller has looked
        if node.failing is None or node.machine is None:
            return True
        known = self._machines.get(node.node) == node.machine
        if known and not node.failing and not self._lost_word(node):
            self._set(self._versions, node.node, node.version)
            return False
        return True

    def _lost_word(self, node: FleetNode) -> bool:
        """Whether the node tells of a rule's quarantine by a database that is not ours."""
        kept = node.state.quarantine if node.state is not None else None
        other = node.issuer is not None and node.issuer != self._ledger.store_id
        return other and kept is not None and kept.owner.startswith("rule:") and kept.owner_kind == "rule"

    # --- one node -----------------------------------------------------------------------------------------------------

    def _look(self, batch: Batch, node: FleetNode, accusations: tuple[Reason, ...]) -> None:
        assert node.state is not None  # the caller has looked
        name = node.node
        self._follow_machine(batch, node)
        record = self._records.get(name) or Record(node=name)
        kept = self._ledger.quarantines.get(name)
        person = kept is not None and kept.owner_kind != "rule" and (kept.until is None or kept.until > batch.now)
        facts = facts_of(
            batch.now,
            node,
            self._policy,
            room=self._room(node.state.labels.get("pool")),
            person=person,
            accusations=accusations,
            probe=record.probe.order_id if record.probe is not None else None,
        )
        composed = dataclasses.replace(record, latches=tuple(self._latches_of(record, facts)))
        if self._lost_word(node) and record.word is None and kept is None and node.state.quarantine is not None:
            spoken = node.state.quarantine
            known = spoken.owner.removeprefix("rule:") in {rule.value for rule in Rule}
            rule = Rule(spoken.owner.removeprefix("rule:")) if known else Rule.HARD
            composed = inherited(batch.now, composed, facts, rule, spoken.reason, self._policy)
        after, effects = judge(batch.now, composed, facts, self._policy)
        self._set(self._versions, name, node.version)
        self._keep(batch, record, after, facts)
        for effect in effects:
            self._carry_out(batch, name, effect)

    def _follow_machine(self, batch: Batch, node: FleetNode) -> None:
        """Boots and replaced devices, for the history."""
        assert node.state is not None  # the caller has looked
        machine, known = node.machine or machine_of(node.state), self._machines.get(node.node)
        if machine == known:
            return
        self._set(self._machines, node.node, machine)
        batch.changes.append(PutMachine(node=node.node, machine=machine))
        if known is None:
            return
        for kind, message in _differences(known, machine):
            batch.event(node.node, kind, message)

    def _latches_of(self, record: Record, facts: Facts) -> Iterator[Latch]:
        """Those on what the node is and has, and those on what was in its seats."""
        for identity in dict.fromkeys((*facts.identities, *(seat.identity for seat in record.seats))):
            yield from self._latches.get(identity, ())

    def _keep(self, batch: Batch, before: Record, after: Record, facts: Facts) -> None:
        """Write down what has changed."""
        for identity in dict.fromkeys((*facts.identities, *(held.identity for held in after.latches))):
            if identity in facts.identities:
                self._put_latches(batch, identity, tuple(one for one in after.latches if one.identity == identity))
        slim = dataclasses.replace(after, latches=())
        # With a latch of its own the record stays active; it is composed anew each time.
        if slim != before or (slim.active and before.node not in self._records):
            empty = not slim.active and slim.repeats == 0
            self._set(self._records, after.node, None if empty else slim)
            batch.changes.append(PutRecord(node=after.node, record=None if empty else slim))
        if after.probe != before.probe:
            self._ledger.set_probe(after.node, _order(after))
            batch.touched.add(after.node)
        self._set(self._due, after.node, due_at(slim) if slim.word is not None else None)

    def _put_latches(self, batch: Batch, identity: str, latches: tuple[Latch, ...]) -> None:
        if self._latches.get(identity, ()) == latches:
            return
        self._set(self._latches, identity, latches or None)
        batch.changes.append(PutLatches(identity=identity, latches=latches))
        if len(self._latches) > MOST_LATCHED:
            oldest = min(self._latches, key=lambda key: max(latch.last_at for latch in self._latches[key]))
            batch.event("fleet", "latch dropped", f"{oldest}: more than {MOST_LATCHED} are latched")
            self._put_latches(batch, oldest, ())

    def _carry_out(self, batch: Batch, name: str, effect: Effect) -> None:
        kept = self._ledger.quarantines.get(name)
        ours = kept is None or kept.owner_kind == "rule"
        if isinstance(effect, Keep) and ours:
            self._ledger.put_quarantine(batch, name, effect.quarantine)
        elif isinstance(effect, Lift) and ours and kept is not None:
            self._ledger.put_quarantine(batch, name, None, why=f"by {kept.owner}: {effect.why}")
        elif isinstance(effect, Note):
            batch.event(name, effect.kind, effect.message)
        elif isinstance(effect, Trip):
            self._trip(batch, effect)
        elif isinstance(effect, Would):
            self._told.append((effect.rule.value, effect.mode.value))
            if effect.mode in (Mode.OBSERVED, Mode.HELD):
                why = "only observed" if effect.mode is Mode.OBSERVED else "the breaker is open"
                text = f"by rule:{effect.rule.value} ({why}): {effect.reason}"
                batch.event(name, "would be quarantined", text)

    # --- the breaker --------------------------------------------------------------------------------------------------

    def _room(self, pool: str | None) -> Room:
        key = pool or ""
        if key not in self._sizes:
            unlabelled = (name for name in self._registry.names() if self._ledger.pool_of(name) is None)
            self._sizes[key] = len(self._registry.pool(key)) if key else sum(1 for _ in unlabelled)
        kept = sum(
            one.owner_kind == "rule" and (self._ledger.pool_of(name) or "") == key
            for name, one in self._ledger.quarantines.items()
        )
        size = self._sizes[key]
        most = max(self._policy.breaker_least, int(size * self._policy.breaker_ratio + 1e-9))
        return Room(pool=key, size=size, kept=kept, most=most, open=key in self._breakers)

    def _trip(self, batch: Batch, effect: Trip) -> None:
        if effect.pool in self._breakers:
            return
        log.error("the breaker of the rules has tripped: %s", effect.reason)
        self._set(self._breakers, effect.pool, Breaker(at=batch.now, reason=effect.reason))
        batch.event("fleet", "breaker tripped", effect.reason)
        self._put_breakers(batch)

    def reset_breaker(self, batch: Batch, owner: str, pool: str | None) -> tuple[str, ...]:
        """A person has looked; the pools whose breaker is closed again: all, or the one that is named."""
        closed = tuple(name for name in self._breakers if pool is None or name == pool)
        for name in closed:
            batch.event("fleet", "breaker reset", f"by {owner}: {name or 'nodes without a pool'}")
            self._set(self._breakers, name, None)
        if closed:
            self._put_breakers(batch)
            for name, record in self._records.items():
                if record.word is not None and record.word.mode is Mode.HELD:
                    self._set(self._due, name, batch.now)
        return closed

    def _put_breakers(self, batch: Batch) -> None:
        batch.changes.append(PutMeta(key=BREAKERS, value=wire.encode(self._breakers).decode()))

    # --- what is asked ------------------------------------------------------------------------------------------------

    def breakers(self) -> Mapping[str, Breaker]:
        """Those that are open, by pool; "" are the nodes without one."""
        return dict(self._breakers)

    def word_of(self, name: str) -> Record | None:
        """What is remembered of a node, with its latches; None where nothing is."""
        record = self._records.get(name)
        if record is None:
            return None
        latches = tuple(latch for group in self._latches.values() for latch in group if latch.node == name)
        return dataclasses.replace(record, latches=latches)

    # --- a person's word ----------------------------------------------------------------------------------------------

    def release(self, batch: Batch, name: str) -> None:
        """A person lets the node in: its latches go wherever they are."""
        record = self._records.get(name)
        if record is None:
            return
        composed = dataclasses.replace(record, latches=tuple(self._held_by(name, record)))
        for identity in dict.fromkeys(identities_of(composed)):
            self._put_latches(batch, identity, ())
        after = released(record)
        self._set(self._records, name, after)
        batch.changes.append(PutRecord(node=name, record=after))
        self._ledger.set_probe(name, None)
        self._set(self._due, name, None)

    def _held_by(self, name: str, record: Record) -> Iterator[Latch]:
        here = {seat.identity for seat in record.seats}
        for identity, latches in self._latches.items():
            yield from (one for one in latches if one.node == name or identity in here)

    def forget(self, batch: Batch, name: str) -> None:
        """The node is gone: only what is latched on its machine and devices stays, for wherever they come again."""
        self._put_latches(batch, f"node:{name}", ())
        for where in (self._records, self._machines, self._versions, self._due):
            self._set(where, name, None)
        self._ledger.set_probe(name, None)

    def prune(self, now: float) -> list[PutRecord]:
        """Repeats so long ago that they count no more."""
        days = self._policy.history_days * 86400.0
        old = [n for n, r in self._records.items() if not r.active and (r.last_at is None or now - r.last_at > days)]
        return [PutRecord(node=name, record=None) for name in old]

    def drop(self, names: Iterable[str]) -> None:
        """These are pruned on disk."""
        for name in names:
            self._records.pop(name, None)

    def _set(self, where: dict[Any, Any], key: Any, value: Any) -> None:
        """Change one entry (None: drop it), so that it can be undone."""
        before = where.get(key, _ABSENT)
        if before is _ABSENT and value is None:
            return
        self._journal.append((where, key, before))
        if value is None:
            del where[key]
        else:
            where[key] = value


def _order(record: Record) -> Order | None:
    """The run that the record has ordered."""
    probe = record.probe
    if probe is None:
        return None
    work = RunOrder(tier=probe.tier)
    return Order(id=probe.order_id, kind="run", deadline_seconds=probe.deadline_seconds, run=work)


def _differences(before: str, after: str) -> Iterator[tuple[str, str]]:
    """What became of a machine, as lines of its history."""
    shape = tuple[str | None, str | None, list[tuple[str, str | None]]]
    was_instance, was_boot, was = wire.decode(before.encode(), shape, what="machine")
    instance, boot, now = wire.decode(after.encode(), shape, what="machine")
    if instance != was_instance and instance is not None and was_instance is not None:
        yield "other machine", f"instance {was_instance} became {instance}"
    if boot != was_boot and boot is not None and was_boot is not None:
        yield "booted", f"boot {boot[:80]}"
    serials = dict(was)
    for target, serial in now:
        known = serials.get(target)
        if known is not None and serial is not None and known != serial:
            yield "device replaced", f"{target}: {known} became {serial}"
    if was and now and {target for target, _ in now} != serials.keys():
        yield "devices changed", f"{len(was)} devices became {len(now)}"
