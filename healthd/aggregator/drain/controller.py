"""
Applies the drain plan to the scheduler, one bounded call after the other, and holds a reject back until it is done.

On the event loop alone. A scheduler that is away costs a line in the log and nothing else: gates answer after their
time-out, and it is tried again with growing pauses. What came of it is in the node's history.

Also here:

- rejects that are held back until the nodes they accuse are out of the scheduler's way, or their time is over;
- when the next call about a node may be made: after failures, and within the rate of removals. No I/O;
- what the drain controller did, for Prometheus: calls, failures, nodes held out, how long nothing came through;
- makes the drain controller of an aggregator from its settings and what it sees of the fleet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from checks.contract import Status
from healthd.aggregator.drain.plan import (
    Actuator,
    ActuatorError,
    Candidate,
    Done,
    NodeFault,
    Observed,
    Plan,
    PoolSize,
    RejectedNode,
    Removal,
    culprits,
    make_plan,
)
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.drain.targets import make_actuator, with_devices
from healthd.aggregator.engine import Engine
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.gate.records import Gate
from healthd.aggregator.quarantine import CODES, passed_in_validations
from healthd.core.backoff import Backoff
from healthd.core.errors import HealthdError
from healthd.core.evidence import reason
from healthd.core.model import Decision, DeviceRecord, NodeState, Quarantine, Verdict
from healthd.core.text import moment

log = logging.getLogger(__name__)

MOST_PENDING = 1000
# Whoever asked and has not come back for the answer by then does not come any more.
FORGET_SECONDS = 600.0

_T = TypeVar("_T")

Note = Callable[[str, str, str], Awaitable[None]]
"""(node, kind, message): a line of the node's history."""

RELEASED = "released"
"""The kind of the line that says that a person released a node which a gate had rejected."""

FIRST_PAUSE_SECONDS = 1.0
# So long is believed what was read of the scheduler, and that a mark still stands.
RECHECK_SECONDS = 60.0
RELIST_SECONDS = 600.0
CALL_SECONDS = 30.0
# A scheduler that refuses so many in a row refuses all.
MOST_ERRORS = 3
# What is said about no node in particular.
_AWAY, _RATE = ":away", ":rate"

CALLS = ("list", "remove", "restore")
"""All that a scheduler is asked to do; the label `call`."""


