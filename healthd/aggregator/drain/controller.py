"""
Applies the drain plan to the scheduler, one bounded call after the other, and holds a reject back until it is done.

On the event loop alone. A scheduler that is away costs a line in the log and nothing else: gates answer after their
time-out, and it is tried again with growing pauses. What came of it is in the node's history.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from healthd.aggregator.drain.deferred_rejects import DeferredRejects
from healthd.aggregator.drain.model import Actuator, ActuatorError, Done, Removal
from healthd.aggregator.drain.pacing import RemovalRate, Retries
from healthd.aggregator.drain.plan import Observed, Plan, RejectedNode, culprits, make_plan
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.model.gates import Gate
from healthd.core.errors import HealthdError
from healthd.core.model import Decision

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Note = Callable[[str, str, str], Awaitable[None]]
"""(node, kind, message): a line of the node's history."""

FIRST_PAUSE_SECONDS = 1.0
# So long is believed what was read of the scheduler, and that a mark still stands.
RECHECK_SECONDS = 60.0
RELIST_SECONDS = 600.0
CALL_SECONDS = 30.0
# A scheduler that refuses so many in a row refuses all.
MOST_ERRORS = 3
# What is said about no node in particular.
_AWAY, _RATE = ":away", ":rate"


class DrainController:
    """
    Start `run` as a task; tell `gate_decided`, ask `settle`.

    `look` gives the fleet as of now, with the rejects it is handed. `clock` counts seconds and never jumps, `wall` is
    the one that quarantines go by.
    """

    def __init__(
        self,
        actuator: Actuator,
        settings: ActuatorSettings,
        *,
        look: Callable[[Mapping[str, RejectedNode]], Observed],
        note: Note,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._actuator = actuator
        self._settings = settings
        self._look = look
        self._note = note
        self._clock = clock
        self._wall = wall
        self._marked: dict[str, str] = {}
        self._listed_at = -math.inf
        self._standing: dict[str, float] = {}  # node -> when it was last seen to be out
        self._left: set[str] = set()  # nodes that the scheduler does not know, or that somebody else keeps out
        self._ours: set[str] = set()  # marked, or marked again, by this process: for causes that it knows
        self._rejected: dict[str, RejectedNode] = {}
        self._held = DeferredRejects(settings.answer_seconds, clock=clock)
        self._retries = Retries(FIRST_PAUSE_SECONDS, settings.backoff_max_seconds)
        self._rate = RemovalRate(settings.removals_per_minute)
        self._told: dict[str, str] = {}
        self._wake = asyncio.Event()
        # By what was asked, since the start; a failed call is among both.
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._away = False

    # --- gates --------------------------------------------------------------------------------------------------------

    def gate_decided(self, gate: Gate) -> None:
        """A decision is on disk, now or from before: the nodes that a retryable reject accuses are out for a while."""
        found = culprits(gate.decision) if gate.decision is not None else {}
        at = gate.decision.decided_at if gate.decision is not None else 0.0
        until = at + self._settings.gate_seconds
        if not found or until <= self._wall():
            return
        for node, why in found.items():
            if why.code != "Quarantined":  # that one speaks for itself, for as long as it stands
                self._rejected[node] = RejectedNode(
                    gate=gate.id, reason=why.message, injected=why.injected, since=at, until=until
                )
        if self._settings.mode == "act":
            self._held.hold(gate.id, found)
        self._wake.set()

    async def settle(self, gate_id: str, decision: Decision, wait_seconds: float) -> Decision:
        """As `DeferredRejects.settle`."""
        return await self._held.settle(gate_id, decision, wait_seconds)

    def stop(self) -> None:
        """The aggregator ends: nobody is held any longer."""
        self._held.stop()

    def out(self) -> Mapping[str, str]:
        """Nodes that bear our mark, as far as is known, and its text."""
        return dict(self._marked)

    @property
    def kind(self) -> str:
        """The name of the scheduler."""
        return self._actuator.name

    @property
    def overdue(self) -> int:
        """
        How many nodes are to be out, or back, and are not because the last call about them failed; one while the
        scheduler cannot even be listed.
        """
        return max(len(self._retries), int(self._away))

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever; ends by cancellation."""
        failures = 0
        while True:
            try:
                await self.turn()
            except ActuatorError as error:
                self._say(_AWAY, str(error))
                failures += 1
                await asyncio.sleep(self._retries.pause(failures, error))
                continue
            failures = 0
            try:
                async with asyncio.timeout(self._next_look()):
                    await self._wake.wait()
            except TimeoutError:
                log.debug("time to compare")
            self._wake.clear()

    async def turn(self) -> Plan:
        """Compare once and do what is to be done. ActuatorError: the scheduler could not even be asked."""
        now, wall = self._clock(), self._wall()
        self._rejected = {node: kept for node, kept in self._rejected.items() if kept.until > wall}
        acting = self._settings.mode == "act"
        if acting and now - self._listed_at >= RELIST_SECONDS:
            self._marked = dict(await self._bounded("list", self._actuator.marked()))
            self._away = False
            self._listed_at = now
            self._standing = {node: at for node, at in self._standing.items() if node in self._marked}
        seen = self._look(self._rejected)
        plan = make_plan(wall, seen, self._marked.keys(), left=self._left)
        for node, why in plan.kept_back.items():
            self._say(node, f"{node} stays where jobs are placed: {why}")
        if acting:
            await self._act(plan, seen)
        else:
            for node, removal in plan.out.items():
                self._say(
                    node, f"{self._actuator.name}: {node} would be taken out of the way (observe): {removal.reason}"
                )
        self._told = {
            about: text
            for about, text in self._told.items()
            if about == _RATE or about in plan.out or about in plan.kept_back
        }
        self._no_longer_wanted(plan)
        return plan

    async def _act(self, plan: Plan, seen: Observed) -> None:
        errors, now = 0, self._clock()
        # New ones first: a job may be waiting for its answer.
        fresh = [removal for node, removal in plan.out.items() if node not in self._standing]
        known = [removal for node, removal in plan.out.items() if node in self._standing and self._old(node)]
        for removal in (*fresh, *known):
            if errors >= MOST_ERRORS or self._retries.is_pausing(removal.node, now) or not self._may_remove(removal):
                continue
            errors = errors + 1 if not await self._remove(removal) else 0
        # An aggregator that lost its database knows of no quarantine until the nodes have told theirs; one that never
        # heard of a node, or has forgotten it, knows nothing that speaks for it.
        for node in [one for one in self._marked if one not in plan.out]:
            if not seen.knows(node) or (seen.unsure and node not in self._ours):
                continue
            if errors >= MOST_ERRORS or self._retries.is_pausing(node, now):
                continue
            errors = errors + 1 if not await self._restore(node) else 0

    async def _remove(self, removal: Removal) -> bool:
        """False: the call failed."""
        node, new = removal.node, removal.node not in self._marked
        try:
            outcome = await self._bounded("remove", self._actuator.remove(removal))
        except ActuatorError as error:
            self._failed(node, error)
            return False
        self._retries.succeeded(node)
        (self._left.add if outcome.done is Done.LEFT else self._left.discard)(node)
        if outcome.done is Done.OUT:
            self._marked[node] = removal.reason
            self._ours.add(node)
            if new:
                self._rate.removed(self._clock())
                await self._write(node, "taken out of the way", f"{outcome.note}: {removal.reason}")
        elif outcome.done is Done.LEFT:
            self._marked.pop(node, None)
            self._say(node, f"{self._actuator.name}: {outcome.note}")
        self._standing[node] = self._clock()
        self._held.arrived(node)
        return True

    async def _restore(self, node: str) -> bool:
        """False: the call failed."""
        try:
            outcome = await self._bounded("restore", self._actuator.restore(node))
        except ActuatorError as error:
            self._failed(node, error)
            return False
        self._retries.succeeded(node)
        self._marked.pop(node, None)
        self._ours.discard(node)
        self._standing.pop(node, None)
        self._told.pop(node, None)
        if outcome.done is Done.BACK:
            await self._write(node, "given back", outcome.note)
        return True

    async def _bounded(self, what: str, call: Awaitable[_T]) -> _T:
        """The answer of the scheduler; ActuatorError for all else, which is counted."""
        self.calls[what] += 1
        name = self._actuator.name
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await call
        except Exception as error:
            self.failures[what] += 1
            self._away = self._away or what == "list"
            if isinstance(error, ActuatorError):
                raise
            if isinstance(error, TimeoutError):
                raise ActuatorError(f"{name}: no answer within {CALL_SECONDS:g} s") from None
            log.exception("%s: internal error in %s", name, what)
            raise ActuatorError(f"{name}: internal error: {error}") from None

    async def _write(self, node: str, kind: str, message: str) -> None:
        log.info("%s is %s by %s: %s", node, kind, self._actuator.name, message)
        try:
            await self._note(node, kind, message)
        except HealthdError as error:
            log.warning("%s: not in its history: %s", node, error)

    # --- small questions ----------------------------------------------------------------------------------------------

    def _no_longer_wanted(self, plan: Plan) -> None:
        """Nobody waits for what is not going to happen, or has happened already."""
        for node in self._held.nodes():
            if node not in plan.out or node in self._standing:
                self._held.arrived(node)
        self._held.forget()
        self._standing = {node: at for node, at in self._standing.items() if node in plan.out}
        self._left &= plan.out.keys() | plan.kept_back.keys()
        self._retries.keep(plan.out.keys() | self._marked.keys())

    def _old(self, node: str) -> bool:
        return self._clock() - self._standing[node] >= RECHECK_SECONDS

    def _may_remove(self, removal: Removal) -> bool:
        """Whether one more may be taken out now; what is out already needs none."""
        if removal.node in self._marked:
            return True
        if self._rate.allows_one(self._clock()):
            self._told.pop(_RATE, None)
            return True
        self._say(_RATE, f"{self._actuator.name}: {self._rate.most_per_minute} nodes a minute; the rest waits")
        return False

    def _failed(self, node: str, error: ActuatorError) -> None:
        self._say(node, f"{node}: {error}")
        self._retries.failed(node, error, self._clock())

    def _next_look(self) -> float:
        """Sooner than usual while a node is to be tried again or a reject is held."""
        now, look = self._clock(), self._settings.look_seconds
        soon = list(self._retries.due_in(now))
        if self._held.nodes():
            soon.append(FIRST_PAUSE_SECONDS)
        return max(0.05, min([look, *soon]))

    def _say(self, about: str, text: str) -> None:
        """Once for each new sentence."""
        if self._told.get(about) != text:
            log.warning("%s", text)
        self._told[about] = text
