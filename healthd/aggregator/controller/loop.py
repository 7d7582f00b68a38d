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
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from healthd.aggregator.controller import pruning
from healthd.aggregator.controller.bulkheads import Bulkheads, ContainedError, Where, contained
from healthd.aggregator.controller.fleet_state import Batch, FleetState
from healthd.aggregator.controller.lease_reconciler import LeaseReconciler
from healthd.aggregator.controller.quarantines import Quarantines
from healthd.aggregator.controller.requests import Requests, Result
from healthd.aggregator.controller.stepping import Stepper
from healthd.aggregator.gate.snapshot import nodes_at
from healthd.aggregator.model import FleetNode, Gate, Observer, Registry
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store import changes
from healthd.aggregator.store.changes import Loaded
from healthd.aggregator.store.leadership import FencedError
from healthd.aggregator.store.session import RefusedWorkError, UnsureError
from healthd.aggregator.store.store import LONG_SECONDS, Store
from healthd.aggregator.store.writer import ANSWER_SECONDS
from healthd.core.errors import HealthdError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_FAULTS_A_PASS = 20
"""Gates, nodes and requests that may fail in one pass before the others wait for the next: each costs one rebuild."""
RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 8.0
"""The pause after a failed commit, twice as long each time in a row: each failure costs a rebuild of memory."""
MOST_REFUSED = 3
"""Passes in a row whose rows the database may refuse before that is a fault: the first may be one request's."""
PRUNE_SECONDS = 3600.0
"""How often what is old is dropped from the database: it grows by some MB an hour at the very most."""
LONGEST_SLEEP_SECONDS = 30.0
"""The engine's clock counts a suspended machine's sleep and the event loop's does not: look again at least so often."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from here on by CLOCK_BOOTTIME: no jump of the clock moves a deadline."""
    start, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: start + time.clock_gettime(time.CLOCK_BOOTTIME) - boot


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """
    What a pass has worked out, before it is on disk.

    `nodes` are the nodes as this pass saw them. `accused` nodes are quarantined for what a validation said.
    """

    batch: Batch
    results: list[Result]
    changed: set[str]
    nodes: Mapping[str, FleetNode]
    accused: set[str]