class ActuatorCollector(Collector):
    """Counted anew at each scrape. Every series is there from the start, at 0; without a controller there is none."""

    def __init__(self, drain: DrainController | None) -> None:
        self._drain = drain

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks."""
        labels = ("kind", "call")
        calls = CounterMetricFamily("healthd_actuator_calls", "Calls to the actuator's scheduler.", labels=labels)
        failures = CounterMetricFamily(
            "healthd_actuator_failures",
            "Calls of the actuator that the scheduler refused or that were lost.",
            labels=labels,
        )
        out = GaugeMetricFamily(
            "healthd_actuator_nodes_out",
            "Nodes that have the actuator's mark now, or one of whose devices does.",
            labels=("kind",),
        )
        overdue = GaugeMetricFamily(
            "healthd_actuator_nodes_overdue",
            "Nodes whose last call failed: not out, or not back. 1 while the scheduler cannot be listed.",
            labels=("kind",),
        )
        if (drain := self._drain) is not None:
            for call in CALLS:
                calls.add_metric((drain.kind, call), drain.calls[call])
                failures.add_metric((drain.kind, call), drain.failures[call])
            out.add_metric((drain.kind,), len(drain.out()))
            overdue.add_metric((drain.kind,), drain.overdue)
        yield from (calls, failures, out, overdue)


def make_drain_controller(settings: ActuatorSettings, source: Engine, nodes: Fleet) -> DrainController | None:
    """None where nothing outside of healthd is to be touched."""
    nodes_of = make_actuator(settings)
    if nodes_of is None:
        return None
    actuator = with_devices(nodes_of)
    by_device = actuator is not nodes_of
    return DrainController(
        actuator,
        settings,
        look=lambda rejected: observe(source, nodes, rejected, by_device=by_device),
        note=source.note,
        wall=source.now,
    )


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
        self._standing: dict[str, float] = {}  # node -> when it was last seen to be out, in `_scopes`
        self._scopes: dict[str, tuple[frozenset[str], bool]] = {}
        self._kept_back: frozenset[str] = frozenset()  # nodes that stay in though they are bad
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
        """A decision is on disk: the nodes that a retryable reject accuses are out for a while."""
        self._take_in(gate, {})

    def load(self, gates: Sequence[Gate], released: Mapping[str, float]) -> None:
        """
        Take in the gates of before this start, newest first. What they said of a node counts no more where a person
        released it since: `released` says when that was last.
        """
        for gate in reversed(gates):
            self._take_in(gate, released)

    def _take_in(self, gate: Gate, released: Mapping[str, float]) -> None:
        """A decision, now or from before; `released` are nodes that a person released, and when."""
        if gate.decision is None:
            return
        if gate.validated and gate.decision.decision is Verdict.ADMIT:
            for node in passed_in_validations(gate):
                self._passed_validation(node)
        at = gate.decision.decided_at
        until = at + self._settings.gate_seconds
        found = {node: why for node, why in culprits(gate.decision).items() if at > released.get(node, -math.inf)}
        if not found or until <= self._wall():
            return
        for node, reasons in found.items():
            known, worst = self._rejected.get(node), reasons[0]
            before = () if known is None or known.quarantined or known.until <= self._wall() else known.faults
            new = [
                NodeFault(check=None if why.code in CODES else why.check, tier=gate.terms.tier, since=at)
                for why in reasons
                if why.code != "Quarantined"
            ]
            self._rejected[node] = RejectedNode(
                gate=gate.id,
                reason=worst.message,
                injected=worst.injected,
                since=at,
                until=until,
                quarantined=not new and not before,
                faults=tuple({fault.check: fault for fault in (*before, *new)}.values()),
            )
        if self._settings.mode == "act":
            self._held.hold(gate.id, found)
        self._wake.set()

    def _passed_validation(self, node: str) -> None:
        """The node has passed collectives: its faults between nodes are over."""
        kept = self._rejected.get(node)
        if kept is None or kept.quarantined or all(fault.check is not None for fault in kept.faults):
            return
        if left := tuple(fault for fault in kept.faults if fault.check is not None):
            self._rejected[node] = dataclasses.replace(kept, faults=left)
        else:
            del self._rejected[node]
            self._wake.set()

    async def release(self, node: str, why: str) -> None:
        """A person releases the node: nothing that a gate said of it counts any more, also after a restart."""
        if node in self._rejected:
            await self._note(node, RELEASED, why)
            self._rejected.pop(node, None)
            self._wake.set()

    def removed(self) -> Mapping[str, str]:
        """
        The nodes that the scheduler must avoid, or is about to, with until when. Those that bear our mark for a
        quarantine are among them, which matters to nobody while that stands.
        """
        if self._settings.mode != "act":
            return {}
        wall = self._wall()
        found = {
            node: moment(kept.until)
            for node, kept in self._rejected.items()
            if kept.until > wall and not kept.quarantined and node not in self._kept_back and node not in self._left
        }
        return {**dict.fromkeys(self._marked, "its mark is removed"), **found}

    def quarantines_changed(self) -> None:
        """Compare at once: a node that is kept out is to be out of the scheduler's way within seconds."""
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
        for node in seen.refuted:
            self._rejected.pop(node, None)
        plan = make_plan(wall, seen, self._marked.keys(), left=self._left)
        self._kept_back = frozenset(plan.kept_back)
        for node in [one for one in self._standing if one in plan.out]:
            if plan.out[node].scope != self._scopes.get(node):
                del self._standing[node]
        for node, why in plan.kept_back.items():
            self._say(node, f"{node} stays schedulable: {why}")
        if acting:
            await self._act(plan, seen)
        else:
            for node, removal in plan.out.items():
                of = "" if removal.whole else f"{', '.join(device.target for device in removal.devices)} of "
                text = f"{of}{node} would be removed from scheduling (observe): {removal.reason}"
                self._say(node, f"{self._actuator.name}: {text}")
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
        changed = self._scopes.get(node, removal.scope) != removal.scope
        try:
            outcome = await self._bounded("remove", self._actuator.remove(removal))
        except ActuatorError as error:
            self._failed(node, error)
            return False
        self._retries.succeeded(node)
        (self._left.add if outcome.done is Done.LEFT else self._left.discard)(node)
        self._scopes[node] = removal.scope
        if outcome.done is Done.OUT:
            self._marked[node] = removal.reason
            self._ours.add(node)
            if new:
                self._rate.removed(self._clock())
            if new or changed:
                await self._write(node, "removed from scheduling", f"{outcome.note}: {removal.reason}")
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
        self._scopes.pop(node, None)
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
        self._scopes = {node: scope for node, scope in self._scopes.items() if node in plan.out or node in self._marked}
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
        self._say(_RATE, f"{self._actuator.name}: {self._rate.most_per_minute} nodes per minute; the rest waits")
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


