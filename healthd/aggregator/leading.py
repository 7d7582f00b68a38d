"""What an aggregator has while it leads: made from its database at a takeover, gone when it leads no more."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily

from healthd.aggregator.api import ASGIApp, Parts, SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.drain.controller import RELEASED, ActuatorCollector, make_drain_controller
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.engine import Engine, Handshakes, steady_clock
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.stragglers import PeerEvents, Stragglers
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.jobs.postmortems import Postmortems
from healthd.aggregator.jobs.ungated import UNGATED, UngatedJobs
from healthd.aggregator.metrics import FleetMetrics, LeadershipCollector, tasks_metric
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine import MOST_GATES_READ, Accusations
from healthd.aggregator.quarantine.records import ACCUSED_WINDOW_SECONDS
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import PutDuplicate, Store
from healthd.aggregator.webhook import Webhook
from healthd.core.model import GateTerm
from healthd.core.tasks import OnEnd, Tasks

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True)
class Leading:
    """
    The application of a leader with its syncs, what its handlers work with, and its tasks, whose `failure` tells when
    it cannot go on. `let_go` answers the nodes that wait.
    """

    app: ASGIApp
    parts: Parts
    tasks: Tasks
    let_go: Callable[[], None]


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
            compared = PeerEvents(parts.fleet, store, settle_seconds=settle, clock=time.time)
            tasks.supervise("history of the comparison", compared.run)
            tasks.supervise("count of jobs without a gate", parts.ungated.run)
            if parts.drain is not None:
                tasks.supervise("actuator", parts.drain.run)
            if (url := terms.settings.webhook_url) is not None:
                webhook = Webhook(url, terms.settings.webhook_token_file, source=store.store_id)
                parts.postmortems.on_final.append(lambda record: webhook.job_died(record, time.time()))
                tasks.supervise("webhook", webhook.run)
            endpoint = SyncEndpoint(
                make_app(parts),
                fleet=parts.fleet,
                guard=terms.guard,
                settings=terms.settings,
                on_state=parts.ungated.see,
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
        clock=clock,
        first_seq=store.term * ANSWERS_EACH_START,
        keep_duplicate=lambda node, duplicate: store.write([PutDuplicate(node=node, duplicate=duplicate)]),
        replace_key=lambda node, key, who: engine.rekey(node, who, key),
    )
    for row in loaded.nodes:
        fleet.load(row.node, key_hash=row.key_hash, pool=row.labels.get("pool"), duplicate=row.duplicate)
    tasks = Tasks(within=terms.tasks)
    engine = Engine(store=store, registry=fleet, policy=policy, clock=clock)
    metrics = FleetMetrics(
        fleet,
        holding=lambda: len(engine.open_gates()),
        overrides=lambda: len(engine.overrides()),
        breakers=lambda: len(engine.breakers()),
        words=engine.rule_words,
        waits=engine.waits,
        recovering=lambda: engine.recovering() is not None,
        store=lambda: (store.failures, store.failing),
        errors=engine.internal_errors,
        task_errors=tasks.errors,
        now=clock,
    )
    metrics.add(LeadershipCollector(store.leads, lambda: store.term))
    metrics.add(tasks_metric())
    accusations = Accusations(keep_seconds=ACCUSED_WINDOW_SECONDS, clock=clock)
    fleet.accused = accusations.warning
    accusations.on_change.append(fleet.accusation_changed)
    drain = make_drain_controller(terms.actuator, engine, fleet)
    metrics.add(ActuatorCollector(drain))
    engine.on_ready.append(metrics.gate_ready)
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
    return Parts(
        settings=settings,
        fleet=fleet,
        engine=engine,
        guard=terms.guard,
        metrics=metrics,
        handshakes=Handshakes(settings.handshake_seconds),
        stragglers=Stragglers(fleet, store),
        ungated=ungated,
        accusations=accusations,
        postmortems=postmortems,
        drain=drain,
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
