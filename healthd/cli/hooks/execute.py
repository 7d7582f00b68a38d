"""`healthd gate --execute`: the hook runs the ordered checks of its node itself while it waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import log_to_stderr
from healthd.core.model import Decision, Join
from healthd.core.threads import in_thread
from healthd.hooks.stopping import Signals, Stopped

PLACE = Path("/tmp")  # short: a socket lies below
PREFIX = "healthd-gate-"
LEFT_SECONDS = 86400.0
"""How old a folder must be to be one that was left behind; a hook that just starts has not locked its own yet."""
ASK_SECONDS = 5.0
"""How long the aggregator holds an answer to the executor: short, since the gate waits for it."""


def executed(
    settings: Settings, join: Callable[[], Join], job: str, ask: Callable[[], Decision], *, signals: Signals
) -> Decision:
    """
    What `ask` comes to, with the executor of `join`'s node running meanwhile; it has ended when this returns.

    Call it in the main thread. Raises what `ask` raises, `Stopped` for a signal that came before this returns, and
    HealthdError where the executor cannot run.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    log_to_stderr(logging.WARNING)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the kernel lets go of it however we end: `sweep` looks for that
        with signals.deferred():
            return asyncio.run(_both(settings, join, job, ask, folder, signals))
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(place: Path = PLACE) -> None:
    """Remove what hooks of this user that were killed have left behind; nothing of one that runs, or just starts."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or no folder, or locked: its hook is alive
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(lock)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > LEFT_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


async def _both(
    settings: Settings, join: Callable[[], Join], job: str, ask: Callable[[], Decision], folder: Path, signals: Signals
) -> Decision:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals.on_stop(lambda: loop.call_soon_threadsafe(stopped.set))
    stop = asyncio.create_task(stopped.wait(), name="signals")
    try:
        return await _until_answered(settings, join, job, in_thread("the gate's hook", ask), folder, stop)
    finally:
        signals.on_stop(None)  # from here on it is noted alone
        stop.cancel()


async def _until_answered(
    settings: Settings,
    join: Callable[[], Join],
    job: str,
    answer: asyncio.Future[Decision],
    folder: Path,
    stop: asyncio.Task[bool],
) -> Decision:
    member = 0
    while True:
        current = join()
        member += 1
        place = folder / str(member)
        place.mkdir(mode=0o700)
        executor = asyncio.create_task(_run(settings, current, job, place), name="executor")
        changed = asyncio.create_task(_other(join, current), name="look for a new round")
        waited: set[asyncio.Future[object]] = {answer, executor, changed, stop}  # type: ignore[arg-type]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        ended = executor.done() and not answer.done() and not stop.done()
        executor.cancel()
        await asyncio.wait({executor})
        if stop.done():
            if answer.done():
                answer.exception()  # it counts no more
            raise Stopped("a signal")
        if answer.done():
            return answer.result()
        if ended:
            raise executor.exception() or Stopped("the end of the checks of its node")


async def _other(join: Callable[[], Join], current: Join) -> None:
    """Until the hook asks as another member: the group comes together again."""
    while join().member == current.member:  # noqa: ASYNC110 - the other thread changes it, once in a long while
        await asyncio.sleep(0.2)


async def _run(settings: Settings, join: Join, job: str, folder: Path) -> None:
    """The node's daemon as executor: it works on order alone, and speaks beside the node's own daemon."""
    from healthd.hooks.launchers import own_address
    from healthd.node.daemon import run_node

    node = settings.executor(
        join.node,
        settings.gate.aggregator,
        folder,
        address=own_address(),
        ask_seconds=ASK_SECONDS,
        token_file=settings.gate.token_file,
    )
    sync = dataclasses.replace(node.sync, executor=join.member, ca_file=settings.gate.ca_file, backoff_max_seconds=1.0)
    runner = settings.runner(in_job=True, in_fleet=join.size > 1)
    await run_node(dataclasses.replace(node, sync=sync, executor=f"hook:{job}"), runner, signals=False)