class DeferredRejects:
    """On the event loop alone. `clock` counts seconds and never jumps."""

    def __init__(self, answer_seconds: float, *, clock: Callable[[], float]) -> None:
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._stopping = False

    def hold(self, gate_id: str, nodes: Iterable[str]) -> None:
        """The gate is rejected for these nodes."""
        if self._answer_seconds > 0 and len(self._pending) < MOST_PENDING:
            self._pending[gate_id] = _Pending(nodes=set(nodes), deadline=self._clock() + self._answer_seconds)

    async def settle(self, gate_id: str, decision: Decision, wait_seconds: float) -> Decision:
        """
        The decision, once its nodes are out of the way or the time for that is over; until then a hold.

        Waits for `wait_seconds` at most. Any other decision comes back as it is.
        """
        pending = self._pending.get(gate_id)
        if pending is None or decision.decision is not Verdict.REJECT:
            return decision
        left = min(wait_seconds, pending.deadline - self._clock())
        if left > 0 and not self._stopping:
            try:
                async with asyncio.timeout(left):
                    await pending.done.wait()
            except TimeoutError:
                log.debug("gate %s: its nodes are not out of the scheduler's reach yet", gate_id)
        if gate_id not in self._pending:
            return decision
        names = ", ".join(sorted(pending.nodes)[:8])
        if self._clock() >= pending.deadline:
            self._pending.pop(gate_id, None)
            log.warning("gate %s is answered although %s could not be removed from scheduling in time", gate_id, names)
            return decision
        text = f"rejected; first {names} is removed from scheduling, so that the next attempt starts elsewhere"
        first = reason("Removing", text, status=Status.UNKNOWN)
        return dataclasses.replace(decision, decision=Verdict.HOLD, reasons=(first, *decision.reasons))

    def nodes(self) -> set[str]:
        """All nodes that somebody waits for."""
        return {node for pending in self._pending.values() for node in pending.nodes}

    def arrived(self, node: str) -> None:
        """It is out, or will not be: gates that wait for this node alone are answered."""
        for gate_id, pending in list(self._pending.items()):
            pending.nodes.discard(node)
            if not pending.nodes:
                del self._pending[gate_id]
                pending.done.set()

    def forget(self) -> None:
        """Drop those that nobody comes back for."""
        old = [i for i, pending in self._pending.items() if self._clock() - pending.deadline > FORGET_SECONDS]
        for gate_id in old:
            del self._pending[gate_id]

    def stop(self) -> None:
        """The aggregator ends: who is held is told so."""
        self._stopping = True
        for pending in self._pending.values():
            pending.done.set()