class Loop:
    """The base of `Engine`: memory, the loop, and `submit`, by which a method changes something in the next pass."""

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
        self._bulkheads = Bulkheads()
        self._requests = Requests()
        self._refused = 0  # passes in a row
        self._changed_nodes: set[str] = set()
        self._started_at = self._clock()
        self._stale = False  # memory may differ from what is on disk
        self._load(store.load())
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._followers: dict[str, asyncio.Event] = {}
        self._retry_at, self._retry_seconds = -math.inf, RETRY_SECONDS
        self._prune_at = self._clock() + PRUNE_SECONDS
        self._expiring = False
        self._stopping = False
        registry.listen(self._on_report)

    def _load(self, loaded: Loaded) -> None:
        """Make memory from what is on disk."""
        self._fleet_state = FleetState(loaded, store_id=self._store.store_id, policy=self.policy)
        self._reconciler = LeaseReconciler(
            self._fleet_state, self._registry, self.policy, loaded, started_at=self._started_at
        )
        self._rules = Quarantines(
            self._fleet_state,
            self._registry,
            self.policy,
            loaded,
            pool_of=self._reconciler.pool_of,
            present=self._reconciler.present,
        )
        self._stepper = Stepper(
            self._fleet_state,
            self._registry,
            self.policy,
            reconciler=self._reconciler,
            rules=self._rules,
            bulkheads=self._bulkheads,
        )
        for node, quarantine in self._fleet_state.quarantines.items():
            self._registry.set_quarantine(node, quarantine)

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
                    if self._clock() >= self._prune_at:
                        await self._prune()
                if went_through:
                    self._bulkheads.passed(Where.TURN, "engine")
            except ContainedError as stopped:
                self._rebuild_after(stopped)

    def stop(self) -> None:
        """Wake everybody who waits for a gate, because the aggregator ends. The gates stay open on disk."""
        self._stopping = True
        for follower in self._followers.values():
            follower.set()

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
        if now < self._retry_at and not self._requests:
            return False
        done = await self._compute()
        if done is None:
            return False
        batch = done.batch
        try:
            if batch.changes:
                await self._store.write(batch.changes)
        except StoreError as error:
            self._stale = True
            if not isinstance(error, FencedError):
                await self._rebuild()
            self._fail_requests(error)
            if isinstance(error, FencedError):
                raise
            return False
        self._retry_at, self._retry_seconds, self._refused = -math.inf, RETRY_SECONDS, 0
        self._bulkheads.passed(Where.TURN, "commit")
        self._rules.committed()
        try:
            with contained(Where.TURN, "answers"):
                self._publish(batch, done.changed, done.nodes)
            self._bulkheads.passed(Where.TURN, "answers")
        except ContainedError as stopped:
            self._rebuild_after(stopped)
        if done.accused:
            # Gates that look at these nodes see the quarantine in the next pass.
            self._changed_nodes |= done.accused
            self._wake.set()
        for future, result in done.results:
            if not future.done():
                future.set_result(self._newest(result))
        return True

    async def _compute(self) -> _Outcome | None:
        """
        All that this pass changes. What fails in an unforeseen way is left out, and the rest is computed again on
        rebuilt memory; None when too much fails at once, or memory cannot be rebuilt.
        """
        for _ in range(MOST_FAULTS_A_PASS):
            if self._stale and not await self._rebuild():
                return None
            expiring = self._expiring
            try:
                self._requests.take()
                return self._compute_once(self._clock())
            except ContainedError as stopped:
                self._stale, self._expiring = True, expiring
                self._contain(stopped)
                self._requests.put_back()
        self._retry_at = self._clock() + RETRY_SECONDS
        await self._rebuild()
        return None

    def _contain(self, stopped: ContainedError) -> None:
        """Record the fault, and tell the request that has failed."""
        if stopped.where is not Where.REQUEST:
            self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
            return
        self._bulkheads.count(stopped.where, stopped.name, stopped.error)
        self._requests.fail(int(stopped.name), _internal_error())

    def _compute_once(self, now: float) -> _Outcome:
        """One try at the pass; ContainedError names what failed."""
        batch = Batch(now=now)
        changed, self._changed_nodes = self._changed_nodes | self._bulkheads.due(Where.NODE, now), set()
        results = self._requests.apply(batch)
        resting = self._bulkheads.resting(Where.NODE, now)
        expiring, self._expiring = self._expiring, False  # first, because what fails here must not fail every pass
        if expiring:
            self._fleet_state.end_expired(batch, resting)
            pruning.forget_gone(batch, self._fleet_state, self._rules, self._reconciler, self.policy, resting)
        changed = changed - resting.keys()
        nodes = nodes_at(self._registry, now)
        self._reconciler.reconcile(batch, changed, nodes)
        self._rules.take_in(batch, changed, nodes, resting)
        self._bulkheads.keep(Where.NODE, resting)
        if self._stepper.step_all(batch, changed, nodes):
            self._wake.set()
        accused = self._rules.accuse(batch, nodes, resting)
        self._bulkheads.keep(Where.GATE, self._fleet_state.gates)
        for fault in self._bulkheads.faults():
            if fault.where is Where.GATE:
                self._stepper.show_fault(fault)
        return _Outcome(batch=batch, results=results, changed=changed, nodes=nodes, accused=accused)

    def _rebuild_after(self, stopped: ContainedError) -> None:
        """
        Rebuild memory before the next pass: it may be half changed, or committed and published to nobody knows whom.

        FencedError is raised again: it is no fault, and ends the engine.
        """
        if isinstance(stopped.error, FencedError):
            raise stopped.error
        fault = self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
        self._stale, self._retry_at = True, fault.retry_at

    def _newest(self, result: object) -> object:
        """A gate that was asked for may have gone further in the same pass."""
        if isinstance(result, Gate):
            return self._fleet_state.gates.get(result.id) or self._fleet_state.decided.get(result.id) or result
        return result

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
        """
        Rebuild memory from what is on disk, as at the start. When that fails: false, and waiting requests are told.
        """
        try:
            loaded = await self._store.read(changes.load, seconds=LONG_SECONDS)
        except HealthdError as error:
            self._retry_at = self._clock() + RETRY_SECONDS
            self._requests.fail_waiting(error)
            if isinstance(error, FencedError):
                raise
            return False
        before, counted = self._fleet_state, self._rules.counted
        self._load(loaded)
        self._rules.counted = counted
        self._fleet_state.keep_times_heard(before, self._clock())
        for node in before.quarantines.keys() - self._fleet_state.quarantines.keys():
            self._registry.set_quarantine(node, None)
        self._changed_nodes.update(self._registry.names())
        for gate_id in self._followers.keys() - self._fleet_state.gates.keys():
            self._followers.pop(gate_id).set()
        self._stepper.set_executors(self._clock())
        self._stale = False
        return True

    async def _prune(self) -> None:
        now = self._clock()
        self._prune_at = now + PRUNE_SECONDS
        try:
            await pruning.prune(self._store, self._fleet_state, self._rules, self._reconciler, self.policy, now)
        except FencedError:
            raise
        except StoreError as error:
            self._stale = self._stale or isinstance(error, UnsureError)
            log.warning("nothing was pruned: %s", error)
            return
        self._expiring = True
        self._wake.set()

    def _on_report(self, node: str) -> None:
        self._changed_nodes.add(node)
        self._wake.set()

    def _fail_requests(self, error: StoreError) -> None:
        """Tell the requests of a failed transaction, or try them one by one where only one of them may be refused."""
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS)
        if not isinstance(error, RefusedWorkError):
            self._requests.fail_pass(error)
            return
        self._count_refusal(error)
        if not self._requests.separate():
            self._requests.fail_pass(error)
        if self._requests:
            self._wake.set()

    def _count_refusal(self, error: RefusedWorkError) -> None:
        """
        Rows that are refused in several passes belong to no single request: the engine pauses, with growing pauses.
        """
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self._retry_at = self._bulkheads.failed(Where.TURN, "commit", error, self._clock()).retry_at

    def _publish(self, batch: Batch, changed: set[str], nodes: Mapping[str, FleetNode]) -> None:
        """Everything is on disk: tell the metrics, the nodes and the clients."""
        if self._observer is not None:
            for gate in batch.ready:  # first, since it is measured until the leases are on disk
                self._observer.gate_ready(gate, batch.now - gate.created_at)
        self._reconciler.publish(batch, changed, nodes)
        for name in batch.forgotten:
            self._registry.forget(name)
        if any(gate.request.join is not None for gate in batch.decided):
            self._stepper.set_executors(batch.now)
        for gate in batch.decided:
            self._fleet_state.remember(gate)
            self._stepper.decided(gate.id)
            follower = self._followers.pop(gate.id, None)
            if follower is not None:
                follower.set()
        if self._observer is not None:
            for gate in batch.decided:
                self._observer.gate_decided(gate)

    def _next_due(self) -> float:
        """When the next pass is due if nothing happens."""
        now = self._clock()
        if self._retry_at > now:
            return self._retry_at
        if self._stepper.dirty or self._requests or self._changed_nodes:
            return now
        times = [self._stepper.next_due(), self._reconciler.next_due(now), self._prune_at]
        rest = self._bulkheads.resting(Where.NODE, now)
        return min([*times, self._rules.next_due(rest), self._bulkheads.next_due(now)])


def _internal_error() -> HealthdError:
    return HealthdError("internal error; the aggregator's log has more")
