"""
The daemon of one node, put together: what it needs is checked before anything starts, and it stops in under 5 seconds.
"""

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

from checks.collective.nccom.plan import lnc_of
from checks.host.machine import Host
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.http import server as web
from healthd.core.platforms.kubernetes import api_server
from healthd.core.tasks import Tasks, wait_for
from healthd.core.threads import use_daemon_threads
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock, system_clock
from healthd.node.condition import ConditionWriter
from healthd.node.http.control_socket import ControlApi, check_faults
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.interfaces import check_interface, peer_address
from healthd.node.nccom.round import RoundSettings
from healthd.node.occupancy import Schedulers
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.leases import Ledger
from healthd.node.orders.orders import Orders
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.node.state.approved_baselines import KeptLimits
from healthd.node.state.saved_evidence import KeptEvidence
from healthd.node.state.store import NodeBook
from healthd.node.sync import Line
from healthd.runner import Runner, RunnerSettings
from healthd.runner.device_lock import write_leased

log = logging.getLogger(__name__)

CONNECTIONS = 256


async def run_node(settings: NodeSettings, runner_settings: RunnerSettings) -> None:
    """
    Run until SIGTERM or SIGINT. HealthdError in one line when it cannot start.

    Call it in the main thread: workers die with the thread that started them.
    """
    # A preflight's own daemon has a run_dir of its own, and heeds the leases of the one whose devices it shares.
    shared = settings.run_dir.absolute() != (runner_settings.run_dir or settings.run_dir).absolute()
    runner = Runner(dataclasses.replace(runner_settings, heed_leases=shared))
    specs = enabled_checks(await runner.catalogue(), settings)
    try:
        faults = check_faults(settings.faults, specs)
    except BadInputError as error:
        raise ConfigError(f"node.faults: {error}") from None
    check_interface(settings.interface)
    files.prepare(settings.state_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(settings.state_dir))
        door = stack.enter_context(contextlib.closing(web.bind(settings.listen)))
        hatch = stack.enter_context(_hatch(settings.control_socket))
        clock = system_clock()
        book = NodeBook(
            settings,
            specs,
            clock=clock,
            boot_id=files.boot_id(settings.host_root),
            compile_seconds=runner_settings.compile_allowance_seconds,
        )
        book.set_faults(faults)
        book.address = settings.address or _reached_at(door)
        book.set_peer_address(peer_address(settings.interface, None))
        book.restore(settings.state_dir / "state.json")
        if settings.active.unprompted is not None:
            log.info("active checks run unprompted by the rule %r: as set", settings.active.unprompted.value)
        await _serve(settings, runner, book, clock, door, hatch)


def _lnc(runner: Runner) -> int | None:
    """The logical core configuration of the Neuron devices, as they were seen last; None where there are none."""
    inventory = runner.latest.raw.get("inventory") if runner.latest is not None else None
    return lnc_of(inventory) if isinstance(inventory, Mapping) else None


async def _serve(
    settings: NodeSettings, runner: Runner, book: NodeBook, clock: Clock, door: socket.socket, hatch: socket.socket
) -> None:
    """From the first task to the last."""
    loop = asyncio.get_running_loop()
    use_daemon_threads()
    tasks = Tasks()
    stopping: asyncio.Future[None] = loop.create_future()
    LeasedFile(book, settings.run_dir)
    schedulers = Schedulers(settings.allocations, settings.host_root, clock=clock)
    scheduler = Scheduler(book, runner, settings, clock=clock, tasks=tasks, schedulers=schedulers)
    rounds = RoundSettings(
        node=settings.name,
        host=Host(settings.host_root),
        limits=runner.settings.limits,
        carried=settings.nccom_carried,
        lnc=lambda: _lnc(runner),
    )
    ledger = Ledger(settings.state_dir / "orders.json", clock=clock, boot_id=book.boot_id)
    collectives = Collectives(
        book, scheduler, runner.session, interface=settings.interface, clock=clock, tasks=tasks, rounds=rounds
    )
    orders = Orders(book, scheduler, ledger, settings, clock=clock, tasks=tasks, collectives=collectives)
    saver = Saver(book, settings, KeptEvidence(settings.state_dir / "evidence.json", runner, book.boot_id))
    learned = KeptLimits(settings.state_dir / "baseline.json", runner)
    lines = _line(settings, book, orders, clock, learned, tasks)
    condition = _condition(settings, book, clock)
    limits = web.Limits(connections=CONNECTIONS, stop_seconds=settings.stop_seconds / 2)
    control = ControlApi(book, scheduler, stopping)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stopping)
    try:
        async with (
            web.Server(NodeApi(book, tasks.errors), [door], limits=limits),
            web.Server(control.app, [hatch], limits=limits, owner_only=True),
        ):
            log.info("node %s answers on http://%s", settings.name, web.address_of(door))
            tasks.supervise("passive checks", scheduler.run_passive)
            tasks.supervise("active checks", scheduler.run_active)
            tasks.supervise("watch over orders and leases", orders.watch)
            tasks.supervise("saving of the state", saver.run)
            for line in lines:
                tasks.supervise("held sync", line.run_held)
                tasks.supervise("urgent sync", line.run_urgent)
            for writer in condition:
                tasks.supervise("node condition", writer.run)
            try:
                await stopping
            finally:  # a preflight cancels it
                _resolve(stopping)  # wakes requests that are held back
                await tasks.stop(settings.stop_seconds / 2)
            saver.save()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    log.info("node %s has stopped", settings.name)


