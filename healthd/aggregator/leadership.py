"""
Leading and standing by, in turn: when an aggregator takes over, what it has while it leads, and when it lets go.

A lease is over when its row has stood still for its length, by our own clock and as seen from here: neither the clocks
of other machines nor that of the server matter, nor an outage of the server, after which the leader renews first. The
term in every transaction stands above all of this: who is wrong here is refused there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily

from checks.contract import Tier
from healthd.aggregator.api import Parts, SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.drain.controller import RELEASED, ActuatorCollector, make_drain_controller
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.engine import Engine, Handshakes, steady_clock
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.history import PeerEvents
from healthd.aggregator.fleet.slow import Stragglers
from healthd.aggregator.forwarding import Front, Serving
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.jobs.postmortem_records import Postmortem
from healthd.aggregator.jobs.postmortems import Postmortems
from healthd.aggregator.jobs.sinks import JobEvents, job_events
from healthd.aggregator.jobs.ungated import UNGATED, UngatedJobs
from healthd.aggregator.metrics import LOOP_LAG, FleetMetrics, LeadershipCollector, tasks_metric
from healthd.aggregator.policy import Policy, longest_hold
from healthd.aggregator.quarantine import MOST_GATES_READ, Accusations
from healthd.aggregator.quarantine.records import ACCUSED_WINDOW_SECONDS
from healthd.aggregator.screening.service import Screening, ScreeningCollector
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import (
    LEASE_SECONDS,
    FencedError,
    Leadership,
    Look,
    NotVacantError,
    PutDuplicate,
    Store,
    Watch,
    boot_seconds,
)
from healthd.core.errors import HealthdError, StoreError
from healthd.core.model import GateTerm
from healthd.core.tasks import LogOnce, OnEnd, Tasks, wait_for

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 1.0
HANGS_SECONDS = 5.0
"""A look that takes so long is ended, and the connection made again."""
AGAIN_SECONDS = 0.5
"""The pause after a takeover that failed, or that another one was faster in."""
# Each opening of the database counts its answers from another multiple of this, so that the count never goes back.
ANSWERS_EACH_START = 1 << 32
# Releases of nodes that a gate had rejected, which are read at the start: more than a person can be about in that time.
MOST_RELEASES_READ = 20_000


@dataclass(frozen=True, kw_only=True)
class Terms:
    """
    What does not change when the leader does. `callers_may` is as of `Parts`; `tasks` are those of the whole process.
    """

    settings: AggregatorSettings
    policy: Policy
    guard: Guard
    actuator: ActuatorSettings
    callers_may: frozenset[GateTerm]
    tasks: Tasks
    screening: ScreeningSettings = field(default_factory=ScreeningSettings)


@dataclass(frozen=True, kw_only=True)
class Leading:
    """
    The application of a leader with its syncs, what its handlers work with, and its tasks, whose `failure` tells when
    it cannot go on. `let_go` answers the nodes that wait.
    """

    app: SyncEndpoint
    parts: Parts
    tasks: Tasks
    let_go: Callable[[], None]


class Observed:
    """A lease as it is seen from here. Pure: `now` counts seconds by a clock that nobody sets."""

    def __init__(self) -> None:
        self.row: Leadership | None = None
        self._since = 0.0

    def note(self, look: Look, now: float) -> None:
        """One more look. After a failed one it begins anew: the leader may not have reached the server either."""
        found = look if isinstance(look, Leadership) else None
        if found is None or found != self.row:
            self.row, self._since = found, now

    def vacant(self, now: float) -> Leadership | None:
        """The row of a lease that is over; None while somebody may lead."""
        over = self.row is not None and (not self.row.holder or now - self._since >= LEASE_SECONDS)
        return self.row if over else None

    def due_in(self, now: float) -> float:
        """In how many seconds the lease is over if nothing is heard."""
        return max(0.0, self._since + LEASE_SECONDS - now)


class Course:
    """
    Run `run` as a fatal task, and `follow` as another, or tell it by `note` what a watch sees; `settled` is set once it
    leads or stands by. `stop` ends it.

    Where the database is not `shared`, it leads until the end, and a FencedError is the end.
    """

    def __init__(
        self,
        *,
        front: Front,
        shared: bool,
        take: Callable[[Leadership], Awaitable[Store]],
        leading: Callable[[Store], AbstractAsyncContextManager[Leading]],
    ) -> None:
        """`take` opens the database and takes over from a leader that is gone."""
        self.settled = asyncio.Event()
        self._front, self._shared, self._take, self._leading = front, shared, take, leading
        self._observed = Observed()
        self._looked_at = boot_seconds()
        self._not_before = 0.0
        self._former = ""
        self._news = asyncio.Event()
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._trouble = LogOnce(log)

    async def follow(self, watch: Watch) -> None:
        """Start the watch, and note what it sees until cancelled. A look that hangs is ended, and counts as failed."""
        loop = asyncio.get_running_loop()

        def tell(look: Look) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone with the process
                loop.call_soon_threadsafe(self.note, look)

        self._looked_at = boot_seconds()
        watch.start(tell)
        while True:
            await asyncio.sleep(LONGEST_PAUSE_SECONDS)
            if boot_seconds() - self._looked_at > HANGS_SECONDS:
                watch.cut()
                self.note(StoreError(f"the database has not responded for {HANGS_SECONDS:g} s"))

    def note(self, look: Look, *, over: bool = False) -> None:
        """What a watch has seen. `over`: by the clock of the server nobody leads any more."""
        now = self._looked_at = boot_seconds()
        left = isinstance(look, Leadership) and not look.holder
        self._observed.note(look, now - LEASE_SECONDS if over and not left else now)
        if isinstance(look, StoreError):
            self._front.follow(None, 0, str(look))
        elif look.holder not in ("", self._former):
            self._not_before = 0.0  # somebody has come after us, so that this one stands by as any other
        self._news.set()

    async def run(self, store: Store | None) -> None:
        """Lead with this store, or stand by without one; then in turn, for ever. Waits to be cancelled once stopped."""
        while not self._stop.is_set():
            if store is None:
                store = await self._win()
            if store is not None and self._stop.is_set():
                store.close()
            elif store is not None:
                await self._lead(store)
                # What it knew of its fleet has cycles, and may be half a gigabyte. Nobody waits for one that stands by.
                gc.unfreeze()
                gc.collect()
            store = None
        self._ended.set()
        await asyncio.Event().wait()

    async def stop(self, seconds: float) -> None:
        """Let go of the lead; waits for that, at most so long."""
        self._stop.set()
        self._front.stop()
        self._news.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def _show(self) -> None:
        """Tell the front whom it may ask."""
        if (row := self._observed.row) is None:
            return
        if row.holder and row.holder == self._former:  # it is not known yet who came after us
            self._front.follow(None, row.term, "it has just lost the lead")
        elif not row.holder:
            self._front.follow(None, row.term, "its leader has left, and no aggregator has taken over yet")
        elif not row.url:
            self._front.follow(None, row.term, f"{row.holder} leads but has not published its address")
        else:
            self._front.follow(row.url, row.term, "")

    async def _win(self) -> Store | None:
        """Stand by until it leads; None at the end."""
        while not self._stop.is_set():
            self._show()
            now = boot_seconds()
            vacant = self._observed.vacant(now)
            pause = self._observed.due_in(now)
            if vacant is not None and now < self._not_before:
                pause = self._not_before - now
            elif vacant is not None:
                if (store := await self._try(vacant)) is not None:
                    return store
                self._not_before = boot_seconds() + AGAIN_SECONDS
                continue
            self.settled.set()
            await wait_for(self._news, min(max(pause, 0.01), LONGEST_PAUSE_SECONDS))
        return None

    async def _try(self, vacant: Leadership) -> Store | None:
        try:
            store = await self._take(vacant)
        except NotVacantError as error:
            self._trouble.say(f"it does not take over: {error}", logging.INFO)
            return None
        except HealthdError as error:
            self._trouble.say(f"it cannot take over: {error}")
            return None
        self._trouble.clear()
        return store

    async def _lead(self, store: Store) -> None:
        """Until it leads no more, or the process ends."""
        self._former = store.holder
        try:
            async with self._leading(store) as leader:
                self._front.lead(Serving(app=leader.app, direct=leader.app, leads=store.leads, trouble=store.trouble))
                self.settled.set()
                log.info("leads (term %d)", store.term)
                try:
                    await leader.tasks.first(self._until_over(store, leader.let_go))
                finally:
                    if not self._stop.is_set():
                        self._front.stand_by("it has just lost the lead")
                        self._show()
        except FencedError as lost:
            if not self._shared:
                raise
            log.warning("%s; it is a standby now", lost)
        except StoreError as error:
            if not self.settled.is_set() or not self._shared:
                raise
            log.error("it could not lead: %s; it is a standby now", error)
        self._not_before = boot_seconds() + LEASE_SECONDS  # another one is to come first

    async def _until_over(self, store: Store, let_go: Callable[[], None]) -> None:
        """
        Until another one has the lead by what the watch sees, or the process ends.

        A lease that cannot be renewed is no end: the leader may be the first whom the database hears again. But nodes
        that wait are answered, so that they find another one if there is one.
        """
        led = True
        while not self._stop.is_set():
            if led and not store.leads():
                log.warning("the lease is over: %s", store.trouble() or "it was not renewed in time")
                let_go()
            led = store.leads()
            row = self._observed.row
            # A look may be older than our takeover; who was faster has a higher term.
            if row is not None and (row.term > store.term or (row.term == store.term and row.holder != store.holder)):
                log.warning("%s leads now (term %d); this aggregator is a standby", row.holder or "nobody", row.term)
                return
            await wait_for(self._news, LONGEST_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def leading(terms: Terms, store: Store, drained: Callable[[], Awaitable[None]]) -> AsyncIterator[Leading]:
    """
    All of a leader, from entry to exit; the store is its own from now on, and closed at the end.

    Leaving answers every held request at once, waits for the others by `drained`, ends the tasks and hands the lease
    over; it takes less than four seconds, whether the database answers or not.
    """
    try:
        parts = build(terms, store)
        tasks = parts.tasks
        try:
            lately = await parts.engine.gates(limit=MOST_GATES_READ)
            parts.accusations.load(lately)
            if parts.drain is not None:
                days = terms.actuator.gate_seconds / 86400.0
                events = await parts.engine.history(None, limit=MOST_RELEASES_READ, days=days, kind=RELEASED)
                parts.drain.load(lately, {event.subject: event.at for event in reversed(events)})
            tasks.supervise("engine", parts.engine.run, OnEnd.FATAL)
            tasks.supervise("leadership", store.lead, OnEnd.FATAL)
            tasks.supervise("ends of jobs", parts.postmortems.run)
            tasks.supervise("stragglers", parts.stragglers.run)
            tasks.supervise("comparison of nodes", parts.fleet.peers.run)
            settle = terms.policy.tuning.settle_seconds
            news = parts.stragglers.peers.news
            compared = PeerEvents(parts.fleet.peers, news, store, settle_seconds=settle, clock=time.time)
            tasks.supervise("history of the comparison", compared.run)
            tasks.supervise("count of jobs without a gate", parts.ungated.run)
            if parts.drain is not None:
                tasks.supervise("actuator", parts.drain.run)
            if parts.screening is not None:
                tasks.supervise("screening", parts.screening.run)
            for name, sink in job_events(terms.settings, source=store.store_id):
                parts.postmortems.on_final.append(functools.partial(_tell, sink))
                tasks.supervise(name, sink.run)
            endpoint = SyncEndpoint(
                make_app(parts),
                fleet=parts.fleet,
                guard=terms.guard,
                settings=terms.settings,
                on_state=parts.ungated.see,
                leads=store.leads,
            )
            try:
                yield Leading(
                    app=endpoint,
                    parts=parts,
                    tasks=tasks,
                    let_go=parts.fleet.wake_all,
                )
            finally:
                tasks.start("end of the store", store.give_up_when_stuck())
                await _release(parts)
                await drained()
        finally:
            await tasks.stop(terms.settings.stop_seconds / 3)
    finally:
        store.close()


def build(terms: Terms, store: Store) -> Parts:
    """What the handlers of a leader work with, made from what the database has. Nothing runs yet."""
    policy, settings = terms.policy, terms.settings
    loaded = store.load()
    clock = steady_clock(loaded.gates)
    fleet = Fleet(
        issuer=store.store_id,
        enrol=lambda node, key: store.enrol(node, key, now=clock()),
        silent_seconds=policy.silent_seconds,
        max_nodes=settings.max_nodes,
        hold_max_seconds=min(settings.hold_max_seconds, longest_hold(policy.silent_seconds)),
        clock=clock,
        first_seq=store.term * ANSWERS_EACH_START,
        keep_duplicate=lambda node, duplicate: store.write([PutDuplicate(node=node, duplicate=duplicate)]),
        replace_key=lambda node, key, who: engine.rekey(node, who, key),
    )
    for row in loaded.nodes:
        fleet.load(row.node, key_hash=row.key_hash, pool=row.labels.get("pool"), duplicate=row.duplicate)
    tasks = Tasks(within=terms.tasks)
    proof = Tier.SOAK if terms.screening.tier == "soak" else Tier.DEEP
    engine = Engine(store=store, registry=fleet, policy=policy, clock=clock, proof=proof)
    metrics = FleetMetrics(fleet, engine, store, task_errors=tasks.errors, now=clock)
    metrics.add(LeadershipCollector(store.leads, lambda: store.term))
    metrics.add(tasks_metric())
    metrics.add(LOOP_LAG)
    accusations = Accusations(keep_seconds=ACCUSED_WINDOW_SECONDS, clock=clock)
    fleet.accused = accusations.warning
    accusations.on_change.append(fleet.accusation_changed)
    drain = make_drain_controller(terms.actuator, engine, fleet)
    metrics.add(ActuatorCollector(drain))
    engine.on_ready.append(metrics.gate_ready)
    engine.on_repaired.append(metrics.repair_closed)
    engine.on_decided += [metrics.gate_decided, accusations.gate_decided]
    if drain is not None:
        engine.on_decided.append(drain.gate_decided)
        engine.on_quarantined.append(drain.quarantines_changed)
        engine.removed = drain.removed
    postmortems = Postmortems(engine, store, on_outcome=metrics.job_ended, orders=not settings.preflight)
    engine.on_decided.append(postmortems.gate_decided)

    async def gated(job: str) -> bool:
        return bool(await engine.gates(limit=1, job=job))

    ungated = UngatedJobs(gated, clock=clock)
    metrics.read("healthd_jobs_ungated", UNGATED, lambda: ungated.figure.jobs, family=CounterMetricFamily)
    screening = None
    if terms.screening.on and not settings.preflight:
        screening = Screening(engine, fleet, store, policy, terms.screening)
        metrics.add(ScreeningCollector(screening))
    return Parts(
        settings=settings,
        fleet=fleet,
        engine=engine,
        guard=terms.guard,
        metrics=metrics,
        handshakes=Handshakes(settings.handshake_seconds),
        stragglers=Stragglers(fleet),
        ungated=ungated,
        accusations=accusations,
        postmortems=postmortems,
        drain=drain,
        screening=screening,
        callers_may=terms.callers_may,
        tasks=tasks,
    )


async def _release(parts: Parts) -> None:
    """Answer everybody who is held; gates stay open on disk."""
    parts.stopping.set()
    parts.fleet.release_all()
    parts.engine.stop()
    if parts.drain is not None:
        parts.drain.stop()
    await parts.handshakes.stop()
    await parts.postmortems.stop()


def _tell(sink: JobEvents, record: Postmortem) -> None:
    sink.job_died(record, time.time())
