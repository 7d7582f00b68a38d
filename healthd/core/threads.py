"""
Threads that do not keep a process alive at its end, even if a call hangs.

Also here:

- programs that a thread waits for and another may call off: none outlives its time, nor does what it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 16
"""Calls at a time; more wait. A service has a handful of them."""


def use_daemon_threads() -> None:
    """From now on `asyncio.to_thread` and look-ups of host names on this loop use such threads."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())


class DaemonThreads(ThreadPoolExecutor):
    """
    As ThreadPoolExecutor, but `shutdown` and the end of the process wait for no call under way.

    It is one in name only: asyncio takes nothing else, and the real one's threads are joined when Python ends.
    """

    def __init__(self, most: int = MOST_THREADS) -> None:
        super().__init__(max_workers=most)
        self._most = most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_made = 0
        self._unfinished = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it in a thread. RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.put(functools.partial(_carry_out, future, functools.partial(fn, *args, **kwargs)))
            self._unfinished += 1
            if self._unfinished > self._threads_made and self._threads_made < self._most:
                self._threads_made += 1
                threading.Thread(target=self._work, name=f"call-{self._threads_made}", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing new is taken; threads end after the call that they are in. Returns at once whatever is asked."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads_made):
                    self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._unfinished -= 1


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """
    The result of blocking work, in a thread of its own that no end of the program waits for.

    The loop's own threads are waited for at its end. A read of a dying machine's /proc may never return, and a held
    request must not keep a hook that is told to end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = functools.partial(future.set_result, work())
        except Exception as error:  # noqa: BLE001 - it is passed on, but for what a future refuses
            told = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
            settle = functools.partial(future.set_exception, told)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Programs:
    """One at a time, each in a session of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """
        Run a program to its end, without input; `environ` None is this process's own.

        OSError where it cannot be started, subprocess.TimeoutExpired where it does not end and close its output in
        time, CalledOffError after `cancel`.
        """
        with self._lock:
            if self._cancelled:
                raise CalledOffError
            process = self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        try:
            out, err = process.communicate(timeout=timeout_seconds)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)
        finally:
            _kill(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            process.wait()

    def cancel(self) -> None:
        """End the program under way with all that it has started, and let no other start. From any thread."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                _kill(self._process)


class CalledOffError(Exception):
    """`Programs.cancel` was called before the program could be started."""


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not reaped, so the number of its group is nobody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
