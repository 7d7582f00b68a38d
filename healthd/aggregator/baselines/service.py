"""
Baselines in the aggregator: learned from what nodes report, kept in the database, told to the nodes they concern.

A node is looked at when it is first heard, and twice an hour once it has taught something, because opening its
evidence costs a millisecond. What it measured counts while the aggregator takes it for healthy, and nobody has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from healthd.aggregator.baselines.peers import Peers
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.store import baseline_rows as rows
from healthd.aggregator.store.changes import PutEvent
from healthd.aggregator.store.store import LONG_SECONDS, Store
from healthd.baselines import sampling
from healthd.baselines.book import Book, drift_reason, due
from healthd.baselines.model import Kind, Series, State, imported
from healthd.baselines.settings import BaselineSettings
from healthd.core.errors import BadInputError, ConflictError, HealthdError, StoreError
from healthd.core.model import NodeState

log = logging.getLogger(__name__)

LOOK_SECONDS = 1800.0
"""A node's devices are measured once an hour while it is idle, and one run a day is kept."""
SOON_SECONDS = 60.0
"""And again so soon while there is nothing to learn from it: its versions are known from its first active run on."""
TURN_SECONDS = 1.0
LOOKS_EACH_TURN = 50
"""Fifty milliseconds of each second at most, right after a start; ten thousand nodes have been met in three minutes."""
READY_SECONDS = 10.0
"""So long people wait for what is on disk: reading it takes a second or two, or fails."""
LEARN_SECONDS = 600.0
"""How often candidates and drifts are worked out, stragglers looked for, and samples written: some are lost in a crash,
and come again within a day."""


