"""
The aggregator as a process: HTTP for its whole life, and leading or standing by behind it; see `course`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection

from healthd.aggregator.auth import Guard, Platform, Platforms
from healthd.aggregator.course import Course
from healthd.aggregator.drain import ActuatorSettings
from healthd.aggregator.front import Front, trust_of
from healthd.aggregator.instance_identity import InstanceIdentities
from healthd.aggregator.leading import Terms, leading
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.service_accounts import TokenReviews
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import DEFAULT_SHARD, Leadership, NotVacantError, Store, Watch, is_shared
from healthd.core.errors import HealthdError
from healthd.core.file_trust import check_file
from healthd.core.http.server import Limits, ListenError, Server, address_of, bind, closing_on_error
from healthd.core.model import GateTerm
from healthd.core.platforms.kubernetes import api_server
from healthd.core.tasks import LogOnce, OnEnd, Tasks
from healthd.core.threads import use_daemon_threads

log = logging.getLogger(__name__)

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
    on: its engine failed, or another aggregator has taken a database over that nobody shares (FencedError).

    Leaving answers every held request at once and takes less than five seconds, whether the database answers or not.
    """
    limits = _limits(settings)
    for file, what in ((settings.tls_cert, "certificate"), (settings.tls_key, "private key")):
        if file is not None:
            check_file(file, what)
    sock = bind(settings.listen, backlog=BACKLOG)
    with closing_on_error(sock):
        guard = Guard(settings.token_file, platform=_platform(settings))
        _make_state_dir(settings)
        address = address_of(sock)
        url, own_url, shard = settings.database_url, settings.own_url(address), DEFAULT_SHARD
        shared = is_shared(url)
        trust = trust_of(settings) if shared else None
        front = Front(guard=guard, settings=settings, shard=shard, own_url=own_url, trust=trust)
        drain_seconds = settings.stop_seconds / 2
        tasks = Tasks()
        terms = Terms(
            settings=settings,
            policy=policy,
            guard=guard,
            actuator=actuator or ActuatorSettings(),
            callers_may=frozenset(callers_may),
            tasks=tasks,
        )
        server = Server(front, [sock], limits=limits, tls_cert=settings.tls_cert, tls_key=settings.tls_key)
        watch = Watch(url, shard) if shared else None
        take = functools.partial(_take, url, shard, own_url)
        # Opening migrates and checks the database; nobody is served yet, so it may take the loop.
        row, store = (None, Store.open(url)) if watch is None else _first_look(watch, url, own_url, take)
        course = Course(
            front=front,
            watch=watch,
            take=functools.partial(asyncio.to_thread, take),
            leading=lambda store: leading(terms, store, functools.partial(front.drained, drain_seconds)),
            shard=shard,
        )
        if row is not None:
            course.note(row)
        try:
            tasks.supervise("course of leadership", functools.partial(course.run, store), OnEnd.FATAL)
            await tasks.first(course.settled.wait())
            tasks.supervise("garbage collection", _collect_now_and_then)
            if shared:
                tasks.supervise("way to the leader", front.probe)
            await server.start()
            try:
                if settings.tls_cert is not None:
                    tasks.supervise("certificate", lambda: _renew_certificate(server))
                yield address, tasks
            finally:
                await course.stop(settings.stop_seconds + 1.0)
                await server.stop(settings.stop_seconds / 10)
        finally:
            await course.stop(settings.stop_seconds + 1.0)
            await tasks.stop(settings.stop_seconds / 3)
            await front.close()
            if store is not None:
                store.close()
            if watch is not None:
                watch.close()


def _take(url: str, shard: str, own_url: str, seen: Leadership) -> Store:
    return Store.open(url, shard=shard, advertised=own_url, seen=seen)


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


def _first_look(
    watch: Watch, url: str, own_url: str, take: Callable[[Leadership], Store]
) -> tuple[Leadership, Store | None]:
    """
    Who leads; and the store, None where somebody does. Blocks.

    Who seems to lead at our own address was this aggregator before it was killed: nobody else can listen there.
    """
    Store.prepare(url)
    row, over = watch.look()
    if not over and row.url != own_url:
        return row, None
    try:
        return row, take(row)
    except NotVacantError:
        return row, None


def _platform(settings: AggregatorSettings) -> Platforms | None:
    """Who says whose the tokens are that no file has; None where nobody does."""
    found: list[Platform] = []
    if settings.kubernetes.on:
        wanted = settings.kubernetes
        found.append(TokenReviews(wanted, api_server(os.environ, wanted.service_account, wanted.api_server)))
    if settings.aws.on:
        found.append(InstanceIdentities(settings.aws))
    return Platforms(found) if found else None


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
