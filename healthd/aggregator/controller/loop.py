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
from dataclasses import dataclass
from typing import Any, TypeVar

from healthd.aggregator.controller import pruning
from healthd.aggregator.controller.bulkheads import Bulkheads, ContainedError, Where, contained
from healthd.aggregator.controller.fleet_state import Batch, Ledger
from healthd.aggregator.controller.lease_reconciler import Reports
from healthd.aggregator.controller.quarantines import Rules
from healthd.aggregator.controller.stepping import Stepper
from healthd.aggregator.gate.snapshot import LookedUp
from healthd.aggregator.model import Gate, Observer, Registry
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

MOST_FAULTS_A_TURN = 20
"""Gates, nodes and requests that may fail in one turn before the others wait for the next: each costs it once more."""
RETRY_SECONDS = 1.0
"""After a failed commit: often enough to go on soon, seldom enough not to load a full disk."""
MOST_REFUSED = 3
"""Turns in a row whose rows the database may refuse before that counts as a fault: the first may be one request's."""
PRUNE_SECONDS = 3600.0
"""How often what is old is dropped from the database: it grows by some MB an hour at the very most."""
LONGEST_SLEEP_SECONDS = 30.0
"""The engine's clock counts a suspended machine's sleep and the event loop's does not: look again at least so often."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from here on by CLOCK_BOOTTIME: no jump of the clock moves a deadline."""
    start, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: start + time.clock_gettime(time.CLOCK_BOOTTIME) - boot


Action = Callable[[Batch], Any]
_Asked = tuple[Action, asyncio.Future[Any]]


