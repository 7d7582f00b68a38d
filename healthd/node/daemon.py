"""Assembles and runs the daemon of one node: checks its settings before anything starts, and stops in under 5 s."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from checks.collective.nccom.run import lnc_of
from checks.host.machine import Host
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.http import server as web
from healthd.core.tasks import Tasks
from healthd.core.threads import use_daemon_threads
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.kernel_watch import CHECK, KernelWatch
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock, system_clock
from healthd.node.http.control_socket import ControlApi, check_faults
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.interfaces import check_interface, peer_address
from healthd.node.nccom import RoundSettings
from healthd.node.occupancy.occupancy import Schedulers
from healthd.node.occupancy.watching import workload_watch
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.leases import LeaseStore
from healthd.node.orders.orders import Orders
from healthd.node.services import (
    DaemonParts,
    StepSource,
    check_params,
    integrated,
    step_source,
    write_credential,
)
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.node.state.saving import ProfileFolder, SavedEvidence, StateFile, StateSaver
from healthd.node.state.store import NodeStore
from healthd.node.sync import SyncClient
from healthd.runner.device_claim import write_leases_file
from healthd.runner.runner import Runner
from healthd.runner.settings import RunnerSettings

log = logging.getLogger(__name__)

CONNECTIONS = 256
CONTROL_CONNECTIONS = 64  # root alone connects there
NUMBERS = (signal.SIGTERM, signal.SIGINT)


async def run_node(settings: NodeSettings, runner_settings: RunnerSettings, *, signals: bool = True) -> None:
    """
    Run until SIGTERM or SIGINT, or (`signals` false) until it is cancelled. HealthdError in one line when it cannot
    start.

    Call it in the main thread: workers die with the thread that started them.
    """
    # The daemon of a preflight has a run_dir of its own, and heeds the leases of the daemon whose devices it shares.
    shared = settings.run_dir.absolute() != (runner_settings.run_dir or settings.run_dir).absolute()
    params = {**check_params(settings), **runner_settings.params}
    runner = Runner(dataclasses.replace(runner_settings, heed_leases=shared, params=params))
    specs = enabled_checks(await runner.catalogue(), settings)
    try:
        faults = check_faults(settings.faults, specs)
    except BadInputError as error:
        raise ConfigError(f"node.faults: {error}") from None
    check_interface(settings.interface)
    unwritable = files.prepare(settings.state_dir)
    if settings.sync.instance_identity and settings.sync.aggregators:
        file = await asyncio.to_thread(write_credential, settings.run_dir, os.environ)
        own = dataclasses.replace(settings.sync, token_file=file, instance_identity=False)
        settings = dataclasses.replace(settings, sync=own)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock_state_dir(settings.state_dir))
        tcp_socket = stack.enter_context(contextlib.closing(web.bind(settings.listen)))
        control_socket = stack.enter_context(_control_socket(settings.control_socket))
        clock = system_clock()
        store = NodeStore(
            settings,
            specs,
            clock=clock,
            boot_id=files.boot_id(settings.host_root),
            compile_seconds=runner_settings.compile_allowance_seconds,
        )
        store.set_faults(faults)
        store.set_unwritable(unwritable)
        store.address = settings.address or _advertised_address(tcp_socket)
        store.set_peer_address(peer_address(settings.interface, None))
        StateFile(store, settings.state_dir / "state.json").restore()
        runner.seen.restore(store.seen_before)
        if settings.active.unprompted is not None:
            log.info("active checks run unprompted by the rule %r: as set", settings.active.unprompted.value)
        await _serve(settings, runner, store, clock, tcp_socket, control_socket, NUMBERS if signals else ())


def _lnc(runner: Runner) -> int | None:
    """The logical core configuration of the Neuron devices, by the last survey; None where there are none."""
    inventory = runner.latest.raw.get("inventory") if runner.latest is not None else None
    return lnc_of(inventory) if isinstance(inventory, Mapping) else None


async def _serve(
    settings: NodeSettings,
    runner: Runner,
    store: NodeStore,
    clock: Clock,
    tcp_socket: socket.socket,
    control_socket: socket.socket,
    signals: tuple[signal.Signals, ...],
) -> None:
    """Run all tasks until the daemon must stop."""
    loop = asyncio.get_running_loop()
    use_daemon_threads()
    tasks = Tasks()
    stopping: asyncio.Future[None] = loop.create_future()
    LeasesFile(store, settings.run_dir)
    runner.keep_host_server()
    if runner.settings.preload:
        Preload(store, runner)
    schedulers = Schedulers(settings.allocations, settings.host_root, clock=clock)
    scheduler = Scheduler(store, runner, settings, clock=clock, tasks=tasks, schedulers=schedulers)
    rounds = RoundSettings(
        node=settings.name,
        host=Host(settings.host_root),
        limits=runner.settings.limits,
        lnc=lambda: _lnc(runner),
    )
    leases = LeaseStore(settings.state_dir / "orders.json", clock=clock, boot_id=store.boot_id)
    collectives = Collectives(
        store, scheduler, runner.session, interface=settings.interface, clock=clock, tasks=tasks, rounds=rounds
    )
    pods = workload_watch(settings, tasks)
    kernel = _kernel_watch(runner, store, scheduler)
    orders = Orders(store, scheduler, leases, settings, clock=clock, tasks=tasks, collectives=collectives, pods=pods)
    evidence = SavedEvidence(settings.state_dir / "evidence.json", runner, store.boot_id)
    saver = StateSaver(store, settings, evidence.save)
    profiles = ProfileFolder(settings.state_dir / "profiles", settings.profiles)
    profiles.tidy()
    runner.on_profile = profiles.keep
    each = settings.stop_seconds / 3  # for the requests of each port, and for the tasks
    limits = web.Limits(connections=CONNECTIONS, stop_seconds=each)
    control_limits = web.Limits(connections=CONTROL_CONNECTIONS, pending=CONTROL_CONNECTIONS // 2, stop_seconds=each)
    control = ControlApi(store, scheduler, profiles, stopping)
    steps = step_source(settings, clock)
    sync_clients = _sync_clients(settings, store, orders, clock, steps, tasks)
    for number in signals:
        loop.add_signal_handler(number, _resolve, stopping)
    try:
        async with (
            web.Server(NodeApi(store, tasks.errors, steps), [tcp_socket], limits=limits),
            web.Server(control.app, [control_socket], limits=control_limits, owner_only=True),
            integrated(DaemonParts(settings=settings, store=store, clock=clock, tasks=tasks, stop_seconds=each)),
        ):
            log.info("node %s answers on http://%s", settings.name, web.address_of(tcp_socket))
            tasks.supervise("passive checks", scheduler.run_passive)
            tasks.supervise("active checks", scheduler.run_active)
            if kernel is not None:
                tasks.supervise("watch over the kernel log", kernel.run)
            tasks.supervise("watch over orders and leases", orders.watch)
            if pods is not None:
                tasks.supervise("watch over pods of leases", pods.run)
            tasks.supervise("saving of the state", saver.run)
            if steps is not None and steps.on:
                tasks.supervise("step reports of jobs", steps.run)
            for client in sync_clients:
                tasks.supervise("held sync", client.run_held)
                tasks.supervise("urgent sync", client.run_urgent)
            try:
                await stopping
            finally:  # a preflight cancels this task
                _resolve(stopping)  # ends requests that are held open
                await tasks.stop(each)
                await runner.close()
            saver.save()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    log.info("node %s has stopped", settings.name)


def _sync_clients(
    settings: NodeSettings,
    store: NodeStore,
    orders: Orders,
    clock: Clock,
    steps: StepSource | None,
    tasks: Tasks,
) -> list[SyncClient]:
    """The client of the aggregator; none where no aggregator is configured."""
    if not settings.sync.aggregators:
        return []
    client = SyncClient(
        store,
        orders,
        settings.sync,
        key=files.node_key(settings.state_dir),
        clock=clock,
        steps=steps,
        on_error=lambda error: tasks.count_error("held sync", error),
    )
    store.listen(client.notify)
    orders.on_change = client.notify
    return [client]


def _kernel_watch(runner: Runner, store: NodeStore, scheduler: Scheduler) -> KernelWatch | None:
    """The watch over the kernel log; None where the check is not enabled, or the log is data."""
    enabled = any(spec.name == CHECK for spec in store.specs)
    if not enabled or runner.settings.host_root is not None:
        return None
    params = runner.settings.params.get(CHECK, {})
    return KernelWatch("/dev/kmsg", params, lambda: scheduler.run_soon(CHECK))


class LeasesFile:
    """Writes the file by which other healthd processes of this host see that a job has the node."""

    def __init__(self, store: NodeStore, run_dir: Path) -> None:
        self._store = store
        self._run_dir = run_dir
        self._written: tuple[str, ...] | None = None
        self._failed = False
        store.listen(self._changed)

    def _changed(self) -> None:
        jobs = tuple(f"job {lease.job} (gate {lease.gate})" for lease in self._store.leases)
        if jobs == self._written:
            return
        try:
            write_leases_file(self._run_dir, self._store.boot_id, jobs)
        except OSError as error:
            if not self._failed:
                log.error("%s: leases cannot be recorded there: %s", self._run_dir, error.strerror or error)
            self._failed = True  # it is tried again at the next change
        else:
            self._written, self._failed = jobs, False


class Preload:
    """Keeps the process that forks the workers of devices while the node is free: a job has all of its memory."""

    def __init__(self, store: NodeStore, runner: Runner) -> None:
        self._store = store
        self._runner = runner
        self._free = False  # as long as nothing is known
        store.listen(self._changed)

    def _changed(self) -> None:
        free = not self._store.allocated
        if free is not self._free:
            self._free = free
            self._runner.preload(free)


@contextlib.contextmanager
def _lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Keep a second daemon out of the same state directory."""
    path = state_dir / "node.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise files.StateDirError(f"{path}: cannot be opened: {error.strerror}; name another --state-dir") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise files.StateDirError(
                f"{state_dir}: another node daemon uses it; stop that daemon or name another --state-dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _control_socket(path: Path) -> Iterator[socket.socket]:
    """The control socket, removed when the daemon ends."""
    sock = web.bind_unix(path)
    try:
        yield sock
    finally:
        sock.close()
        path.unlink(missing_ok=True)


def _advertised_address(tcp_socket: socket.socket) -> str:
    """HOST:PORT by which others reach the TCP port."""
    address = web.address_of(tcp_socket)
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address  # noqa: S104


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
