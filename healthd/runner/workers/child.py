"""
One child process and its pipes: started, listened to, killed, reaped. It knows lines, not checks.

Nobody here waits for the end of a pipe, which a grandchild may hold open, and nobody waits for a corpse without
a bound: that the process has ended is told by its pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from checks.worker.protocol import MAX_LINE_BYTES, ProtocolError, decode
from healthd.runner.workers.worker_pid import find_worker

READ_BYTES = 64 * 1024
LAST_WORDS_BYTES = 4096
MAX_WAITING_MESSAGES = 1024  # then the child has to wait until somebody listens
MAX_DRAIN_READS = 32  # of what a dead child left in its pipe; a grandchild may still be writing
CLOSED_SECONDS = 1.0  # from the end of its results to its own end: its guard may have much to kill
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """The last event of a child. `reason` is Crashed or Garbage; `message` says how, in a few words."""

    reason: str
    message: str


Event = dict[str, Any] | Ended


class Child:
    """
    A worker process, under the guard (`checks.host.guard`) that leads its session and ends all that comes of it.

    Must be made in the main thread while a loop runs there: the child dies with the thread that started it.
    Raises OSError when the interpreter cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.started = time.monotonic()
        self._results, result_end = os.pipe()
        try:
            self._process = popen(
                [*argv, str(result_end), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=dict(env),
                cwd="/",
                pass_fds=(result_end,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._results)
            raise
        finally:
            os.close(result_end)
        self.pid = self._process.pid
        self._worker_pid: int | None = None
        self.reaped = asyncio.Event()
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._words = bytearray()
        self._over = False
        self._killed = False
        self._stdin = _pipe(self._process.stdin)
        self._output = _pipe(self._process.stdout)
        for descriptor in (self._stdin, self._output, self._results):
            os.set_blocking(descriptor, False)
        self._reading = True
        self._loop.add_reader(self._results, self._read_results)
        self._loop.add_reader(self._output, self._read_words)
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._on_death)
        except OSError:  # a kernel or a sandbox without pidfd
            self._loop.call_later(_POLL_SECONDS, self._poll)

    @property
    def worker_pid(self) -> int:
        """The process that runs the checks; `pid` is its guard's, and is told where there is no other."""
        found = find_worker(self.pid, self._worker_pid)
        self._worker_pid = None if found == self.pid else found
        return found

    # --- talking to it ------------------------------------------------------------------------------------------------

    def send(self, lines: bytes) -> None:
        """Hand it command lines; never blocks. What a dead child does not read is lost, and its end tells why."""
        waiting = bool(self._outgoing)
        self._outgoing += lines
        if not waiting:
            self._write()

    def _write(self) -> None:
        if self._stdin < 0:
            self._outgoing.clear()
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._stdin, self._outgoing[:READ_BYTES])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._write)
            return
        except OSError:  # it is gone, or has closed its input; the death is reported elsewhere
            self._outgoing.clear()
        self._loop.remove_writer(self._stdin)

    async def next(self) -> Event:
        """The next message, or how it ended; the end is repeated for ever."""
        while not self._events:
            self._news.clear()
            await self._news.wait()
        event = self._events[0]
        if not isinstance(event, Ended):
            self._events.popleft()
            if not self._reading and not self._over and len(self._events) < MAX_WAITING_MESSAGES // 2:
                self._reading = True
                self._loop.add_reader(self._results, self._read_results)
        return event

    def last_words(self) -> str:
        """The end of what it wrote to its standard error and output."""
        self._read_words()
        return self._words.decode(errors="replace").strip()

    # --- listening ----------------------------------------------------------------------------------------------------

    def _read_results(self) -> None:
        if self._over or self._results < 0:
            return
        try:
            data = os.read(self._results, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end("Garbage", f"its results cannot be read: {error}")
            return
        if not data:
            # Usually it has ended and the pidfd says so at once, with the signal. If not, it closed its results.
            self._stop_reading()
            self._loop.call_later(CLOSED_SECONDS, self._closed_results)
            return
        self._take(data)

    def _closed_results(self) -> None:
        if not self._over:
            self._end("Garbage", "closed its results and went on")

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while not self._over:
            end = self._buffer.find(b"\n")
            if end < 0:
                if len(self._buffer) > MAX_LINE_BYTES:
                    self._end("Garbage", f"sent a line of more than {MAX_LINE_BYTES} bytes")
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            try:
                self._events.append(decode(line))
            except ProtocolError as error:
                self._end("Garbage", str(error))
                return
            self._news.set()
            if len(self._events) >= MAX_WAITING_MESSAGES:
                self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading = False
        if self._results >= 0:
            self._loop.remove_reader(self._results)

    def _read_words(self) -> None:
        if self._output < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, READ_BYTES)
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._words += data
            del self._words[:-LAST_WORDS_BYTES]

    def _end(self, reason: str, message: str) -> None:
        if self._over:
            return
        self._over = True
        self._stop_reading()
        self._buffer.clear()
        self._events.append(Ended(reason, message))
        self._news.set()

    # --- its end ------------------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        """The process has ended: hear what it still said, take its group with it, and reap it."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for _ in range(MAX_DRAIN_READS):
            if self._over or not self._reading:
                break
            self._read_results()
        self._read_words()
        self._signal_group()  # while the corpse keeps the number from being used again
        self._bury()

    def _bury(self) -> None:
        code = self._process.poll()
        self._end("Crashed", "killed" if self._killed else _how(code))
        self._release()
        if code is None:
            # Ended, but the kernel does not let go of it (traced, or in a device's driver).
            self._loop.call_later(_POLL_SECONDS, self._try_to_reap)
        else:
            self.reaped.set()

    def _try_to_reap(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_POLL_SECONDS * 10, self._try_to_reap)
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
        """Have its guard kill it and all that comes of it, without waiting."""
        self._killed = True
        self._end("Crashed", "killed")
        if not self.reaped.is_set():
            for number in (signal.SIGTERM, signal.SIGCONT):  # whatever a check may have done to the guard
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether it is reaped; tries to."""
        return self._process.poll() is not None

    async def gone(self, within_seconds: float) -> bool:
        """Whether it is reaped within that time."""
        try:
            await asyncio.wait_for(self.reaped.wait(), within_seconds)
        except TimeoutError:
            return False
        return True

    async def retire(self, within_seconds: float) -> bool:
        """End its input, which ends it; kill it when that does not help. Whether it is gone."""
        self._close_stdin()
        if not self._over and await self.gone(1.0):
            return True
        self.kill()
        return await self.gone(within_seconds)

    def abandon(self) -> None:
        """Close our ends of its pipes: it was killed, does not end, and nobody listens to it any more."""
        self._release()

    def _close_stdin(self) -> None:
        if self._stdin >= 0 and self._process.stdin is not None:
            self._loop.remove_writer(self._stdin)
            self._stdin = -1
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _release(self) -> None:
        """Close our ends of all pipes, whoever holds the others."""
        self._close_stdin()
        if self._output >= 0 and self._process.stdout is not None:
            self._loop.remove_reader(self._output)
            self._output = -1
            self._process.stdout.close()
        if self._results >= 0:
            self._loop.remove_reader(self._results)
            os.close(self._results)
            self._results = -1


def _pipe(end: IO[bytes] | None) -> int:
    if end is None:
        raise OSError("a pipe of the child was not made")
    return end.fileno()


def _how(code: int | None) -> str:
    if code is None:
        return "ended and cannot be reaped"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code} in the middle"