@dataclass(frozen=True, kw_only=True)
class _Done:
    """
    What a turn came to, before it is on disk.

    `nodes` are those that it looked at, as it saw them. `accused` ones are quarantined for what a validation said.
    """

    batch: Batch
    results: list[tuple[asyncio.Future[Any], Any]]
    heard: set[str]
    nodes: LookedUp
    stepped: set[str]
    accused: set[str]


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
        self._bulkheads = Bulkheads()
        self._actions: deque[_Asked] = deque()
        self._taken: list[_Asked] = []  # of the turn under way
        self._alone = 0  # so many requests come in a turn of their own each
        self._refused = 0  # turns in a row
        self._heard: set[str] = set()
        self._unsure = False
        self._take_over(store.load())
        self._wake = asyncio.Event()
        self._turning = asyncio.Lock()
        self._followers: dict[str, asyncio.Event] = {}
        self._retry_at = -math.inf
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
        self._stepper = Stepper(
            self._ledger,
            self._registry,
            self.policy,
            reports=self._reports,
            rules=self._rules,
            bulkheads=self._bulkheads,
        )
        for node, quarantine in self._ledger.quarantines.items():
            self._registry.set_quarantine(node, quarantine)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Turn for ever. One task runs it; it ends by cancellation, or with FencedError: memory is out of date then."""
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
                    went_through = await self.turn()
                    if self._clock() >= self._prune_at:
                        await self._prune()
                if went_through:
                    self._bulkheads.passed(Where.TURN, "engine")
            except ContainedError as stopped:
                self._begin_again(stopped)

    def stop(self) -> None:
        """Wake everybody who waits for a gate: the aggregator ends. The gates stay open on disk."""
        self._stopping = True
        for follower in self._followers.values():
            follower.set()

    async def turn(self) -> bool:
        """
        Take in what happened, step, commit, carry out; one at a time. A StoreError goes to those who wait for it.

        Returns whether all of that was done: False while it rests after a failure, and when it failed again.
        """
        async with self._turning:
            self._taken = []
            try:
                return await self._turn()
            except Exception:
                for _, future in self._taken:
                    _fail(future, _internal_error())
                raise

    async def _turn(self) -> bool:
        now = self._clock()
        if now < self._retry_at and not self._actions:
            return False
        if self._unsure and not await self._read_anew():
            return False
        done = self._compute(now)
        if done is None:
            return False
        batch = done.batch
        try:
            if batch.changes:
                await self._store.write(batch.changes)
        except StoreError as error:
            self._undo(done, error)
            if isinstance(error, FencedError):
                raise
            return False
        self._retry_at, self._refused = -math.inf, 0
        self._bulkheads.passed(Where.TURN, "commit")
        self._rules.committed()
        try:
            with contained(Where.TURN, "answers"):
                self._tell(batch, done.heard, done.nodes)
            self._bulkheads.passed(Where.TURN, "answers")
        except ContainedError as stopped:
            self._begin_again(stopped)
        if done.accused:
            # Gates that look at these nodes see the rule's word in the next turn.
            self._heard |= done.accused
            self._wake.set()
        for future, result in done.results:
            if not future.done():
                future.set_result(self._newest(result))
        return True

    def _take(self) -> list[_Asked]:
        """The requests of this turn."""
        most, self._alone = (1 if self._alone else len(self._actions)), max(0, self._alone - 1)
        self._taken = [self._actions.popleft() for _ in range(min(most, len(self._actions)))]
        return self._taken

    def _compute(self, now: float) -> _Done | None:
        """
        All that this turn changes, in memory and for the disk. What fails in an unforeseen way is left out, and the
        rest computed anew; None when too much fails at once: then the rest waits for the next turn.
        """
        heard, self._heard = self._heard | self._bulkheads.due(Where.NODE, now), set()
        actions = self._take()
        before, expiring = self._stepper.snapshot(), self._expiring
        for _ in range(MOST_FAULTS_A_TURN):
            try:
                return self._attempt(now, actions, heard)
            except ContainedError as stopped:
                self._rules.undo()
                self._ledger.undo()
                self._reports.undo()
                self._stepper.restore(before)
                self._expiring = expiring
                self._contain(now, stopped, actions)
        self._heard |= heard
        self._actions.extendleft(reversed(actions))
        self._retry_at = now + RETRY_SECONDS
        return None

    def _contain(self, now: float, stopped: ContainedError, actions: list[_Asked]) -> None:
        """Leave alone what failed; who asked for it is told."""
        if stopped.where is not Where.REQUEST:
            self._bulkheads.failed(stopped.where, stopped.name, stopped.error, now)
            return
        self._bulkheads.count(stopped.where, stopped.name, stopped.error)
        _, future = actions.pop(int(stopped.name))
        _fail(future, _internal_error())

    def _attempt(self, now: float, actions: list[_Asked], heard: set[str]) -> _Done:
        """One try at the turn; ContainedError names what failed."""
        batch = Batch(now=now)
        self._ledger.begin()
        self._reports.begin()
        self._rules.begin()
        results = self._act(batch, actions)
        resting = self._bulkheads.resting(Where.NODE, now)
        expiring, self._expiring = self._expiring, False  # first: what fails here must not fail every turn
        if expiring:
            self._ledger.end_expired(batch, resting)
            pruning.forget_gone(batch, self._ledger, self._rules, self._reports, self.policy, resting)
        heard = heard - resting.keys()
        nodes = LookedUp(self._registry)
        self._reports.take_in(batch, heard, nodes)
        self._rules.take_in(batch, heard, nodes, resting)
        self._bulkheads.keep(Where.NODE, resting)
        stepped, again = self._stepper.step_all(batch, heard)
        if again:
            self._wake.set()
        accused = self._rules.accuse(batch, resting)
        self._bulkheads.keep(Where.GATE, self._ledger.gates)
        for fault in self._bulkheads.faults():
            if fault.where is Where.GATE:
                self._stepper.hold(fault)
        return _Done(batch=batch, results=results, heard=heard, nodes=nodes, stepped=stepped, accused=accused)

    def _begin_again(self, stopped: ContainedError) -> None:
        """
        Memory may be half way, or it is on disk and nobody knows who was told: read all anew, as after a restart.

        FencedError is raised again: that is no fault, and ends the engine.
        """
        if isinstance(stopped.error, FencedError):
            raise stopped.error
        fault = self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
        self._unsure, self._retry_at = True, fault.retry_at

    def _newest(self, result: object) -> object:
        """A gate that was asked may have gone further in the same turn."""
        if isinstance(result, Gate):
            return self._ledger.gates.get(result.id) or self._ledger.decided.get(result.id) or result
        return result

    async def _do(self, action: Callable[[Batch], T]) -> T:
        """What `action` returns, once what it changes is on disk; StoreError, and within `ANSWER_SECONDS`, else."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._actions.append((action, future))
        self._wake.set()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await future
        except TimeoutError:
            why = self._store.trouble() or "the aggregator is too busy"
            raise StoreError(f"it could not be written within {ANSWER_SECONDS:g} s: {why}") from None

    async def _read_anew(self) -> bool:
        """Begin again from what is on disk, as after a restart; false, and who waits is told, when that fails."""
        try:
            loaded = await self._store.read(changes.load, seconds=LONG_SECONDS)
        except HealthdError as error:
            self._retry_at = self._clock() + RETRY_SECONDS
            while self._actions:
                _, future = self._actions.popleft()
                _fail(future, error)
            if isinstance(error, FencedError):
                raise
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
        self._stepper.set_executors(self._clock())
        self._unsure = False
        return True

    async def _prune(self) -> None:
        now = self._clock()
        self._prune_at = now + PRUNE_SECONDS
        try:
            await pruning.prune(self._store, self._ledger, self._rules, self._reports, self.policy, now)
        except FencedError:
            raise
        except StoreError as error:
            self._unsure = self._unsure or isinstance(error, UnsureError)
            log.warning("nothing was pruned: %s", error)
            return
        self._expiring = True
        self._wake.set()

    def _hear(self, node: str) -> None:
        self._heard.add(node)
        self._wake.set()

    def _act(self, batch: Batch, actions: list[_Asked]) -> list[tuple[asyncio.Future[Any], Any]]:
        results = []
        for index, (action, future) in enumerate(actions):
            if future.done():
                continue  # who asked was told already what came of it, or that nothing did
            try:
                with contained(Where.REQUEST, str(index)):
                    results.append((future, action(batch)))
            except ContainedError as stopped:
                if not isinstance(stopped.error, HealthdError):
                    raise
                future.set_exception(stopped.error)
        return results

    def _undo(self, done: _Done, error: StoreError) -> None:
        """The disk did not take it: memory goes back to where the disk is, and it is tried again."""
        self._unsure = self._unsure or isinstance(error, UnsureError)
        self._rules.undo()
        self._ledger.undo()
        self._reports.undo()
        self._stepper.undo(done.stepped)
        self._heard |= done.heard
        self._retry_at = self._clock() + RETRY_SECONDS
        waiting = [asked for asked in self._taken if not asked[1].done()]
        if isinstance(error, RefusedWorkError):
            self._count_refusal(error)
            if len(waiting) > 1:  # only one of them may be what is refused
                self._actions.extendleft(reversed(waiting))
                self._alone = len(waiting)
                waiting = []
            if self._actions:
                self._wake.set()
        for _, future in waiting:
            _fail(future, error)

    def _count_refusal(self, error: RefusedWorkError) -> None:
        """What the database refuses turn after turn is no request's: nothing is written until it is gone."""
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self._retry_at = self._bulkheads.failed(Where.TURN, "commit", error, self._clock()).retry_at

    def _tell(self, batch: Batch, heard: set[str], nodes: LookedUp) -> None:
        """All of it is on disk: tell metrics, nodes and clients."""
        if self._observer is not None:
            for gate in batch.ready:  # first, since it is measured until the leases are on disk
                self._observer.gate_ready(gate, batch.now - gate.created_at)
        self._reports.tell(batch, heard, nodes)
        for name in batch.forgotten:
            self._registry.forget(name)
        if any(gate.request.join is not None for gate in batch.decided):
            self._stepper.set_executors(batch.now)
        for gate in batch.decided:
            self._ledger.remember(gate)
            self._stepper.decided(gate.id)
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
        if self._stepper.dirty or self._actions or self._heard:
            return now
        times = [self._stepper.next_due(), self._reports.next_due(now), self._prune_at]
        rest = self._bulkheads.resting(Where.NODE, now)
        return min([*times, self._rules.next_due(rest), self._bulkheads.next_due(now)])


def _internal_error() -> HealthdError:
    return HealthdError("internal error; the aggregator's log has more")


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Tell who waits, unless they were told something already."""
    if not future.done():
        future.set_exception(error)
