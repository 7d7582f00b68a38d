"""
The aggregator as a process: store, registry, engine, HTTP; started in this order, stopped in the reverse one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection

from prometheus_client.core import CounterMetricFamily

from healthd.aggregator.api import Parts, SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.auth import Guard
from healthd.aggregator.controller import Engine, Handshakes, steady_clock
from healthd.aggregator.drain import ActuatorCollector, ActuatorSettings, make_drain_controller
from healthd.aggregator.inventory import MOST_GATES_READ, UNGATED, Accusations, Fleet, UngatedJobs
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantines import ACCUSED_WINDOW_SECONDS
from healthd.aggregator.service_accounts import TokenReviews
from healthd.aggregator.settings import AggregatorSettings, KubernetesCallers
from healthd.aggregator.store import PutDuplicate, Store
from healthd.aggregator.stragglers import PeerEvents, Stragglers
from healthd.core.errors import HealthdError
from healthd.core.file_trust import check_file
from healthd.core.http.server import Limits, ListenError, Server, address_of, bind, closing_on_error
from healthd.core.model import GateTerm
from healthd.core.platforms.kubernetes import api_server
from healthd.core.tasks import LogOnce, OnEnd, Tasks
from healthd.core.threads import use_daemon_threads

log = logging.getLogger(__name__)

# Each opening of the database counts its answers from another multiple of this, so that the count never goes back.
ANSWERS_EACH_START = 1 << 32
# A full collection walks over all that ten thousand held connections consist of and stops everything for a second.
# Syncs leave no cycles behind, so it is done now and then instead of whenever the number of objects has grown.
COLLECTOR_THRESHOLDS = (5_000, 5, 1_000_000_000)
COLLECT_SECONDS = 600.0
# Until a certificate that was renewed is served; the kubelet takes a minute to mount it.
CERTIFICATE_SECONDS = 10.0
# The store's thread may wait so long for the loop's at each step of a transaction: Python's 5 ms add up.
SWITCH_SECONDS = 0.0005
# Connections that are no node's: hooks that wait, Prometheus, people.
OTHER_CONNECTIONS = 2000
# Connections that have not asked yet: a fleet that finds its aggregator again shakes hands all at once.
PENDING_CONNECTIONS = 1024
# Files that are no connection: the database, its journal, Python's own.
OTHER_FILES = 100
# Of tasks that were cancelled: they wait for nothing that does not end then.
STOPPING = (signal.SIGTERM, signal.SIGINT)
# A fleet that finds its aggregator again connects all at once.
BACKLOG = 4096


async def run_aggregator(
    settings: AggregatorSettings,
    policy: Policy,
    *,
    actuator: ActuatorSettings | None = None,
    callers_may: Collection[GateTerm] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """
    Serve until SIGTERM or SIGINT.

    `callers_may`: the terms in which tokens of scope `gate` may ask for less than the policy does.

    `on_ready` is told the address that is really listened on. HealthdError, in one line, when it cannot start: port in
    use, state directory not writable, database damaged, token file or certificate that cannot be used. Also when it
    cannot go on: a fatal task has ended.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    use_daemon_threads()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    for number in STOPPING:
        signal.signal(number, _end_at_once)
    try:
        async with aggregator(settings, policy, actuator, callers_may) as (address, tasks):
            for number in STOPPING:
                loop.add_signal_handler(number, stop.set)
            log.info("aggregator listens on %s", address)
            if on_ready is not None:
                on_ready(address)
            await tasks.first(stop.wait())
    finally:
        for number in STOPPING:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end_at_once(_number: int, _frame: object) -> None:
    """A signal before anybody is served: nothing is there to be ended, and the database may hang."""
    raise SystemExit(0)