class Learner:
    """
    On the event loop alone; run `run()` as a task. What people ask waits until all was read (`ready`).

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        settings: BaselineSettings,
        *,
        clock: Callable[[], float] = time.time,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self.settings = settings
        self.book = Book(settings.rule)
        self.peers = Peers()
        self._fleet = fleet
        self._store = store
        self._clock = clock
        self._ready_seconds = ready_seconds
        self._loaded = asyncio.Event()
        self._kinds: dict[str, Kind] = {}
        self._known: dict[Kind, Kind] = {}
        self._due: dict[str, float] = {}
        self._queue: deque[str] = deque()
        self._queued: set[str] = set()
        self._dirty: set[str] = set()
        self._learn_at = fleet.clock() + LEARN_SECONDS
        self._trouble = ""
        fleet.listen(self._hear)

    async def run(self) -> None:
        """Look, learn, write, tell; for ever. Ends by cancellation."""
        while True:
            if not self._loaded.is_set() and not await self._load():
                await asyncio.sleep(TURN_SECONDS)
                continue
            # One look at a time: a millisecond is the longest that a gate waits for them.
            await asyncio.sleep(TURN_SECONDS / LOOKS_EACH_TURN if self._queue else TURN_SECONDS)
            if self._queue:
                self._next()
            if self._fleet.clock() >= self._learn_at:
                self._learn_at = self._fleet.clock() + LEARN_SECONDS
                await self._turn()

    async def ready(self) -> None:
        """Wait until what is on disk was read. StoreError when it still cannot be after a while."""
        try:
            async with asyncio.timeout(self._ready_seconds):
                await self._loaded.wait()
        except TimeoutError:
            why = self._trouble or "the database does not answer"
            raise StoreError(f"baselines could not be read yet: {why}") from None

    # --- what people ask ----------------------------------------------------------------------------------------------

    async def learn(self) -> tuple[Series, ...]:
        """Look at all nodes and learn now; the series that changed. StoreError when they could not be kept."""
        for node in tuple(self._fleet.names()):
            self._look(node)
            await asyncio.sleep(0)
        return await self._learn()

    async def decide(self, names: Sequence[str], state: State, *, by: str) -> tuple[Series, ...]:
        """
        Approve, freeze or revoke by names or ids; without any all candidates are approved, all approved frozen.

        NotFoundError, BadInputError; StoreError, and nothing was changed.
        """
        found = self.book.find(names)
        if not names:
            found = tuple(one for one in found if due(one, state))
            if not found:
                raise BadInputError(f"there is nothing that could be {state.value}; 'healthd baseline show' lists all")
        before = found
        after = self.book.decide([one.id for one in found], state, by=by, now=self._clock())
        return await self._keep(before, after, by, state.value)

    async def take(self, series: Iterable[Series], *, by: str) -> tuple[Series, ...]:
        """Baselines of a file, in the place of those that are here. ConflictError where one of these is frozen."""
        now = self._clock()
        before, after = [], []
        for one in series:
            old = self.book.get(one.id) or Series(kind=one.kind, name=one.name)
            if old.in_force is not None and old.in_force.state is State.FROZEN and one.in_force != old.in_force:
                raise ConflictError(f"{old.id} {old.name} is frozen; approve or revoke it first")
            before.append(old)
            after.append(imported(old, one, by, now))
        for one in after:
            self.book.put(one)
        return await self._keep(before, after, by, "imported")

    async def _keep(self, before: Iterable[Series], after: Iterable[Series], by: str, what: str) -> tuple[Series, ...]:
        """On disk first, then told; memory goes back where the disk did not take it."""
        changed = tuple(after)
        events = [self._event(what, f"{one.id} {one.name} on {one.kind}, by {by}") for one in changed]
        try:
            await self._write(changed, events)
        except StoreError:
            for one in before:
                self.book.put(one)
            raise
        self._tell()
        return changed

    # --- looking ------------------------------------------------------------------------------------------------------

    def _hear(self, node: str) -> None:
        """A node has said something: it is looked at when that was not done lately."""
        if node not in self._queued and self._fleet.clock() >= self._due.get(node, 0.0):
            self._queued.add(node)
            self._queue.append(node)

    def _next(self) -> None:
        node = self._queue.popleft()
        self._queued.discard(node)
        self._look(node)

    def _look(self, name: str) -> None:
        """Take in what a node measured; and whose baselines concern it."""
        self._due[name] = self._fleet.clock() + SOON_SECONDS
        node = self._fleet.node(name)
        state = node.current() if node is not None else None
        if node is None or state is None:
            self.forget(name)
            return
        kind = sampling.kind_of(state)
        if kind is None:
            return
        kind = self._kinds[name] = self._known.setdefault(kind, kind)  # one record for all nodes of a kind
        self._fleet.set_learned(name, self.book.limits_of(kind))
        if node.duplicate or not node.confirmed:
            return
        health = self._fleet.health_of(name)
        seen = dataclasses.replace(state, health=health, quarantine=node.quarantine or state.quarantine)
        self._take_in(kind, seen)

    def _take_in(self, kind: Kind, state: NodeState) -> None:
        found = list(sampling.samples_of(state, now=self._clock()))
        if found:
            self._due[state.node] = self._fleet.clock() + LOOK_SECONDS
        self.peers.take_in(kind, state.node, found)
        if not self.settings.learn:
            return
        for name, _, sample in found:
            try:
                added = self.book.add(kind, name, sample)
            except ConflictError as error:
                self._complain(str(error))
                return
            if added is not None:
                self._dirty.add(added)

    def forget(self, node: str) -> None:
        """A node that is gone; what it taught stays."""
        self._kinds.pop(node, None)
        self._due.pop(node, None)
        self.peers.forget(node)

    def _tell(self) -> None:
        told = {kind: self.book.limits_of(kind) for kind in set(self._kinds.values())}
        for node, kind in self._kinds.items():
            self._fleet.set_learned(node, told[kind])

    # --- learning -----------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        names = set(self._fleet.names())
        for gone in self._due.keys() - names:
            self.forget(gone)
        try:
            await self._learn()
            confirmed = await self.peers.search()
            if confirmed:
                events = [
                    PutEvent(at=self._clock(), subject=one.node, kind="straggler", message=one.message)
                    for one in confirmed
                ]
                await self._store.write(events)
                self.peers.told(confirmed)
            self._trouble = ""
        except StoreError as error:
            self._complain(str(error))

    async def _learn(self) -> tuple[Series, ...]:
        if not self.settings.learn:
            return ()
        await self.ready()
        before = {one.id: one for one in self.book.all()}
        ids = self.book.learn(now=self._clock(), automatic=self.settings.approve == "auto")
        changed = tuple(one for one in self.book.all() if one.id in ids)
        events = [event for one in changed for event in self._news(before[one.id], one)]
        self._dirty.update(ids)
        gone = before.keys() - {one.id for one in self.book.all()}
        dirty = [one for one in self.book.all() if one.id in self._dirty]
        try:
            await self._write(dirty, events, gone=gone)
        except StoreError:
            # The disk has the older ones; those that changed are written with the next turn.
            log.debug("baselines are kept in memory until the database takes them")
            raise
        self._dirty.difference_update(one.id for one in dirty)
        self._tell()
        return changed

    def _news(self, before: Series, after: Series) -> Iterable[PutEvent]:
        place = f"{after.id} {after.name} on {after.kind}"
        if after.drift is not None and before.drift is None:
            text = drift_reason(after).message
            log.warning("%s", text)
            yield self._event("drift", text)
        if after.drift is None and before.drift is not None:
            yield self._event("drift", f"{place}: within its baseline again")
        if after.candidate is not None and before.candidate is None:
            yield self._event("candidate", f"{place}: learned of {after.candidate.learned.samples} samples")
        if after.in_force is not None and before.in_force is None:
            yield self._event("approved", f"{place}, by {after.in_force.by}")

    def _event(self, kind: str, message: str) -> PutEvent:
        return PutEvent(at=self._clock(), subject="fleet", kind=f"baseline {kind}", message=message)

    def _complain(self, text: str) -> None:
        if text != self._trouble:
            log.warning("baselines: %s", text)
        self._trouble = text

    # --- the database -------------------------------------------------------------------------------------------------

    async def _load(self) -> bool:
        """Read all that was kept; false when the database cannot be read now."""
        try:
            kept = await self._store.read(rows.read, seconds=LONG_SECONDS)
        except HealthdError as error:
            self._complain(str(error))
            return False
        for one in kept:
            self.book.put(one.series, one.samples)
        self._loaded.set()
        self._tell()
        return True

    async def _write(self, series: Iterable[Series], events: Sequence[PutEvent], *, gone: Iterable[str] = ()) -> None:
        kept = [rows.Kept(series=one, samples=self.book.samples(one.id)) for one in series]
        lost = tuple(gone)
        if kept or events or lost:
            await self._store.run(lambda connection: rows.write(connection, kept, events, lost))
