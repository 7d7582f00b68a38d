"""
Quarantines by rule: what the rules remember of the fleet, what they decide carried out, and the breakers of pools.

`Quarantines` carries out on the ledger what the rules decide, `Breakers` stop the rules at a share of a pool until a
person has looked, and `QuarantineMemory` has what both remember, in memory as it is on disk.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from checks.contract import Tier
from healthd.aggregator.engine.bulkheads import Where, contained
from healthd.aggregator.engine.memory import Batch, FleetState
from healthd.aggregator.fleet import Fleet, differences, identities_in, machine_of
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import HISTORY_DAYS, Policy
from healthd.aggregator.quarantine import due_at, facts_of, judge, judge_inherited, released, repairs
from healthd.aggregator.quarantine.records import (
    Breaker,
    Effect,
    Facts,
    HistoryNote,
    Latch,
    LiftQuarantine,
    OpenBreaker,
    PoolLimit,
    Rule,
    RuleMode,
    RuleRecord,
    RuleVerdict,
    SetQuarantine,
)
from healthd.aggregator.quarantine.repair_records import Repair, RepairDecision, RepairEnd, RepairState
from healthd.aggregator.store import Kind, Loaded, PutMeta, PutRecord, PutRepair
from healthd.core import wire
from healthd.core.model import NodeState, Order, OrderKind, Quarantine, Reason, RunOrder

BREAKERS = "rule_breakers"
"""The fact about the database under which open breakers are kept."""
MOST_LATCHED = 20_000
"""Devices and machines that latches are kept of: as many as nodes; beyond that the oldest go, and it is said."""
COUNTED_SECONDS = 1.0
"""So long a count of a pool stands while nobody joins or leaves it: hundreds of nodes may turn bad at once."""

log = logging.getLogger(__name__)


class Quarantines:
    """See the module. On the event loop alone. A repaired node has to pass the tier `proof`."""

    def __init__(
        self,
        fleet_state: FleetState,
        registry: Fleet,
        policy: Policy,
        loaded: Loaded,
        *,
        pool_of: Callable[[str], str | None],
        present: Callable[[str, float], bool],
        proof: Tier,
    ) -> None:
        self._proof = proof
        self.counted: Counter[tuple[str, str]] = Counter()
        """How often a rule came to a word, by rule and what came of it, since the process began."""
        self._fleet_state = fleet_state
        self._policy = policy
        self._memory = QuarantineMemory(loaded)
        self.breakers = Breakers(self._memory, fleet_state, registry, policy, pool_of=pool_of, present=present)
        self._told: list[tuple[str, str]] = []
        self._registry = registry
        self._in_maintenance: set[str] = set()
        for name, record in self._memory.records.items():
            fleet_state.set_probe(name, _order(record))

    # --- a turn -------------------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """What was decided is on disk: count it."""
        self.counted.update(self._told)
        self._told.clear()

    def take_in(
        self, batch: Batch, heard: Iterable[str], nodes: Mapping[str, FleetNode], resting: Collection[str] = ()
    ) -> None:
        """
        Look at the nodes that were heard, and at those whose time is up unless they are `resting` after a fault.

        `nodes` are as this turn sees them.
        """
        if not self._policy.rules:
            return
        for name, spoken in sorted(batch.inherited.items()):
            with contained(Where.NODE, name):
                node = nodes.get(name)
                if node is not None and node.state is not None:
                    self._look(batch, node, node.state, spoken=spoken)
        due = [name for name, at in self._memory.due.items() if at <= batch.now and name not in resting]
        for name in sorted({*heard, *due}):
            self._memory.set(self._memory.due, name, None)  # a look sets it anew; else the node's next word brings it
            with contained(Where.NODE, name):
                node = nodes.get(name)
                if node is None or node.state is None or node.duplicate or not node.confirmed:
                    continue
                if self._concerns(batch, node, node.state):
                    self._look(batch, node, node.state)

    def accuse(self, batch: Batch, nodes: Mapping[str, FleetNode], resting: Collection[str] = ()) -> set[str]:
        """Take in what validations said in this turn of nodes not `resting`; those that are quarantined for it."""
        if not self._policy.rules or not batch.accused:
            return set()
        told: dict[str, list[Reason]] = {}
        for accusation in batch.accused:
            told.setdefault(accusation.node, []).append(accusation.reason)
        before = set(self._fleet_state.quarantines)
        for name, reasons in sorted(told.items()):
            if name in resting:
                continue
            with contained(Where.NODE, name):
                node = nodes.get(name)
                if node is not None and node.state is not None:
                    self._look(batch, node, node.state, accusations=tuple(reasons))
        return set(self._fleet_state.quarantines) - before

    def next_due(self, resting: Collection[str] = ()) -> float:
        """When time alone may change something; never where the rules are off: they look at nothing then."""
        if not self._policy.rules:
            return math.inf
        return min((at for name, at in self._memory.due.items() if name not in resting), default=math.inf)

    def is_at_rest(self, name: str) -> bool:
        """Whether the last look at the node found nothing, and its state has been the same since."""
        if not self._policy.rules:
            return True
        record = self._memory.records.get(name)
        return (
            (record is None or not record.active)
            and name not in self._memory.due
            and name not in self._in_maintenance
            and self._memory.versions.get(name) == self._registry.version(name)
        )

    def _concerns(self, batch: Batch, node: FleetNode, state: NodeState) -> bool:
        """Whether there is anything new about the node, or anything remembered of it."""
        record = self._memory.records.get(node.node)
        if state.maintenance is None:
            self._in_maintenance.discard(node.node)
        else:
            self._in_maintenance.add(node.node)
        if (record is not None and record.active) or state.maintenance is not None:
            return True
        if self._memory.versions.get(node.node) == node.version:
            return False
        if node.failing is None or node.machine is None:
            return True
        same = self._memory.machines.get(node.node) == node.machine
        if node.failing or not (same or self._unlatched(node.node, node.machine)):
            return True
        self._follow_machine(batch, node, state)
        self._memory.set(self._memory.versions, node.node, node.version)
        return False

    def _unlatched(self, name: str, machine: str) -> bool:
        """Whether nothing is latched on a machine or its devices; most often nothing is anywhere."""
        latches = self._memory.latches
        return not latches or not any(identity in latches for identity in identities_in(machine, name))

    # --- one node -----------------------------------------------------------------------------------------------------

    def _look(
        self,
        batch: Batch,
        node: FleetNode,
        state: NodeState,
        *,
        accusations: tuple[Reason, ...] = (),
        spoken: Quarantine | None = None,
    ) -> None:
        """Judge the node. `spoken` is a quarantine by the rules of another database: then that alone is looked at."""
        name = node.node
        self._follow_machine(batch, node, state)
        record = self._memory.records.get(name) or RuleRecord(node=name)
        kept = self._fleet_state.quarantines.get(name)
        facts = facts_of(
            batch.now,
            node,
            self._policy,
            room=self.breakers.room(batch.now, state.labels.get("pool")),
            person=kept is not None and kept.owner_kind != "rule" and _stands(kept, batch.now),
            kept=kept is not None and kept.owner_kind == "rule",
            accusations=accusations,
            probe=record.probe.order_id if record.probe is not None else None,
            soak=any(one.tier is Tier.SOAK for one in record.owed),
        )
        composed = dataclasses.replace(record, latches=tuple(self._latches_of(record, facts)))
        if spoken is None:
            after, effects = judge(batch.now, composed, facts, self._policy)
        elif record.word is None:
            after, effects = judge_inherited(batch.now, composed, facts, spoken, self._policy)
        else:
            return
        self._memory.set(self._memory.versions, name, node.version)
        self._keep(batch, record, after, facts)
        for effect in effects:
            self._carry_out(batch, name, effect)

    def _follow_machine(self, batch: Batch, node: FleetNode, state: NodeState) -> None:
        """Boots and replaced devices, for the history."""
        machine, known = node.machine or machine_of(state), self._memory.machines.get(node.node)
        if machine == known:
            return
        self._memory.put_machine(batch, node.node, machine)
        if known is None:
            return
        for kind, message in differences(known, machine):
            batch.event(node.node, kind, message)

    def _latches_of(self, record: RuleRecord, facts: Facts) -> Iterator[Latch]:
        """Those on what the node is and has, and those on what was in its seats."""
        for identity in dict.fromkeys((*facts.identities, *(seat.identity for seat in record.seats))):
            yield from self._memory.latches.get(identity, ())

    def _keep(self, batch: Batch, before: RuleRecord, after: RuleRecord, facts: Facts) -> None:
        """Write down what has changed."""
        for identity in facts.identities:
            self._memory.put_latches(batch, identity, tuple(one for one in after.latches if one.identity == identity))
        if after.latches or after.owed or after.node in self._memory.repairs:
            open_repairs = self._memory.repairs.get(after.node, ())
            self._memory.put_repairs(batch, after.node, repairs.follow(batch.now, open_repairs, after))
        slim = dataclasses.replace(after, latches=())
        # With a latch of its own the record stays active; it is composed anew each time.
        if slim != before or (slim.active and before.node not in self._memory.records):
            empty = not slim.active and slim.repeats == 0
            self._memory.put_record(batch, after.node, None if empty else slim)
        if after.probe != before.probe:
            self._fleet_state.set_probe(after.node, _order(after))
            batch.touched.add(after.node)
        kept = self._fleet_state.quarantines.get(after.node)
        until = kept.until if kept is not None and slim.word is not None else None  # of a person's: the rules take over
        # What is due already and did not happen waits for the node's next word.
        times = [at for at in (due_at(slim), until or math.inf) if batch.now < at < math.inf]
        self._memory.set(self._memory.due, after.node, min(times, default=None))

    def _carry_out(self, batch: Batch, name: str, effect: Effect) -> None:
        kept = self._fleet_state.quarantines.get(name)
        ours = kept is None or kept.owner_kind == "rule" or not _stands(kept, batch.now)
        if isinstance(effect, SetQuarantine) and ours:
            self._fleet_state.put_quarantine(batch, name, effect.quarantine)
        elif isinstance(effect, LiftQuarantine) and ours and kept is not None:
            self._fleet_state.put_quarantine(batch, name, None, why=f"by {kept.owner}: {effect.why}")
        elif isinstance(effect, HistoryNote):
            batch.event(name, effect.kind, effect.message)
        elif isinstance(effect, OpenBreaker):
            self.breakers.trip(batch, effect)
        elif isinstance(effect, RuleVerdict):
            self._told.append((effect.rule.value, effect.mode.value))
            if effect.mode in (RuleMode.OBSERVED, RuleMode.HELD):
                why = "only observed" if effect.mode is RuleMode.OBSERVED else "the breaker is open"
                text = f"by rule:{effect.rule.value} ({why}): {effect.reason}"
                batch.event(name, "would be quarantined", text)

    # --- what is asked ------------------------------------------------------------------------------------------------

    def doubted(self) -> frozenset[str]:
        """Nodes that a validation named lately and nothing has cleared, quarantined for it or not."""
        return self._memory.doubted()

    def remembered(self, name: str) -> RuleRecord | None:
        """What is remembered of a node, with its latches; None where nothing is."""
        record = self._memory.records.get(name)
        if record is None:
            return None
        return dataclasses.replace(record, latches=tuple(self._held_by(record)))

    def open_repairs(self) -> tuple[Repair, ...]:
        """The open repairs of all nodes, the oldest finding first."""
        found = (one for repairs_of in self._memory.repairs.values() for one in repairs_of)
        return tuple(sorted(found, key=lambda one: (one.since, one.node, one.device)))

    # --- a person's word ----------------------------------------------------------------------------------------------

    def look_again(self, batch: Batch, name: str) -> None:
        """A person has quarantined the node or let it in: the rules look at it in this pass."""
        if name in self._memory.records:
            self._memory.set(self._memory.due, name, batch.now)

    def decide_repair(
        self, batch: Batch, name: str, decision: RepairDecision, device: str | None, *, by: str, why: str
    ) -> tuple[Repair, ...]:
        """A person decides about the open repairs of a node, or of one of its devices; the open repairs after that."""
        before = self._memory.repairs.get(name, ())
        after = repairs.decided(batch.now, before, decision, device, by, why)
        self._memory.put_repairs(batch, name, after)
        made = [new for old, new in zip(before, after, strict=True) if new is not old and new.state is RepairState.DONE]
        record = self.remembered(name)
        if made and record is not None:
            proved = repairs.repaired(batch.now, record, made, self._proof)
            for seat in record.seats:
                left = tuple(one for one in proved.latches if one.identity == seat.identity)
                self._memory.put_latches(batch, seat.identity, left)
            self._memory.put_record(batch, name, dataclasses.replace(proved, latches=()))
            self.look_again(batch, name)
        return after

    def _close_repairs(self, batch: Batch, name: str, end: RepairEnd, why: str) -> None:
        before = self._memory.repairs.get(name, ())
        self._memory.put_repairs(batch, name, tuple(repairs.closed(batch.now, one, end, why) for one in before))

    def release(self, batch: Batch, name: str, why: str = "") -> None:
        """A person lets the node in: its latches go wherever they are. `why` is for people."""
        self._close_repairs(batch, name, RepairEnd.RELEASED, f"the node was released {why}".rstrip())
        record = self._memory.records.get(name)
        if record is None:
            return
        for seat in record.seats:
            self._memory.put_latches(batch, seat.identity, ())
        self._memory.put_record(batch, name, released(record))
        self._fleet_state.set_probe(name, None)

    def _held_by(self, record: RuleRecord) -> Iterator[Latch]:
        for seat in record.seats:
            yield from self._memory.latches.get(seat.identity, ())

    def forget(self, batch: Batch, name: str) -> None:
        """The node is gone: only what is latched on its machine and devices stays, for wherever they come again."""
        self._close_repairs(batch, name, RepairEnd.GONE, "the node was forgotten")
        self._memory.put_latches(batch, f"node:{name}", ())
        for where in (self._memory.records, self._memory.machines, self._memory.versions, self._memory.due):
            self._memory.set(where, name, None)
        self._fleet_state.set_probe(name, None)

    def old(self, now: float) -> list[str]:
        """Nodes of which nothing is remembered but repeats, so long ago that they count no more."""
        days = HISTORY_DAYS * 86400.0
        records = self._memory.records.items()
        return [n for n, r in records if not r.active and (r.last_at is None or now - r.last_at > days)]

    def drop(self, names: Iterable[str]) -> None:
        """These are pruned on disk."""
        for name in names:
            self._memory.set(self._memory.records, name, None)


def _stands(kept: Quarantine, now: float) -> bool:
    return kept.until is None or kept.until > now


def _order(record: RuleRecord) -> Order | None:
    """The run that the record has ordered."""
    probe = record.probe
    if probe is None:
        return None
    work = RunOrder(tier=probe.tier)
    return Order(id=probe.order_id, kind=OrderKind.RUN, deadline_seconds=probe.deadline_seconds, run=work)


# --- breakers ---------------------------------------------------------------------------------------------------------


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
        self._sizes: dict[str, _Counted] = {}
        self._kept: dict[str, _Counted] = {}

    def all(self) -> Mapping[str, Breaker]:
        """Those that are open, by pool."""
        return dict(self._memory.breakers)

    def room(self, now: float, pool: str | None) -> PoolLimit:
        """
        How many nodes of a pool the rules keep out, and may. Nodes that are gone count for nothing: a terminated one
        would keep its place for ever.
        """
        key = pool or ""
        size, kept = self._size(now, key), self._kept_by_rules(now, key)
        most = self._policy.most_out(size)
        return PoolLimit(pool=key, size=size, kept=kept, most=most, open=key in self._memory.breakers)

    def _size(self, now: float, key: str) -> int:
        names: Collection[str] = self._registry.pool(key) if key else self._registry.names()
        counted = self._sizes.get(key)
        if counted is None or not counted.stands(now, len(names)):
            own = names if key else [name for name in names if self._pool_of(name) is None]
            number = sum(self._present(name, now) for name in own)
            counted = self._sizes[key] = _Counted(number=number, at=now, of=len(names))
        return counted.number

    def _kept_by_rules(self, now: float, key: str) -> int:
        state = self._fleet_state
        counted = self._kept.get(key)
        if counted is None or not counted.stands(now, state.quarantine_changes):
            number = sum(
                one.owner_kind == "rule" and (self._pool_of(name) or "") == key and self._present(name, now)
                for name, one in state.quarantines.items()
            )
            counted = self._kept[key] = _Counted(number=number, at=now, of=state.quarantine_changes)
        return counted.number

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
                if record.word is not None and record.word.mode is RuleMode.HELD:
                    self._memory.set(self._memory.due, name, batch.now)
        return closed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counted:
    """A number of nodes as counted `at` a moment, when what it depends on had the number `of`."""

    number: int
    at: float
    of: int

    def stands(self, now: float, of: int) -> bool:
        return self.of == of and 0 <= now - self.at < COUNTED_SECONDS


# --- memory -----------------------------------------------------------------------------------------------------------


class QuarantineMemory:
    """
    `records`, `machines` and open `repairs` by node, `latches` by what they are on, `breakers` by pool: as on disk.
    `versions` are the states that were looked at, `due` says when time alone may change a record.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.records: dict[str, RuleRecord] = dict(loaded.rules)
        self.latches: dict[str, tuple[Latch, ...]] = dict(loaded.latches)
        self.machines: dict[str, str] = dict(loaded.machines)
        self.breakers: dict[str, Breaker] = wire.decode(
            loaded.meta.get(BREAKERS, "{}").encode(), dict[str, Breaker], what="breakers of the rules"
        )
        self.repairs: dict[str, tuple[Repair, ...]] = {}
        for repair in loaded.repairs:
            self.repairs[repair.node] = (*self.repairs.get(repair.node, ()), repair)
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

    def put_repairs(self, batch: Batch, node: str, found: tuple[Repair, ...]) -> None:
        """
        All repairs of a node that were open, and new ones; what has changed is written and is in its history, where the
        finding of a new one is already.
        """
        before = self.repairs.get(node, ())
        if found == before:
            return
        for repair in found:
            if repair in before:
                continue
            batch.changes.append(PutRepair(repair=repair))
            known = next(
                (one.state for one in before if (one.device, one.since) == (repair.device, repair.since)), None
            )
            if known not in (None, repair.state):
                step, what = repair.steps[-1], f"{repair.advice.value} {repair.device}"
                batch.event(node, f"repair {repair.state.value}", f"{what}: by {step.by}: {step.why}")
            if repair.closed_at is not None:
                batch.repaired.append(repair)
        self.set(self.repairs, node, tuple(one for one in found if one.closed_at is None) or None)

    def put_breaker(self, batch: Batch, pool: str, breaker: Breaker | None) -> None:
        """A breaker opens; None closes it."""
        self.set(self.breakers, pool, breaker)
        batch.changes.append(PutMeta(key=BREAKERS, value=wire.encode(self.breakers).decode()))
