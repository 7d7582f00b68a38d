"""
The aggregator as a process: HTTP for its whole life, and leading or standing by behind it; see `leadership`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection

from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.forwarding import Front, trust_of
from healthd.aggregator.identity.tokens import Guard, Platform, Platforms
from healthd.aggregator.leadership import Course, Terms, leading
from healthd.aggregator.metrics import observe_lag
from healthd.aggregator.policy import Policy
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import Leadership, Store, Watch, is_shared
from healthd.core.config import record_at
from healthd.core.errors import HealthdError
from healthd.core.file_trust import check_file
from healthd.core.http.server import Limits, ListenError, Server, address_of, bind, closing_on_error
from healthd.core.model import GateTerm
from healthd.core.tasks import LogOnce, OnEnd, Tasks
from healthd.core.threads import use_daemon_threads
from healthd.integrations import INTEGRATIONS

log = logging.getLogger(__name__)

# A full collection walks over all that ten thousand held connections consist of and stops everything for a second, so
# each one is of what is new since the one before, which is then left alone (`gc.freeze`). Syncs and gates leave no
# cycles behind: of 250,000 objects that were left alone none was garbage after 20,000 syncs and fifteen gates.
# Python's own collection of young objects is left for floods of them: it would come in the middle of a gate's pass.
COLLECTOR_THRESHOLDS = (100_000, 5, 1_000_000_000)
STOP_SECONDS, LEAST_STOP_SECONDS, MOST_STOP_SECONDS = 0.02, 1.0, 60.0
"""So long such a collection should stop everything, and so long at least and at most is between two."""
WHOLE_SECONDS = 6 * 3600.0
"""How often all is collected, though it stops everything: what else may leave cycles (errors, lost connections)."""
# What a held request consists of dies before it is old, and then the number of objects does not grow: Python would come
# to it after minutes, with so many at once that everything stops for a tenth of a second.
YOUNG_SECONDS, LEAST_YOUNG_SECONDS, MOST_YOUNG_SECONDS = 0.004, 0.05, 1.0
"""So long a collection of young objects should take, and so long at least and at most is between two."""
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
    screening: ScreeningSettings | None = None,
    callers_may: Collection[GateTerm] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """
    Serve until SIGTERM or SIGINT.

    `callers_may`: the terms in which tokens of scope `gate` may ask for less than the policy does.

    `on_ready` is told the address that is really listened on. HealthdError, in one line, when it cannot start: port in
    use, state directory not writable, database damaged, token table or certificate that cannot be used. Also when it
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
        async with aggregator(settings, policy, actuator, callers_may, screening) as (address, tasks):
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
    screening: ScreeningSettings | None = None,
) -> AsyncIterator[tuple[str, Tasks]]:
    """
    A whole aggregator, from entry to exit; gives its address and its tasks, whose `failure` tells when it cannot go
    on: its engine failed, or another aggregator has taken a database over that nobody shares (FencedError).

    Leaving answers every held request at once and takes less than five seconds, whether the database answers or not.
    """
    limits = _limits(settings)
    for file, what in ((settings.tls_cert, "certificate"), (settings.tls_key, "private key")):
        if file is not None:
            check_file(file, what)
    sock = bind(settings.listen, backlog=BACKLOG)
    with closing_on_error(sock):
        guard = Guard(settings.token_table, platform=_platform(settings))
        _make_state_dir(settings)
        address = address_of(sock)
        own_url = settings.own_url(address)
        tasks = Tasks()
        terms = Terms(
            settings=settings,
            policy=policy.with_hold(settings.hold_max_seconds),
            guard=guard,
            actuator=actuator or ActuatorSettings(),
            callers_may=frozenset(callers_may),
            tasks=tasks,
            screening=screening or ScreeningSettings(),
        )
        url = settings.database_url
        watch = Watch(url, own_url) if is_shared(url) else None
        front = Front(
            guard=guard, settings=settings, own_url=own_url, trust=None if watch is None else trust_of(settings)
        )
        course = _course(terms, front, own_url, shared=watch is not None)
        store: Store | None = None
        try:
            # Opening migrates and checks the database; nobody is served yet, so it may take the loop.
            if watch is None:
                store = Store.open(url)
            else:
                Store.prepare(url, own_url)
                row, over = watch.look()
                # Who seems to lead at our own address was this aggregator before it was killed.
                course.note(row, over=over or row.url == own_url)
                tasks.supervise("watch of the leadership", functools.partial(course.follow, watch), OnEnd.FATAL)
                tasks.supervise("way to the leader", front.probe)
            tasks.supervise("course of leadership", functools.partial(course.run, store), OnEnd.FATAL)
            await tasks.first(course.settled.wait())
            server = Server(
                front, [sock], limits=limits, tls_cert=settings.tls_cert, tls_key=settings.tls_key, direct=front
            )
            tasks.supervise("garbage collection", _collect_new)
            tasks.supervise("lag of the event loop", observe_lag)
            tasks.supervise("collection of young objects", _collect_young)
            await server.start()
            try:
                if settings.tls_cert is not None:
                    tasks.supervise("certificate", lambda: _renew_certificate(server))
                yield address, tasks
            finally:
                await _stop(course, watch, settings)
                await server.stop(settings.stop_seconds / 10)
        finally:
            await _stop(course, watch, settings)
            await tasks.stop(settings.stop_seconds / 3)
            await front.close()
            if store is not None:
                store.close()
            if watch is not None:
                watch.close()


