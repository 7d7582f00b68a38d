"""
`--forks N`: tests run side by side in N processes, which are forked once all tests are collected.

Collection and the imports of the product are paid once, not once in each process. Each process begins with an equal
part of the tests in their order, so that those of a module, which share its fixtures, mostly stay together. A process
that is through takes half of what another has left. One that dies fails the test that it ran, and is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter
from _pytest.capture import CaptureManager
from _pytest.terminal import TerminalReporter

from tests import limits

MANY = 500
"""From so many tests on, what most processes would import is imported before they are forked."""
MODULES = ("torch", "healthd.aggregator.app", "healthd.node.daemon", "healthd.cli.check", "hypothesis.strategies")
RECEIVED_BYTES = 1 << 16
LENGTH = struct.Struct("<I")
SECONDS_TO_END = 20.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run tests side by side in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """True: all have run; None: one process is enough, and pytest runs them."""
    wanted = session.config.option
    count = min(wanted.forks, len(session.items))
    if count < 2 or wanted.collectonly or wanted.usepdb or session.testsfailed:
        return None
    if len(session.items) >= MANY:
        import_modules()
    parent = Parent(session)
    try:
        parent.run(count)
    finally:
        parent.end()
    return True


def import_modules() -> None:
    """Import what the tests need, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
    gc.freeze()


class Line:
    """One end of a connection that carries messages: each is its length in bytes and a pickle."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._bytes = b""

    def send(self, message: object) -> None:
        content = pickle.dumps(message)
        self.socket.sendall(LENGTH.pack(len(content)) + content)

    def receive(self) -> list[Any]:
        """The messages that are there, after waiting for the first; none when the other end is gone."""
        found: list[Any] = []
        while not found:
            try:
                more = self.socket.recv(RECEIVED_BYTES)
            except ConnectionResetError:
                return []
            if not more:
                return []
            self._bytes += more
            while len(self._bytes) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
                if len(self._bytes) < end:
                    break
                found.append(pickle.loads(self._bytes[LENGTH.size : end]))
                self._bytes = self._bytes[end:]
        return found


class Worker:
    """A forked process as its parent sees it."""

    def __init__(self, pid: int, line: Line, tests: range) -> None:
        self.pid = pid
        self.line = line
        self.left = tests
        self.given: list[int] = []
        """Tests that it has and has not finished: the one that runs, and the next."""


class Parent:
    """Gives tests to workers and passes on what they report."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        self._workers: dict[int, Worker] = {}
        self._ready = selectors.DefaultSelector()
        self._started = 0
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # dots of several modules would mix

    def run(self, count: int) -> None:
        """Run all tests."""
        total = len(self._session.items)
        for number in range(count):
            self._start(range(total * number // count, total * (number + 1) // count))
        while self._workers:
            for key, _ in self._ready.select():
                worker = self._workers[key.fd]
                messages = worker.line.receive()
                for message in messages:
                    self._hear(worker, message)
                if not messages:
                    self._bury(worker)

    def _start(self, tests: range) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for worker in self._workers.values():
                worker.line.socket.close()
            be_worker(self._session, Line(theirs), self._started)
        theirs.close()
        self._started += 1
        self._workers[ours.fileno()] = Worker(pid, Line(ours), tests)
        self._ready.register(ours, selectors.EVENT_READ)

    def _hear(self, worker: Worker, message: list[Any]) -> None:
        match message:
            case ["next", bool(ahead)]:
                worker.line.send(self._next(worker, ahead=ahead))
            case ["done", int(test)]:
                worker.given.remove(test)
            case [str(name), dict(given)]:
                self._pass_on(name, given)

    def _next(self, worker: Worker, *, ahead: bool) -> int | None:
        """
        The next test of a worker; None: there is none, or all is to stop.

        `ahead`: it runs one still, behind which no test of another is to wait.
        """
        if self._session.shouldfail or self._session.shouldstop:
            return None
        if not worker.left and not ahead:
            richest = max(self._workers.values(), key=lambda one: len(one.left))
            middle = richest.left.start + len(richest.left) // 2
            worker.left, richest.left = (
                range(middle, richest.left.stop),
                range(richest.left.start, middle),
            )
        if not worker.left:
            return None
        test = worker.left.start
        worker.left = worker.left[1:]
        worker.given.append(test)
        return test

    def _pass_on(self, name: str, given: dict[str, Any]) -> None:
        if name == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=given)
            self._hook.pytest_runtest_logreport(report=report)
        elif name == "start":
            self._hook.pytest_runtest_logstart(**given)
        else:
            self._hook.pytest_runtest_logfinish(**given)

    def _bury(self, worker: Worker) -> None:
        """A worker has ended: the test that it ran has failed, and the others are for a new one."""
        self._ready.unregister(worker.line.socket)
        del self._workers[worker.line.socket.fileno()]
        worker.line.socket.close()
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not worker.given:
            if code:
                raise pytest.Session.Interrupted(f"a process of tests ended with {code} behind its last test")
            return
        item = self._session.items[worker.given[0]]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process that ran this test ended with {code}",
            when="call",
        )
        self._hook.pytest_runtest_logreport(report=report)
        left = range(worker.given[1], worker.given[1] + 1 + len(worker.left)) if len(worker.given) > 1 else worker.left
        if left and not self._session.shouldfail:
            self._start(left)

    def end(self) -> None:
        """Interrupt what still runs, as a terminal does, and kill what does not end."""
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGINT)
        until = time.monotonic() + SECONDS_TO_END
        for worker in self._workers.values():
            worker.line.socket.close()
            while os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.05)


def be_worker(session: pytest.Session, line: Line, number: int) -> NoReturn:
    """Run what the parent gives, and end."""
    code = 1
    try:
        atexit._clear()
        prepare(session.config, number)
        session.config.pluginmanager.register(Reports(session.config, line))
        work(session, line)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - here a process ends
        traceback.print_exc(file=sys.__stderr__)
    finally:
        if code:
            limits.end(limits.children())
        atexit._run_exitfuncs()
        os._exit(code)


def prepare(config: pytest.Config, number: int) -> None:
    """No terminal; captured output and a directory of its own."""
    plugins = config.pluginmanager
    terminal = plugins.get_plugin("terminalreporter")
    if isinstance(terminal, TerminalReporter):
        terminal._tw = TerminalWriter(Path(os.devnull).open("w"))  # noqa: SIM115 - to the end of the process
    capture = plugins.get_plugin("capturemanager")
    if isinstance(capture, CaptureManager):
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    paths: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    own = paths.getbasetemp() / f"process{number}"
    own.mkdir()
    paths._basetemp = own


def work(session: pytest.Session, line: Line) -> None:
    """Ask for tests, one ahead: which fixtures stay is known by the next."""

    def ask(*, ahead: bool) -> int | None:
        line.send(["next", ahead])
        (answer,) = line.receive()
        return int(answer) if answer is not None else None

    test = ask(ahead=False)
    while test is not None:
        following = ask(ahead=True)
        item = session.items[test]
        nextitem = session.items[following] if following is not None else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        line.send(["done", test])
        test = following if following is not None else ask(ahead=False)


class Reports:
    """What pytest reports in a worker goes to its parent."""

    def __init__(self, config: pytest.Config, line: Line) -> None:
        self._config = config
        self._line = line

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._line.send(["start", {"nodeid": nodeid, "location": location}])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._line.send(["report", data])

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._line.send(["finish", {"nodeid": nodeid, "location": location}])