def _line(
    settings: NodeSettings, book: NodeBook, orders: Orders, clock: Clock, learned: KeptLimits, tasks: Tasks
) -> list[Line]:
    """The line to the aggregator; none where no aggregator is named."""
    if not settings.sync.aggregators:
        return []
    line = Line(
        book,
        orders,
        settings.sync,
        key=files.node_key(settings.state_dir),
        clock=clock,
        learned=learned,
        on_error=lambda error: tasks.count_error("held sync", error),
    )
    book.listen(line.changed)
    orders.changed = line.changed
    return [line]


def _condition(settings: NodeSettings, book: NodeBook, clock: Clock) -> list[ConditionWriter]:
    """The writer of the condition in Kubernetes; none where none is asked for."""
    wanted = settings.kubernetes
    if not wanted.on:
        return []
    try:
        server = api_server(os.environ, wanted.service_account, wanted.api_server)
    except ConfigError as error:
        raise ConfigError(f"node.kubernetes: {error}") from None
    if wanted.accelerated_hardware_ready:
        log.warning("AcceleratedHardwareReady is written: where node repair is on, a hardware fault ends this instance")
    return [ConditionWriter(book, wanted, server, clock=clock)]


class Saver:
    """Writes the state after active runs at once, and after passive ones now and then."""

    def __init__(self, book: NodeBook, settings: NodeSettings, evidence: KeptEvidence) -> None:
        self._path = settings.state_dir / "state.json"
        self._book = book
        self._evidence = evidence
        self._every_seconds = settings.save_seconds
        self._dirty = asyncio.Event()
        self._at_once = asyncio.Event()
        self._was_running = False
        self._quarantine = book.quarantine
        book.listen(self._changed)

    def _changed(self) -> None:
        self._dirty.set()
        running = self._book.running is not None
        if (self._was_running and not running) or self._quarantine != self._book.quarantine:
            self._at_once.set()
        self._was_running, self._quarantine = running, self._book.quarantine

    async def run(self) -> None:
        """The eternal loop."""
        while True:
            await self._dirty.wait()
            await wait_for(self._at_once, self._every_seconds)
            self._dirty.clear()
            self.save()

    def save(self) -> None:
        """Write what is to survive, now."""
        self._book.save(self._path)
        self._evidence.save()


class LeasedFile:
    """Keeps the file by which other healthd processes of this host see that a job has the node."""

    def __init__(self, book: NodeBook, run_dir: Path) -> None:
        self._book = book
        self._run_dir = run_dir
        self._written: tuple[str, ...] | None = None
        self._failed = False
        book.listen(self._changed)

    def _changed(self) -> None:
        jobs = tuple(f"job {lease.job} (gate {lease.gate})" for lease in self._book.leases)
        if jobs == self._written:
            return
        try:
            write_leased(self._run_dir, self._book.boot_id, jobs)
        except OSError as error:
            if not self._failed:
                log.error("%s: cannot say there who has the node: %s", self._run_dir, error.strerror or error)
            self._failed = True  # and it is tried again at the next news
        else:
            self._written, self._failed = jobs, False


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
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
                f"{state_dir}: another node daemon uses it; stop that one or name another --state-dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _hatch(path: Path) -> Iterator[socket.socket]:
    """The control socket, removed when the daemon ends."""
    sock = web.bind_unix(path)
    try:
        yield sock
    finally:
        sock.close()
        path.unlink(missing_ok=True)


def _reached_at(door: socket.socket) -> str:
    """HOST:PORT by which others may reach the port."""
    address = web.address_of(door)
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address  # noqa: S104


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