@contextlib.asynccontextmanager
async def aggregator(
    settings: AggregatorSettings,
    policy: Policy,
    actuator: ActuatorSettings | None = None,
    callers_may: Collection[GateTerm] = (),
) -> AsyncIterator[tuple[str, Tasks]]:
    """
    A whole aggregator, from entry to exit; gives its address and its tasks, whose `failure` tells when it cannot go
    on: its engine failed, or another aggregator has taken the database over (FencedError).

    Leaving answers every held request at once and takes less than five seconds, whether the database answers or not.
    """
    limits = _limits(settings)
    for file, what in ((settings.tls_cert, "certificate"), (settings.tls_key, "private key")):
        if file is not None:
            check_file(file, what)
    sock = bind(settings.listen, backlog=BACKLOG)
    with closing_on_error(sock):
        guard = Guard(settings.token_file, platform=_platform(settings.kubernetes))
        _make_state_dir(settings)
        # Opening migrates and checks the file; nobody is served yet, so it may take the loop.
        store = Store.open(settings.database_url)
        try:
            parts = _build(settings, policy, guard, store, actuator or ActuatorSettings(), frozenset(callers_may))
            tasks = parts.tasks
            lately = await parts.engine.gates(limit=MOST_GATES_READ)
            parts.accusations.load(lately)
            if parts.drain is not None:
                for gate in reversed(lately):
                    parts.drain.gate_decided(gate)
            tasks.supervise("engine", parts.engine.run, OnEnd.FATAL)
            tasks.supervise("leadership", store.lead, OnEnd.FATAL)
            tasks.supervise("stragglers", parts.stragglers.run)
            tasks.supervise("comparison of nodes", parts.fleet.peers.run)
            events = PeerEvents(parts.fleet, store, settle_seconds=policy.tuning.settle_seconds, clock=time.time)
            tasks.supervise("history of the comparison", events.run)
            tasks.supervise("count of jobs without a gate", parts.ungated.run)
            tasks.supervise("garbage collection", _collect_now_and_then)
            if parts.drain is not None:
                tasks.supervise("actuator", parts.drain.run)
            endpoint = SyncEndpoint(
                make_app(parts), fleet=parts.fleet, guard=guard, settings=settings, on_state=parts.ungated.see
            )
            server = Server(
                endpoint,
                [sock],
                limits=limits,
                tls_cert=settings.tls_cert,
                tls_key=settings.tls_key,
            )
            try:
                async with server:
                    if settings.tls_cert is not None:
                        tasks.supervise("certificate", lambda: _renew_certificate(server))
                    try:
                        yield address_of(sock), tasks
                    finally:
                        tasks.start("end of the store", store.give_up_when_stuck())
                        await _release(parts)
            finally:
                await tasks.stop(settings.stop_seconds / 3)
        finally:
            store.close()


async def _renew_certificate(server: Server) -> None:
    """Take over a certificate that was renewed, as cert-manager does it, for ever."""
    trouble = LogOnce(log)
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            if server.renew_certificate():
                log.info("the certificate was renewed")
            trouble.clear()
        except ListenError as error:
            trouble.say(f"{error}. The certificate from before is served")


def _build(
    settings: AggregatorSettings,
    policy: Policy,
    guard: Guard,
    store: Store,
    actuator: ActuatorSettings,
    callers_may: frozenset[GateTerm],
) -> Parts:
    clock = steady_clock()
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
    for row in store.load().nodes:
        fleet.load(row.node, key_hash=row.key_hash, pool=row.labels.get("pool"), duplicate=row.duplicate)
    tasks = Tasks()
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
    accusations = Accusations(keep_seconds=ACCUSED_WINDOW_SECONDS, clock=clock)
    drain = make_drain_controller(actuator, engine, fleet)
    metrics.add(ActuatorCollector(drain))
    engine.on_ready.append(metrics.gate_ready)
    engine.on_decided += [metrics.gate_decided, accusations.gate_decided]
    if drain is not None:
        engine.on_decided.append(drain.gate_decided)
        engine.on_quarantined.append(drain.quarantines_changed)

    async def gated(job: str) -> bool:
        return bool(await engine.gates(limit=1, job=job))

    ungated = UngatedJobs(gated, clock=clock)
    metrics.read("healthd_jobs_ungated", UNGATED, lambda: ungated.figure.jobs, family=CounterMetricFamily)
    return Parts(
        settings=settings,
        fleet=fleet,
        engine=engine,
        guard=guard,
        metrics=metrics,
        handshakes=Handshakes(settings.handshake_seconds),
        stragglers=Stragglers(fleet, store),
        ungated=ungated,
        accusations=accusations,
        drain=drain,
        callers_may=callers_may,
        tasks=tasks,
    )


def _platform(settings: KubernetesCallers) -> TokenReviews | None:
    if not settings.on:
        return None
    server = api_server(os.environ, settings.service_account, settings.api_server)
    return TokenReviews(settings, server)


async def _release(parts: Parts) -> None:
    """Answer everybody who is held; gates stay open on disk."""
    parts.stopping.set()
    parts.fleet.release_all()
    parts.engine.stop()
    if parts.drain is not None:
        parts.drain.stop()
    await parts.handshakes.stop()


async def _collect_now_and_then() -> None:
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        gc.collect()


def _make_state_dir(settings: AggregatorSettings) -> None:
    if settings.database is not None:
        return
    try:
        settings.state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise HealthdError(
            f"state directory {settings.state_dir}: {error.strerror}; make it writable or choose one with --state-dir"
        ) from None


def _limits(settings: AggregatorSettings) -> Limits:
    """
    What clients may take.

    Every node holds a connection open, and the usual soft limit of open files is 1024: this takes what the hard limit
    gives. Where that is too little, a fifth of the connections is for those that have not asked yet.
    """
    connections = settings.max_nodes + OTHER_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + PENDING_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    pending = PENDING_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning("%d open files are allowed, %d may be needed; raise LimitNOFILE or ulimit -n", soft, wanted)
        room = max(2, soft - OTHER_FILES)
        pending = min(PENDING_CONNECTIONS, max(1, room // 5))
        connections = room - pending
    return Limits(connections=connections, pending=pending, stop_seconds=settings.stop_seconds * 2 / 3)
