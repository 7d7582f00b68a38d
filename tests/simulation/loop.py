"""
An event loop in virtual time: when nothing is ready, its clock jumps to the next timer. One thread, no descriptors.

What runs on it belongs to processes (`Process`), which can be killed, frozen and thawed between any two steps of a
coroutine. Inside `VirtualLoop.simulating`, the clocks of the `time` module show the running machine's time, randomness
comes from the seed, and a thread, a socket or a program is an error at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import itertools
import os
import random
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""What the clocks on the wall of all machines show when the simulation begins."""
BOOTED = 1000.0
"""How long all machines have been up then."""
FORBIDDEN = frozenset({"socket.__new__", "subprocess.Popen", "os.fork", "os.posix_spawn"})
"""Events of `sys.addaudithook` that mean another program or machine: nothing of theirs can be replayed."""


class ForbiddenError(BaseException):
    """Something that a simulation cannot replay. No `except Exception` of the product may hide it."""


class KilledError(BaseException):
    """The running process was killed in the middle of a step. No `except Exception` of the product may hide it."""


class Machine:
    """The clocks of a machine: `boot` goes with the loop, `wall` may be set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wall_offset = 0.0


class Process:
    """All tasks and callbacks that descend from one start of a program. `kill` is SIGKILL: nothing is cleaned up."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine
        self.alive, self.frozen = True, False
        self.steps = 0
        self._loop = asyncio.get_running_loop()
        self._late: list[asyncio.Handle] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run as a task of this process."""
        return self._context.run(self._loop.create_task, work, name=name)

    def call(self, work: Callable[[], T]) -> T:
        """Run now, as this process."""
        return self._context.copy().run(work)

    def kill(self) -> None:
        """Nothing of it runs from now on."""
        self.alive = False
        self._late.clear()

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs until `thaw`; its clocks go on."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT: all that should have run meanwhile does, in its order."""
        self.frozen = False
        late, self._late = self._late, []
        for handle in late:
            self._loop.call_soon(_run, handle, context=self._context.copy())

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether the handle may run now; one of a frozen process is kept for later."""
        if not self.alive:
            return False
        if self.frozen:
            self._late.append(handle)
            return False
        self.steps += 1
        return True


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `after_step` is called after each callback that ran, with its process (None: the world's own)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.after_step: Callable[[Process | None], None] = lambda _: None
        self.errors: list[BaseException] = []
        self._kept: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)

    # --- what asyncio asks for ----------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.now

    def _process_events(self, _events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody else could wake this loop."""

    def run_in_executor(self, _executor: object, func: Callable[..., Any], *_args: Any) -> NoReturn:  # type: ignore[override]
        """No thread can be replayed."""
        _refuse(f"a thread was asked for, to run {func}")

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        ready = self._ready  # type: ignore[attr-defined]
        while scheduled and (scheduled[0]._cancelled or (ready and scheduled[0]._when <= self.now)):
            self._take_timer()
        if not ready:
            if not scheduled:
                raise ForbiddenError("nothing is left to happen: the simulation waits for itself")
            self.now = max(self.now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now:
            self._take_timer()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and not process.admits(handle):
                continue
            self.steps += 1
            handle._run()
            if self.errors:
                raise self.errors[0]
            self.after_step(process)

    def _take_timer(self) -> None:
        handle = heapq.heappop(self._scheduled)  # type: ignore[attr-defined]
        handle._scheduled = False
        if not handle._cancelled:
            self._ready.append(handle)  # type: ignore[attr-defined]

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        # One that was killed would be closed by the collector of garbage, and its `finally` would run at any time.
        self._kept.append(task)
        if len(self._kept) > 4096:
            self._kept = [one for one in self._kept if not one.done()]
        return task

    def _note_error(self, _loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, KilledError) or not isinstance(error, BaseException):
            return
        if isinstance(error, Exception) and "task" not in context and "future" in context:
            return  # one that nobody has asked for
        self.errors.append(error)

    # --- a simulation -------------------------------------------------------------------------------------------------

    def simulate(self, work: Coroutine[Any, Any, T], *, seed: int) -> T:
        """The result of `work`; the loop is closed then."""
        with self._simulating(seed):
            try:
                return self.run_until_complete(work)
            finally:
                self._bury()
                self.close()

    def _bury(self) -> None:
        """End what is left of all processes, without letting anything of it run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what a `finally` would have started
            self._close_tasks()

    def _close_tasks(self) -> None:
        for task in self._kept:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._kept.clear()

    @contextlib.contextmanager
    def _simulating(self, seed: int) -> Iterator[None]:
        """The machine's time, the seed's randomness, and no way out."""
        _watch()
        chance = random.Random(f"{seed}:secrets")
        global_state = random.getstate()
        random.seed(f"{seed}:random")
        before = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter", "clock_gettime")}
        token_bytes, start_thread = secrets.token_bytes, threading.Thread.start
        getpid, gethostname = os.getpid, socket.gethostname

        def wall() -> float:
            process = PROCESS.get()
            return EPOCH + self.now + (process.machine.wall_offset if process is not None else 0.0)

        def boot(_clock: int = 0) -> float:
            return BOOTED + self.now

        def drawn(nbytes: int | None = None) -> bytes:
            return chance.randbytes(32 if nbytes is None else nbytes)

        time.time, time.monotonic, time.perf_counter, time.clock_gettime = wall, boot, boot, boot
        secrets.token_bytes = drawn
        os.getpid, socket.gethostname = lambda: 1, lambda: "simulated"  # aggregators tell both
        setattr(threading.Thread, "start", _refuse_thread)  # noqa: B010  # a plain assignment is an error of types
        _guarded.append(self)
        collects = gc.isenabled()
        gc.disable()  # it would run destructors between any two steps
        try:
            yield
        finally:
            if collects:
                gc.enable()
            _guarded.remove(self)
            for name, value in before.items():
                setattr(time, name, value)
            secrets.token_bytes = token_bytes
            os.getpid, socket.gethostname = getpid, gethostname
            setattr(threading.Thread, "start", start_thread)  # noqa: B010
            random.setstate(global_state)


_guarded: list[VirtualLoop] = []
_watching = itertools.count()


def _watch() -> None:
    """Watch what the interpreter does, from the first simulation on; such a hook cannot be taken out again."""
    if next(_watching) == 0:
        sys.addaudithook(_forbid)


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN and _guarded:
        _refuse(f"{event}{arguments!r:.200}")


def _refuse_thread(thread: threading.Thread) -> None:
    _refuse(f"a thread was started ({thread.name})")


def _refuse(what: str) -> NoReturn:
    error = ForbiddenError(f"{what} inside a simulation")
    _guarded[-1].errors.append(error)  # also where somebody swallows it
    raise error
