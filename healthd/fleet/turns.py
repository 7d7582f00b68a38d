"""
The loop under the engine: the one place where gates are stepped.

Turn by turn: take in what happened, step the gates that it concerns (oldest first), commit everything in one
transaction, and only then talk: orders to nodes, answers to clients. A transaction that fails leaves memory where the
disk is; whoever waited for it gets the StoreError, the gates try again. Where nobody knows whether it came through, all
is read anew, as after a restart. What a node is told follows from what is on disk, so a turn that was cut short by a
crash is repeated by the next process without harm.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from healthd.errors import HealthdError, StoreError
from healthd.fleet import asking, changes, collecting, pruning, requests
from healthd.fleet.changes import Loaded
from healthd.fleet.gate import step
from healthd.fleet.ledger import Batch, Ledger
from healthd.fleet.lookup import LookedUp
from healthd.fleet.model import FleetView, Gate, Observer, Phase, Registry, WakeAt
from healthd.fleet.policy import Policy
from healthd.fleet.reports import Reports
from healthd.fleet.rules.book import Rules
from healthd.fleet.standing import JudgeMemory
from healthd.fleet.store import Store, UnsureError
from healthd.model import NodeState

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1.0
"""After a failed commit: often enough to go on soon, seldom enough not to load a full disk."""
PRUNE_SECONDS = 3600.0
"""How often what is old is dropped from the database: it grows by some MB an hour at the very most."""
LONGEST_SLEEP_SECONDS = 30.0
"""The engine's clock counts a suspended machine's sleep and the event loop's does not: look again at least so often."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from here on by CLOCK_BOOTTIME: no jump of the clock moves a deadline."""
    start, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: start + time.clock_gettime(time.CLOCK_BOOTTIME) - boot


Action = Callable[[Batch], Any]


