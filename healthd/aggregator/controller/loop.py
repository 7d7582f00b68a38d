"""
The loop of the engine: the one place where gates are stepped.

Each pass takes in what happened, steps the gates that it concerns (the oldest first), commits all changes in one
transaction, and only then publishes them: orders to nodes, answers to clients. When the transaction fails, memory is
rebuilt from the database, as at the start; whoever waited for it gets the StoreError, and the gates are stepped again.
The same happens when nobody knows whether the transaction was committed, and after an exception that has left memory
changed. What a node is told follows from what is on disk, so the next process safely repeats a pass that a crash has
cut short.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TypeVar

from healthd.aggregator.controller.bulkheads import Bulkheads, ContainedError, Where, contained
from healthd.aggregator.controller.clock import steady_clock
from healthd.aggregator.controller.followers import Followers
from healthd.aggregator.controller.memory import Memory, Pass
from healthd.aggregator.controller.pruning import Pruning
from healthd.aggregator.controller.requests import Requests, Result
from healthd.aggregator.controller.retries import Retries
from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model.gates import Gate
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store import reading
from healthd.aggregator.store.leadership import FencedError
from healthd.aggregator.store.reading import Loaded
from healthd.aggregator.store.session import RefusedWorkError, UnsureError
from healthd.aggregator.store.store import LONG_SECONDS, Store
from healthd.aggregator.store.writer import ANSWER_SECONDS
from healthd.core.errors import HealthdError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_FAULTS_A_PASS = 20
"""Gates, nodes and requests that may fail in one pass before the others wait for the next: each costs one rebuild."""
MOST_LOOK_UPS, MOST_LOOKED_UP = 32, 1000
"""Leases are looked up by so many in a statement, and so many times in a pass: 16 of each of 2,000 nodes."""
LONGEST_SLEEP_SECONDS = 30.0
"""The engine's clock counts a suspended machine's sleep and the event loop's does not: look again at least so often."""


