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