def _course(terms: Terms, front: Front, own_url: str, *, shared: bool) -> Course:
    settings = terms.settings
    drained = functools.partial(front.drained, settings.stop_seconds / 2)

    def take(seen: Leadership) -> Store:
        return Store.open(settings.database_url, advertised=own_url, seen=seen)

    return Course(
        front=front,
        shared=shared,
        take=lambda seen: asyncio.to_thread(take, seen),
        leading=lambda store: leading(terms, store, drained),
    )


async def _stop(course: Course, watch: Watch | None, settings: AggregatorSettings) -> None:
    """Let go of the lead, and say in the database that this aggregator ends. Safe to repeat."""
    if watch is not None:
        with contextlib.suppress(HealthdError, TimeoutError):  # else it would hide why the process ends
            async with asyncio.timeout(settings.stop_seconds / 8):
                await asyncio.to_thread(watch.leave)
        watch.cut()  # it may hang with the server
    await course.stop(settings.stop_seconds + 1.0)


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
            trouble.say(f"{error}. The previous certificate stays in use")


def _platform(settings: AggregatorSettings) -> Platforms | None:
    """Who says whose the tokens are that no file has; None where nobody does."""
    found: list[Platform] = []
    for one in INTEGRATIONS:
        if one.identities is not None:
            provider: Callable[[AggregatorSettings], Platform | None] = record_at(one.identities)
            if (platform := provider(settings)) is not None:
                found.append(platform)
    return Platforms(found) if found else None


async def _collect_young() -> None:
    pause = MOST_YOUNG_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.perf_counter()
        gc.collect(1)
        took = max(time.perf_counter() - began, 1e-6)
        pause = min(max(pause * YOUNG_SECONDS / took, LEAST_YOUNG_SECONDS), MOST_YOUNG_SECONDS)


async def _collect_new() -> None:
    pause, whole_at = LEAST_STOP_SECONDS, time.monotonic() + WHOLE_SECONDS
    while True:
        await asyncio.sleep(pause)
        if time.monotonic() >= whole_at:
            gc.unfreeze()
            whole_at = time.monotonic() + WHOLE_SECONDS
        began = time.perf_counter()
        gc.collect()
        gc.freeze()
        took = max(time.perf_counter() - began, 1e-6)
        pause = min(max(pause * STOP_SECONDS / took, LEAST_STOP_SECONDS), MOST_STOP_SECONDS)


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