class Retries:
    """Nodes whose last calls failed. All times are of one clock, in seconds."""

    def __init__(self, first_seconds: float, most_seconds: float) -> None:
        self._backoff = Backoff(first_seconds, most_seconds)
        self._trouble: dict[str, _Trouble] = {}

    def __len__(self) -> int:
        return len(self._trouble)

    def failed(self, node: str, error: ActuatorError, now: float) -> None:
        """One more call about the node failed."""
        failures = self._trouble[node].failures + 1 if node in self._trouble else 1
        self._trouble[node] = _Trouble(failures, now + self.pause(failures, error))

    def succeeded(self, node: str) -> None:
        """A call about the node went through."""
        self._trouble.pop(node, None)

    def is_pausing(self, node: str, now: float) -> bool:
        """Whether it is too early for another call about the node."""
        return node in self._trouble and now < self._trouble[node].retry_at

    def keep(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        self._trouble = {node: trouble for node, trouble in self._trouble.items() if node in nodes}

    def due_in(self, now: float) -> Iterator[float]:
        """Seconds until each of the next calls."""
        return (trouble.retry_at - now for trouble in self._trouble.values())

    def pause(self, failures: int, error: ActuatorError) -> float:
        """Seconds until the next try: by the failures in a row, or longer where the scheduler asks for it."""
        most = self._backoff.most_seconds
        return max(self._backoff.after(failures), min(error.retry_after_seconds or 0.0, most))


class RemovalRate:
    """At most so many removals in any 60 seconds."""

    def __init__(self, most_per_minute: int) -> None:
        self.most_per_minute = most_per_minute
        self._removed_at: deque[float] = deque()

    def removed(self, now: float) -> None:
        """A node was taken out."""
        self._removed_at.append(now)

    def allows_one(self, now: float) -> bool:
        """Whether one more may be taken out now."""
        while self._removed_at and now - self._removed_at[0] >= 60.0:
            self._removed_at.popleft()
        return len(self._removed_at) < self.most_per_minute


def observe(source: Engine, nodes: Fleet, rejected: Mapping[str, RejectedNode], *, by_device: bool = False) -> Observed:
    """The fleet as of now; a healthy one costs nothing. `by_device`: single devices can be taken out."""

    def known(name: str) -> bool:
        return nodes.node(name) is not None

    quarantines = source.quarantines()
    unsure = source.unsure()
    names = sorted({*quarantines, *rejected})
    if not names:
        return Observed(suspects=(), pools={}, breakers=frozenset(), unsure=unsure, knows=known)
    leased = {row.node for row in source.leases()}
    suspects = []
    refuted = set()
    now = source.now()
    for name in names:
        node = nodes.node(name)
        state = node.state if node is not None else None
        kept = rejected.get(name)
        current = None if node is None or kept is None else node.current()
        if kept is not None and current is not None and kept.refuted_by(current, now):
            refuted.add(name)
            kept = None
        suspects.append(
            Candidate(
                node=name,
                aliases=state.aliases if state is not None else (),
                instance_id=state.instance_id if state is not None else None,
                pool=source.pool_of(name) or "",
                quarantine=quarantines.get(name),
                rejected=kept,
                faults=bool(state is not None and state.faults),
                # Of a node that nobody has heard of nobody knows: when in doubt, a job has it.
                allocated=state is None or bool(state.allocated or state.leases) or name in leased,
                gone=not source.present(name),
                devices=_devices(quarantines.get(name), state) if by_device else (),
            )
        )
    sizes: dict[str, int] = {
        pool: sum(source.present(name) for name in nodes.pool(pool))
        for pool in {suspect.pool for suspect in suspects}
        if pool
    }
    if any(not suspect.pool for suspect in suspects):
        sizes[""] = sum(source.pool_of(name) is None and source.present(name) for name in nodes.names())
    pools = {pool: PoolSize(size, source.policy.most_out(size)) for pool, size in sizes.items()}
    return Observed(
        suspects=tuple(suspects),
        pools=pools,
        breakers=source.breakers().keys(),
        unsure=unsure,
        knows=known,
        refuted=frozenset(refuted),
    )


@dataclass
class _Pending:
    """A reject that is held back until `nodes` are out of the way."""

    nodes: set[str]
    deadline: float
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Trouble:
    failures: int
    retry_at: float


def _devices(quarantine: Quarantine | None, state: NodeState | None) -> tuple[DeviceRecord, ...]:
    """The devices that a quarantine names. Of one that the node does not show, or not yet, nothing is known."""
    inventory = state.inventory if state is not None else None
    shown = {device.target: device for device in inventory.devices} if inventory is not None else {}
    named = quarantine.devices if quarantine is not None else ()
    return tuple(
        shown.get(target) or DeviceRecord(target=target, kind="", serial=None, cores=None, memory_bytes=None)
        for target in named
    )