class Turns:
    """What `Engine` is built on: state, loop, and `_do`, by which its methods change something in the next turn."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        policy: Policy,
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.policy = policy
        self._store = store
        self._registry = registry
        self._clock = clock or steady_clock()
        self._observer = observer
        self._judge = JudgeMemory()
        self._actions: deque[tuple[Action, asyncio.Future[Any]]] = deque()
        self._heard: set[str] = set()
        self._unsure = False
        self._take_over(store.load())
        self._wake = asyncio.Event()
        self._turning = asyncio.Lock()
        self._followers: dict[str, asyncio.Event] = {}
        self._retry_at = -math.inf
        self._trouble = ""
        self._prune_at = self._clock() + PRUNE_SECONDS
        self._expiring = False
        self._stopping = False
        registry.listen(self._hear)

    def _take_over(self, loaded: Loaded) -> None:
        """Memory is what the disk says, and nothing else."""
        self._ledger = Ledger(loaded, store_id=self._store.store_id, policy=self.policy)
        self._reports = Reports(self._ledger, self._registry, self.policy, loaded, now=self._clock())
        self._rules = Rules(
            self._ledger,
            self._registry,
            self.policy,
            loaded,
            pool_of=self._reports.pool_of,
            present=self._reports.present,
        )
        self._dirty: set[str] = set(self._ledger.gates)
        self._due: dict[str, float] = {}
        for node, quarantine in self._ledger.quarantines.items():
            self._registry.set_quarantine(node, quarantine)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Turn for ever. One task runs it; it ends by cancellation."""
        self._wake.set()
        while True:
            pause = min(self._next_due() - self._clock(), LONGEST_SLEEP_SECONDS)
            try:
                # Not wait_for: in Python 3.11 it may swallow the cancellation that ends this task.
                async with asyncio.timeout(max(0.0, pause)):
                    await self._wake.wait()
            except TimeoutError:
                log.debug("time is up for a gate")
            self._wake.clear()
            await self.turn()
            if self._clock() >= self._prune_at:
                await self._prune()

    def stop(self) -> None:
        """Wake everybody who waits for a gate: the aggregator ends. The gates stay open on disk."""
        self._stopping = True
        for follower in self._followers.values():
            follower.set()

    async def turn(self) -> None:
        """Take in what happened, step, commit, carry out; one at a time. A StoreError goes to those who wait for it."""
        async with self._turning:
            await self._turn()

    async def _turn(self) -> None:
        now = self._clock()
        if now < self._retry_at and not self._actions:
            return
        if self._unsure and not await self._read_anew():
            return
        batch = Batch(now=now)
        self._ledger.begin()
        self._reports.begin()
        self._rules.begin()
        results = self._act(batch)
        if self._expiring:
            self._ledger.end_expired(batch)
            pruning.forget_gone(batch, self._ledger, self._rules, self._reports, self.policy)
            self._expiring = False
        heard, self._heard = self._heard, set()
        nodes = LookedUp(self._registry)
        self._reports.take_in(batch, heard, nodes)
        self._rules.take_in(batch, heard, nodes)
        stepped = self._step_all(batch, heard)
        accused = self._rules.accuse(batch)
        try:
            if batch.changes:
                await self._store.write(batch.changes)
        except StoreError as error:
            self._undo(results, heard, stepped, error)
            return
        if batch.changes and self._trouble:
            log.warning("the database takes writes again")
            self._trouble = ""
        self._retry_at = -math.inf
        self._rules.committed()
        self._tell(batch, heard, nodes)
        if accused:
            # Gates that look at these nodes see the rule's word in the next turn.
            self._heard |= accused
            self._wake.set()
        for future, result in results:
            if not future.done():
                future.set_result(self._newest(result))

    def _newest(self, result: object) -> object:
        """A gate that was asked may have gone further in the same turn."""
        if isinstance(result, Gate):
            return self._ledger.gates.get(result.id) or self._ledger.decided.get(result.id) or result
        return result

    async def _do(self, action: Callable[[Batch], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._actions.append((action, future))
        self._wake.set()
        return await future

    async def _read_anew(self) -> bool:
        """Begin again from what is on disk, as after a restart; false, and who waits is told, when that fails."""
        try:
            loaded = await self._store.run(changes.load)
        except HealthdError as error:
            self._retry_at = self._clock() + RETRY_SECONDS
            while self._actions:
                _, future = self._actions.popleft()
                if not future.done():
                    future.set_exception(error)
            return False
        log.warning("a commit may or may not have come through: everything was read from the database anew")
        lifted, counted = self._ledger.quarantines.keys(), self._rules.counted
        self._take_over(loaded)
        self._rules.counted = counted
        for node in lifted - self._ledger.quarantines.keys():
            self._registry.set_quarantine(node, None)
        self._heard.update(self._registry.names())
        for gate_id in self._followers.keys() - self._ledger.gates.keys():
            self._followers.pop(gate_id).set()
        self._unsure = False
        return True

    async def _prune(self) -> None:
        now = self._clock()
        self._prune_at = now + PRUNE_SECONDS
        try:
            await pruning.prune(self._store, self._ledger, self._rules, self._reports, self.policy, now)
        except StoreError as error:
            self._unsure = self._unsure or isinstance(error, UnsureError)
            log.warning("nothing was pruned: %s", error)
            return
        self._expiring = True
        self._wake.set()

    def _hear(self, node: str) -> None:
        self._heard.add(node)
        self._wake.set()

    def _act(self, batch: Batch) -> list[tuple[asyncio.Future[Any], Any]]:
        results = []
        while self._actions:
            action, future = self._actions.popleft()
            try:
                results.append((future, action(batch)))
            except HealthdError as error:
                if not future.done():
                    future.set_exception(error)
        return results

    def _step_all(self, batch: Batch, heard: set[str]) -> set[str]:
        """Step every gate that something happened to; those that a step made room for come in the next turn."""
        now = batch.now
        due = {gate_id for gate_id, at in self._due.items() if at <= now}
        concerned = {gate.id for gate in self._ledger.gates.values() if gate.id not in self._due}
        changed = heard | batch.freed
        for gate in self._ledger.gates.values():
            if not changed.isdisjoint((*gate.request.nodes, *gate.held)) or asking.found(gate, self._registry, heard):
                concerned.add(gate.id)
        if batch.freed:
            concerned |= self._waiting()
        dirty, self._dirty = (self._dirty | due | concerned) & set(self._ledger.gates), set()
        if not dirty:
            return dirty
        view = FleetView(
            nodes=LookedUp(self._registry),
            pool=self._registry.pool,
            claims=self._ledger.claims,
            overrides=self._ledger.overrides,
            recovering=self._reports.recovering(now),
            settling=self._reports.settling(now),
            judge=self._judge,
            called=self._registry.called,
            doubted=lambda name: self._rules.doubted(name) or any(one.node == name for one in batch.accused),
        )
        self._set_executors()
        freed_before = len(batch.freed)
        for gate_id in sorted(dirty):
            self._step(batch, self._ledger.gates[gate_id], view)
        if len(batch.freed) > freed_before:
            self._dirty.update(self._waiting())
            self._wake.set()
        return dirty

    def _set_executors(self) -> None:
        """Hooks of open gates that run the checks of their nodes."""
        found: dict[str, str] = {}
        for gate in self._ledger.gates.values():
            if gate.request.join is not None:
                found.update(collecting.executors(gate))
        self._registry.set_executors(found)

    def _waiting(self) -> set[str]:
        """Gates that would take nodes if there were any."""
        return {gate.id for gate in self._ledger.gates.values() if gate.phase is Phase.WAITING}

    def _step(self, batch: Batch, gate: Gate, view: FleetView) -> None:
        after, effects = step(batch.now, gate, view, self.policy)
        at = next((effect.at for effect in effects if isinstance(effect, WakeAt)), math.inf)
        if after.phase is Phase.WAITING and after.request.pool is not None:
            # Of a whole pool nobody tells what concerns this gate; the more gates wait, the less often each looks.
            crowd = sum(other.phase is Phase.WAITING for other in self._ledger.gates.values())
            at = min(at, batch.now + self.policy.pool_recheck_seconds * max(1.0, crowd / 4))
        self._due[gate.id] = at
        durable = [effect for effect in effects if not isinstance(effect, WakeAt)]
        if not durable and requests.durable(after) == requests.durable(gate):
            self._ledger.gates[gate.id] = after
            return
        states: tuple[NodeState, ...] = ()
        if after.decision is not None:
            names = [n.node for n in after.decision.nodes] + [n.node for n in after.decision.excluded]
            found = [view.nodes.get(name) for name in names]
            states = tuple(s for s in (node.current() for node in found if node is not None) if s is not None)
        self._ledger.carry_out(batch, after, durable, states)

    def _undo(
        self,
        results: list[tuple[asyncio.Future[Any], Any]],
        heard: set[str],
        stepped: set[str],
        error: StoreError,
    ) -> None:
        """The disk did not take it: memory goes back to where the disk is, and it is tried again."""
        if str(error) != self._trouble:
            log.error("%s", error)
            self._trouble = str(error)
        self._unsure = self._unsure or isinstance(error, UnsureError)
        self._rules.undo()
        self._ledger.undo()
        self._due = {gate_id: at for gate_id, at in self._due.items() if gate_id in self._ledger.gates}
        self._reports.undo()
        self._heard |= heard
        self._dirty |= stepped & set(self._ledger.gates)
        self._retry_at = self._clock() + RETRY_SECONDS
        for future, _ in results:
            if not future.done():
                future.set_exception(error)

    def _tell(self, batch: Batch, heard: set[str], nodes: LookedUp) -> None:
        """All of it is on disk: tell metrics, nodes and clients."""
        if self._observer is not None:
            for gate in batch.ready:  # first, since it is measured until the leases are on disk
                self._observer.gate_ready(gate, batch.now - gate.created_at)
        self._reports.tell(batch, heard, nodes)
        for name in batch.forgotten:
            self._registry.forget(name)
        if any(gate.request.join is not None for gate in batch.decided):
            self._set_executors()
        for gate in batch.decided:
            self._ledger.remember(gate)
            self._due.pop(gate.id, None)
            follower = self._followers.pop(gate.id, None)
            if follower is not None:
                follower.set()
        if self._observer is not None:
            for gate in batch.decided:
                self._observer.gate_decided(gate)

    def _next_due(self) -> float:
        """When time alone gives something to do."""
        now = self._clock()
        if self._retry_at > now:
            return self._retry_at
        if self._dirty or self._actions or self._heard:
            return now
        times = [at for gate_id, at in self._due.items() if gate_id in self._ledger.gates]
        return min([*times, self._reports.next_due(now), self._rules.next_due(), self._prune_at])