class Loop:
    """The base of `Engine`: memory, the loop, and `submit`, by which a method changes something in the next pass."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Fleet,
        policy: Policy,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.policy = policy
        self._store = store
        self._registry = registry
        self._clock = clock or steady_clock()
        # Told of a gate when its first leases are on disk, with the seconds since it was asked; and when it is decided.
        self.on_ready: list[Callable[[Gate, float], None]] = []
        self.on_decided: list[Callable[[Gate], None]] = []
        self._bulkheads = Bulkheads()
        self._requests = Requests()
        self._changed_nodes: set[str] = set()
        self._started_at = self._clock()
        self._stale = False  # memory may differ from what is on disk
        self._load(store.load())
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._followers = Followers()
        self._retries = Retries()
        self._pruning = Pruning(self._clock())
        registry.listen(self._on_report)

    def _load(self, loaded: Loaded) -> None:
        """Make memory from what is on disk."""
        self._memory = Memory(
            loaded,
            store_id=self._store.store_id,
            registry=self._registry,
            policy=self.policy,
            bulkheads=self._bulkheads,
            started_at=self._started_at,
        )

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Loop for ever. One task runs it. It ends by cancellation, or with FencedError: memory is out of date then."""
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
            try:
                with contained(Where.TURN, "engine"):
                    went_through = await self.run_once()
                    if self._clock() >= self._pruning.due_at:
                        await self._prune()
                if went_through:
                    self._bulkheads.passed(Where.TURN, "engine")
            except ContainedError as stopped:
                self._rebuild_after(stopped)

    def stop(self) -> None:
        """Wake everybody who waits for a gate, because the aggregator ends. The gates stay open on disk."""
        self._followers.stop()

    async def run_once(self) -> bool:
        """
        One pass; only one runs at a time. A StoreError goes to the requests that wait for it.

        Returns whether the pass went through: false during the pause after a failure, and when it failed again.
        """
        async with self._one_at_a_time:
            self._requests.begin()
            try:
                return await self._run_once()
            except Exception:
                self._requests.fail_pass(_internal_error())
                raise

    async def _run_once(self) -> bool:
        now = self._clock()
        if now < self._retries.at and not self._requests:
            return False
        computed = await self._compute()
        if computed is None:
            return False
        results, done = computed
        try:
            if done.batch.changes:
                await self._store.write(done.batch.changes)
        except StoreError as error:
            self._stale = True
            if not isinstance(error, FencedError):
                await self._rebuild()
            self._fail_requests(error)
            if isinstance(error, FencedError):
                raise
            return False
        self._retries.succeeded()
        self._bulkheads.passed(Where.TURN, "commit")
        self._memory.rules.committed()
        try:
            with contained(Where.TURN, "answers"):
                self._publish(done)
            self._bulkheads.passed(Where.TURN, "answers")
        except ContainedError as stopped:
            self._rebuild_after(stopped)
        if done.accused:
            # Gates that look at these nodes see the quarantine in the next pass.
            self._changed_nodes |= done.accused
            self._wake.set()
        for future, result in results:
            if not future.done():
                future.set_result(result)
        return True

    async def _compute(self) -> tuple[list[Result], Pass] | None:
        """
        All that this pass changes. What fails in an unforeseen way is left out, and the rest is computed again on
        rebuilt memory; None when too much fails at once, or memory cannot be rebuilt.
        """
        for _ in range(MOST_FAULTS_A_PASS):
            if self._stale and not await self._rebuild():
                return None
            try:
                if not await self._look_up_leases():
                    return None
            except ContainedError as stopped:
                self._contain(stopped)
                continue
            expiring = self._pruning.expiring
            try:
                self._requests.take()
                return self._compute_once(self._clock())
            except ContainedError as stopped:
                self._stale, self._pruning.expiring = True, expiring
                self._contain(stopped)
                self._requests.put_back()
        self._retries.soon(self._clock())
        await self._rebuild()
        return None

    async def _look_up_leases(self) -> bool:
        """
        Read from the store whether leases have ended that nodes hold and memory does not know. False when that fails;
        waiting requests are told.

        What is heard meanwhile is looked up too. A node that names other leases all the time stops nobody: what was not
        looked up is adopted by its node.
        """
        for _ in range(MOST_LOOK_UPS):
            now = self._clock()
            heard = self._changed_nodes | self._bulkheads.due(Where.NODE, now)
            heard -= self._bulkheads.resting(Where.NODE, now).keys()
            unknown = self._memory.reconciler.look_up(heard)[:MOST_LOOKED_UP]
            if not unknown:
                break
            try:
                found = await self._store.read(functools.partial(reading.read_leases, lease_ids=unknown))
            except HealthdError as error:
                self._retries.soon(self._clock())
                self._requests.fail_waiting(error)
                if isinstance(error, FencedError):
                    raise
                return False
            self._memory.fleet_state.note_looked_up(unknown, found)
        return True

    def _contain(self, stopped: ContainedError) -> None:
        """Record the fault, and tell the request that has failed."""
        if stopped.where is not Where.REQUEST:
            self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
            return
        self._bulkheads.count(stopped.where, stopped.name, stopped.error)
        self._requests.fail(int(stopped.name), _internal_error())

    def _compute_once(self, now: float) -> tuple[list[Result], Pass]:
        """One try at the pass; ContainedError names what failed."""
        batch = Batch(now=now)
        heard, self._changed_nodes = self._changed_nodes | self._bulkheads.due(Where.NODE, now), set()
        results = self._requests.apply(batch)
        self._pruning.expire(batch, self._memory, self.policy, self._bulkheads.resting(Where.NODE, now))
        done = self._memory.compute(batch, heard)
        if done.made_room:
            self._wake.set()
        return results, done

    def _rebuild_after(self, stopped: ContainedError) -> None:
        """
        Rebuild memory before the next pass: it may be half changed, or committed and published to nobody knows whom.

        FencedError is raised again: it is no fault, and ends the engine.
        """
        if isinstance(stopped.error, FencedError):
            raise stopped.error
        fault = self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
        self._stale, self._retries.at = True, fault.retry_at

    async def submit(self, action: Callable[[Batch], T]) -> T:
        """
        Apply `action` in the next pass; what it returned, once that is on disk. StoreError after `ANSWER_SECONDS` at
        most.
        """
        future = self._requests.add(action)
        self._wake.set()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await future
        except TimeoutError:
            why = self._store.trouble() or "the aggregator is too busy"
            raise StoreError(f"it could not be written within {ANSWER_SECONDS:g} s: {why}") from None

    async def _rebuild(self) -> bool:
        """Rebuild memory from what is on disk, as at the start. False when that fails; waiting requests are told."""
        try:
            loaded = await self._store.read(reading.load, seconds=LONG_SECONDS)
        except HealthdError as error:
            self._retries.soon(self._clock())
            self._requests.fail_waiting(error)
            if isinstance(error, FencedError):
                raise
            return False
        before = self._memory
        self._load(loaded)
        self._memory.go_on_from(before, self._clock())
        self._changed_nodes.update(self._registry.names())
        self._followers.keep(self._memory.fleet_state.gates)
        self._stale = False
        return True

    async def _prune(self) -> None:
        try:
            await self._pruning.run(self._store, self._memory, self.policy, self._clock())
        except FencedError:
            raise
        except StoreError as error:
            self._stale = self._stale or isinstance(error, UnsureError)
            log.warning("nothing was pruned: %s", error)
            return
        self._wake.set()

    def _on_report(self, node: str) -> None:
        self._changed_nodes.add(node)
        self._wake.set()

    def _fail_requests(self, error: StoreError) -> None:
        """Tell the requests of a failed transaction, or try them one by one where only one of them may be refused."""
        self._retries.failed(self._clock())
        if not isinstance(error, RefusedWorkError):
            self._requests.fail_pass(error)
            return
        if self._retries.refused():  # in several passes, so no single request is at fault
            self._retries.at = self._bulkheads.failed(Where.TURN, "commit", error, self._clock()).retry_at
        self._requests.separate(error)
        if self._requests:
            self._wake.set()

    def _publish(self, done: Pass) -> None:
        """Everything is on disk: tell the metrics, the nodes and the clients."""
        for gate in done.batch.ready:  # first, since it is measured until the leases are on disk
            for tell_ready in self.on_ready:
                tell_ready(gate, done.batch.now - gate.created_at)
        self._memory.publish(done)
        for gate in done.batch.decided:
            self._followers.wake(gate.id)
        for gate in done.batch.decided:
            for tell_decided in self.on_decided:
                tell_decided(gate)

    def _next_due(self) -> float:
        """When the next pass is due if nothing happens."""
        now = self._clock()
        if self._retries.at > now:
            return self._retries.at
        if self._requests or self._changed_nodes:
            return now
        return min(self._memory.next_due(now), self._pruning.due_at)


def _internal_error() -> HealthdError:
    return HealthdError("internal error; the aggregator's log has more")
