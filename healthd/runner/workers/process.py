"""
Starts, reads, kills and reaps one worker process with its pipes. It knows messages, not checks.

It never waits for the end of a pipe, which a grandchild may hold open, and never without a bound for a dead process to
be reaped: the pidfd says that the process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from checks.host.descendants import first_child
from checks.worker.protocol import LineDecoder, ProtocolError
from healthd.runner.workers.launch import Launch
from healthd.runner.workers.oom_kills import OomKills, read_oom_kills

READ_BYTES = 64 * 1024
TAIL_BYTES = 64 * 1024  # of its output: the stacks of an abort follow the words that tell why
LAST_OUTPUT_CHARS = 4096  # of that, what goes into results
MAX_UNREAD_MESSAGES = 1024  # beyond it the worker has to wait until its messages are read
MAX_DRAIN_READS = 32  # of what a dead worker left in its pipe; a grandchild may still be writing
CLOSED_SECONDS = 1.0  # from the end of its results to its own end: its guard may have much to kill
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """
    The last event of a worker. `reason` is Crashed, CannotAllocate or Garbage; `message` says in a few words how it
    ended.
    """

    reason: str
    message: str


Event = dict[str, Any] | Ended


class WorkerProcess:
    """
    A worker under the guard (`checks.host.guard`) that leads its session and kills everything that it started.

    Must be created in the main thread while a loop runs there: the worker dies with the thread that started it.
    """

    def __init__(self, launched: Launch, *, oom_kills: Callable[[], int | None] | None = None) -> None:
        """`oom_kills` says how many processes the kernel has killed for want of memory; None: it is asked."""
        self._oom_kills = OomKills(oom_kills or read_oom_kills)
        self._loop = asyncio.get_running_loop()
        self.started = launched.started
        self._process, self._results = launched.process, launched.results
        self.pid = self._process.pid
        """The pid of the guard."""
        self.last_event_at = 0.0
        """When a message of it was last read (monotonic)."""
        self.reaped = asyncio.Event()
        self._worker_pid: int | None = None
        self._events: deque[Event] = deque()
        self._new_event = asyncio.Event()
        self._decoder = LineDecoder()
        self._unsent = bytearray()
        self._output_tail = bytearray()
        self._ended = False
        self._killed = False
        self._stdin = _descriptor(self._process.stdin)
        self._output = _descriptor(self._process.stdout)
        for descriptor in (self._stdin, self._output, self._results):
            os.set_blocking(descriptor, False)
        self._reading = True
        self._loop.add_reader(self._results, self._read_results)
        self._loop.add_reader(self._output, self._read_output)
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._on_death)
        except OSError:  # a kernel or a sandbox without pidfd
            self._loop.call_later(_POLL_SECONDS, self._poll)

    @property
    def worker_pid(self) -> int:
        """The process that runs the checks, the guard's first child; the guard's own pid where there is none."""
        found = first_child(self.pid, self._worker_pid)
        self._worker_pid = None if found == self.pid else found
        return found

    # --- commands and events ------------------------------------------------------------------------------------------

    def send(self, lines: bytes) -> None:
        """Send command lines; never blocks. What a dead worker does not read is lost, and its last event says why."""
        self._oom_kills.mark()
        self._unsent += lines
        if len(self._unsent) == len(lines):  # else it goes on when the worker has read
            self._write()

    def _write(self) -> None:
        if self._stdin < 0:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin, self._unsent[:READ_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._write)
            return
        except OSError:  # it is dead, or has closed its input; its last event reports that
            self._unsent.clear()
        self._loop.remove_writer(self._stdin)

    async def next_event(self) -> Event:
        """The next message, or how it ended; the end is repeated for ever."""
        while not self._events:
            self._new_event.clear()
            await self._new_event.wait()
        event = self._events[0]
        if not isinstance(event, Ended):
            self._events.popleft()
            self.last_event_at = time.monotonic()
            if not self._reading and not self._ended and len(self._events) < MAX_UNREAD_MESSAGES // 2:
                self._reading = True
                self._loop.add_reader(self._results, self._read_results)
        return event

    def last_output(self) -> str:
        """The end of what it wrote to its standard output and error, short enough for a result."""
        return self.tail()[-LAST_OUTPUT_CHARS:].strip()

    def tail(self) -> str:
        """The end of its output, long enough to find why it ended."""
        self._read_output()
        return self._output_tail.decode(errors="replace").strip()

    def _read_results(self) -> None:
        if self._ended or self._results < 0:
            return
        try:
            data = os.read(self._results, READ_BYTES)
            if not data:
                # Usually it has ended and the pidfd says so at once, with the signal. If not, it closed its results.
                self._stop_reading()
                self._loop.call_later(CLOSED_SECONDS, self._end, "Garbage", "closed its results and went on")
            for message in self._decoder.feed(data):
                self._events.append(message)
                self._new_event.set()
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._end("Garbage", str(error))
        except OSError as error:
            self._end("Garbage", f"its results cannot be read: {error}")
        if len(self._events) >= MAX_UNREAD_MESSAGES:
            self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading = False
        if self._results >= 0:
            self._loop.remove_reader(self._results)

    def _read_output(self) -> None:
        if self._output < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, READ_BYTES)
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._output_tail += data
            del self._output_tail[:-TAIL_BYTES]

    def _end(self, reason: str, message: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop_reading()
        self._events.append(Ended(reason, message))
        self._new_event.set()

    # --- its end ------------------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        """The process has ended: read what it still wrote, kill its process group, and reap it."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for _ in range(MAX_DRAIN_READS):
            if self._ended or not self._reading:
                break
            self._read_results()
        self._read_output()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: the number cannot be used again until then
        code = self._process.poll()
        if code == -signal.SIGKILL and not self._killed and self._oom_kills.have_grown():
            self._end("CannotAllocate", f"{_how(code)} when memory ran out")
        self._end("Crashed", "killed" if self._killed else _how(code))
        self.close_pipes()
        self._reap()

    def _reap(self) -> None:
        if self._process.poll() is None:  # it has ended, and a tracer or the driver of a device still holds it
            self._loop.call_later(_POLL_SECONDS * 10, self._reap)
        else:
            self.reaped.set()

    def _poll(self) -> None:
        """Without a pidfd: look, without reaping, whether it has ended."""
        if self.reaped.is_set():
            return
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            ended = True
        if ended:
            self._on_death()
        else:
            self._loop.call_later(_POLL_SECONDS, self._poll)

    def kill(self) -> None:
        """Have its guard kill it and everything that it started, without waiting."""
        self._killed = True
        self._end("Crashed", "killed")
        if not self.reaped.is_set():
            for number in (signal.SIGTERM, signal.SIGCONT):  # a check may have stopped the guard
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)

    def is_gone(self) -> bool:
        """Try to reap it; returns whether that is done."""
        return self._process.poll() is not None

    async def wait_gone(self, within_seconds: float) -> bool:
        """Whether it is reaped within that time."""
        try:
            async with asyncio.timeout(within_seconds):
                await self.reaped.wait()
        except TimeoutError:
            return False
        return True

    async def retire(self, within_seconds: float) -> bool:
        """Close its input, which ends it; kill it when that does not help. Returns whether it is reaped."""
        self._close_stdin()
        if not self._ended and await self.wait_gone(1.0):
            return True
        self.kill()
        return await self.wait_gone(within_seconds)

    def _close_stdin(self) -> None:
        if self._stdin >= 0 and self._process.stdin is not None:
            self._loop.remove_writer(self._stdin)
            self._stdin = -1
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close_pipes(self) -> None:
        """Close our ends of its pipes: nothing more is read from it."""
        self._close_stdin()
        if self._output >= 0 and self._process.stdout is not None:
            self._loop.remove_reader(self._output)
            self._output = -1
            self._process.stdout.close()
        if self._results >= 0:
            self._loop.remove_reader(self._results)
            os.close(self._results)
            self._results = -1


def _descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise OSError("a pipe of the worker was not made")
    return pipe.fileno()


def _how(code: int | None) -> str:
    if code is None:
        return "ended and cannot be reaped"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code} in the middle"
