"""The runner's side of the process that forks the workers of devices: see `checks.worker.fork_server`."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from checks.accelerators import find_descriptor
from checks.worker.protocol import HOST
from healthd.runner.settings import RunnerSettings
from healthd.runner.workers.launch import ForkLaunch, environment, take_fork_ahead
from healthd.runner.workers.workers import WorkerProcess

log = logging.getLogger(__name__)

_ANSWER_BYTES = 4096
_POLL_SECONDS = 0.005
_ASKED_AT_ONCE = 16  # requests that fit into the socket


class ForkedChild:
    """A child of this process that it has not started itself, with what `Popen` says of one."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, once it is reaped; None as long as it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Forked:
    """A forked worker as `Launch` is an executed one."""

    def __init__(self, child: ForkedChild, results: int, started: float) -> None:
        self.process = child
        self.results = results
        self.started = started


class _Pipes:
    """The pipes of a worker: our ends, and its own until they are given away."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._ends: list[int] = []
        try:
            for _ in range(3):
                self._ends += os.pipe()
        except OSError:
            self.close()
            raise
        self.commands, self.output, self.results = self._ends[1], self._ends[2], self._ends[4]
        self.theirs = [self._ends[0], self._ends[3], self._ends[5]]

    def close_theirs(self) -> None:
        for one in self.theirs:
            os.close(one)
            self._ends.remove(one)
        self.theirs = []

    def close(self) -> None:
        for one in self._ends:
            os.close(one)
        self._ends = []

    def become(self, pid: int) -> Forked:
        """Our ends as those of this process."""
        self._ends = []
        child = ForkedChild(pid, os.fdopen(self.commands, "wb", buffering=0), os.fdopen(self.output, "rb", buffering=0))
        return Forked(child, self.results, self.started)


class ForkServer:
    """One such process. Must be made in the main thread while a loop runs there, as a worker must."""

    def __init__(self, launched: ForkLaunch) -> None:
        self.refused: str | None = None
        """Why it forks no workers; None as long as it may."""
        self.unable = False
        """It has refused, and another one would refuse for the same reason."""
        self.accelerator: str | None = None
        """Whose workers it forks; None until it is ready."""
        self._process, self._line = launched.process, launched.line
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._gone = asyncio.Event()
        self._slots = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._asked: deque[tuple[_Pipes, asyncio.Future[WorkerProcess | None], Callable[[Forked], WorkerProcess]]]
        self._asked = deque()
        self._line.setblocking(False)
        self._loop.add_reader(self._line, self._read)

    async def fork(self, accelerator: object, begin: Callable[[Forked], WorkerProcess]) -> WorkerProcess | None:
        """
        A new worker of such a device, once the import is done; None where it cannot be forked, and has to be executed.

        `begin` makes the record of a process. It is called for a worker that nobody waits for any more, too, which is
        then killed.
        """
        await self._ready.wait()
        async with self._slots:
            return await self._fork(accelerator, begin)

    async def _fork(self, accelerator: object, begin: Callable[[Forked], WorkerProcess]) -> WorkerProcess | None:
        if self.refused is not None or self.accelerator != accelerator:
            return None
        pipes = _Pipes()
        try:
            sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pipes.theirs))]
            self._line.sendmsg([b"{}"], sent)
        except OSError as error:
            pipes.close()
            self._refuse(f"the process that forks them does not respond: {error.strerror}")
            return None
        pipes.close_theirs()
        answer: asyncio.Future[WorkerProcess | None] = self._loop.create_future()
        self._asked.append((pipes, answer, begin))
        self._idle.clear()
        return await answer

    def _read(self) -> None:
        try:
            text = self._line.recv(_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._refuse("the process that forks them has exited")
            return
        answer: Mapping[str, Any] = json.loads(text)
        if "refused" in answer:
            self.unable = not answer.get("for_now", False)
            self._refuse(str(answer["refused"]))
        elif "ready" in answer:
            self.accelerator = answer["ready"]
            self._ready.set()
        elif self._asked:
            pipes, waiting, begin = self._asked.popleft()
            process = begin(pipes.become(int(answer["pid"])))
            if waiting.done():  # cancelled
                process.kill()
            else:
                waiting.set_result(process)
            if not self._asked:
                self._idle.set()

    def _refuse(self, why: str) -> None:
        if self.refused is None:
            self.refused = why
            log.debug("workers import torch on their own: %s", why)
            self._reap()
        self._stop_reading()
        for pipes, waiting, _ in self._asked:
            pipes.close()
            if not waiting.done():
                waiting.set_result(None)
        self._asked.clear()
        self._idle.set()
        self._ready.set()

    def _stop_reading(self) -> None:
        if self._line.fileno() >= 0:
            self._loop.remove_reader(self._line)
            self._line.close()

    async def settle(self, within_seconds: float) -> None:
        """Wait until it has answered all that it was asked: each worker that it has made is then known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._idle.wait()

    def kill(self, why: str) -> None:
        """End it at once, whatever state it is in: who waits for a worker of it executes one. Returns at once."""
        self._refuse(why)
        self._signal(signal.SIGKILL)

    async def close(self, within_seconds: float) -> None:
        """End it, also when this is cancelled. The workers that it has made go on."""
        try:
            await self.settle(within_seconds)
        finally:
            self._refuse("the run has ended")
            self._signal(signal.SIGTERM)  # in the middle of the import it first ends what that has started
        if not await self._is_gone(within_seconds):
            self._signal(signal.SIGKILL)
            await self._is_gone(within_seconds)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _is_gone(self, within_seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._gone.wait()
        return self._gone.is_set()

    def _reap(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_POLL_SECONDS, self._reap)
        else:
            self._gone.set()


class ForkServers:
    """The fork servers of one runner, one at a time: for a run, or kept while the node is free."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.keep = False
        """Whether a server stays after a run."""
        self.keep_host = False
        """Whether the workers of the node are forked, by a server of their own that stays between runs."""
        self._settings = settings
        self._unable: str | None = None
        self._kept: ForkServer | None = None
        self._host: ForkServer | None = None
        self._host_unable = False
        self._lent = 0
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Have a server begin with its import, where none does yet and workers can be forked here."""
        if self._kept is None and not self._lent:
            self._kept = self._start()

    def preload(self, wanted: bool) -> None:
        """Have a server ready from now on and between runs; or no more, and then the one that no run has ends now."""
        self.keep = wanted
        if wanted:
            self.start()
        elif self._kept is not None:
            closing = asyncio.get_running_loop().create_task(self.close(), name="end of the preloaded process")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def take(self) -> ForkServer | None:
        """A server for a run, until it is given back; None where workers cannot be forked here."""
        server, self._kept = self._kept, None
        if server is not None and server.refused is not None:
            self._note(server)
            server = None
        server = server or self._start()
        self._lent += server is not None
        return server

    async def give_back(self, server: ForkServer) -> None:
        """The run needs it no more."""
        self._lent -= 1
        if self.keep and self._kept is None and server.refused is None:
            self._kept = server
            await server.settle(self._settings.kill_grace_seconds)
            return
        self._note(server)
        await server.close(self._settings.kill_grace_seconds)

    def host(self, *, alone: bool) -> ForkServer | None:
        """The server of the node's workers; None where they are executed. `alone`: as of `launch.command`."""
        if not self.keep_host or self._host_unable:
            return None
        if self._host is not None and self._host.refused is not None:  # killed, as when memory ran out
            self._host.kill(self._host.refused)
            self._host_unable, self._host = self._host.unable, None
        if self._host is None and not self._host_unable:
            self._host = self._launch(HOST, alone=alone)
        return self._host

    def drop_host(self) -> None:
        """The server of the node's workers does not answer: the next worker has another one."""
        if self._host is not None:
            self._host.kill("it did not answer")

    async def settle_host(self) -> None:
        """Wait until the server of the node's workers has answered: each worker that it has made is then known."""
        if self._host is not None:
            await self._host.settle(self._settings.kill_grace_seconds)

    async def close_host(self) -> None:
        """End the server of the node's workers."""
        self.keep_host = False
        server, self._host = self._host, None
        if server is not None:
            await server.close(self._settings.kill_grace_seconds)

    async def close(self) -> None:
        """End the server that no run has."""
        server, self._kept = self._kept, None
        if server is not None:
            self._note(server)
            await server.close(self._settings.kill_grace_seconds)

    def _note(self, server: ForkServer) -> None:
        if server.unable:
            self._unable = server.refused

    def _start(self) -> ForkServer | None:
        settings = self._settings
        described = find_descriptor(settings.accelerator)  # None for `auto`: the server finds out
        if self._unable is not None or (described is not None and described.prepare_fork is None):
            return None
        return self._launch(settings.accelerator, alone=False)

    def _launch(self, accelerator: str, *, alone: bool) -> ForkServer | None:
        settings = self._settings
        python = str(settings.probe_python or sys.executable)
        env = environment(python, settings.env, os.environ)
        wanted = {
            "accelerator": accelerator,
            "host_root": str(settings.host_root) if settings.host_root else None,
        }
        try:
            ahead = take_fork_ahead(python, env, wanted) if accelerator != HOST else None
            return ForkServer(ahead or ForkLaunch(python, env, wanted, alone=alone))
        except OSError:  # the worker that is then executed says what is wrong
            return None
