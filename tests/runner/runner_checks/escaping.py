"""A check that leaves a process behind, in a session of its own, below a parent that is gone; then it ends as asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.contract import Context, Finding, Status, check


@dataclass(frozen=True)
class Escape:
    """Where the pid is written, and how the check ends."""

    folder: str = "/tmp"
    then: str = "end"


@check(tier="passive", interval_seconds=60, timeout_seconds=2)
def escapes(ctx: Context[Escape]) -> Iterator[Finding]:
    """Leaves a process behind."""
    place = Path(ctx.params.folder) / "pid"
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            place.with_suffix(".new").write_text(str(os.getpid()))
            place.with_suffix(".new").rename(place)
            os.execv("/bin/sleep", ["sleep", "300"])
        os._exit(0)
    while not place.exists():
        time.sleep(0.01)
    if ctx.params.then == "hang":
        time.sleep(300)
    if ctx.params.then == "crash":
        os._exit(3)
    yield Finding(status=Status.WARN, reason="LowMemory", message="it ended", target="node")


@dataclass(frozen=True)
class Fork:
    """When the child gives its finding: `first`, `last` (the parent waits for it) or `late` (`late_fork` waits)."""

    folder: str = "/tmp"
    child: str = "first"


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def forks(ctx: Context[Fork]) -> Iterator[Finding]:
    """Two processes go on behind a fork: the child passes, the parent fails."""
    place, when = Path(ctx.params.folder), ctx.params.child
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        (place / "written").write_text(str(os.getpid()))
        (place / "written").rename(place / "child")  # whoever sees it sees all of it
        os.close(write_end)
        if when != "first":
            os.read(read_end, 1)  # until the parent has given its own
        while when == "late" and not (place / "go").exists():
            time.sleep(0.01)
        yield Finding(status=Status.PASS, reason=None, message="the child's", target="node")
        return
    if when == "first":
        os.waitpid(child, 0)
    yield Finding(status=Status.FAIL, reason="LowMemory", message="the parent's", target="node")
    os.close(write_end)
    if when == "last":
        os.waitpid(child, 0)


@check(tier="passive", interval_seconds=60, timeout_seconds=10)
def late_fork(ctx: Context[Fork]) -> Iterator[Finding]:
    """Lets the late child of `forks` give its finding, and waits for its end."""
    place = Path(ctx.params.folder)
    while not (place / "child").exists():
        time.sleep(0.01)
    (place / "go").touch()
    os.waitpid(int((place / "child").read_text()), 0)
    yield Finding(status=Status.PASS, reason=None, message="the child has ended", target="node")
