"""What the kernel lets one process have: it is inherited by jobs that the same service manager starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Measurement, Status, check
from checks.limits import within
from checks.system.bounds import bound

_UNLIMITED = float(2**64 - 1)  # how the kernel writes RLIM_INFINITY; infinity itself has no place in JSON


@dataclass(frozen=True)
class Params:
    """Bounds."""

    min_open_files_count: int = 1024  # Linux's own default; thousands of shards and sockets want 65536
    min_memlock_bytes: float | None = None  # RDMA (EFA, InfiniBand) wants no limit at all; plain CPUs want nothing


@check(tier="passive", interval_seconds=300, timeout_seconds=5)
def process_limits(ctx: Context[Params]) -> Iterator[Finding]:
    """
    A process may open enough files and, if required, lock enough memory.

    Reads:   the soft limits RLIMIT_NOFILE and RLIMIT_MEMLOCK of this process.
    Judges:  fail LimitTooLow.
    Cost:    under 1 ms; harmless to jobs.
    """
    yield _judge(ctx, "nofile", "open_files_limit_count", "min_open_files_count", "open files allowed")
    yield _judge(ctx, "memlock", "memlock_limit_bytes", "min_memlock_bytes", "memory that can be locked")


def _judge(ctx: Context[Params], kind: str, name: str, field: str, subject: str) -> Finding:
    value, limit = ctx.host.process_limit(kind), bound(ctx, name, lower=field)
    if value == math.inf:
        shown = Measurement(name=name, value=_UNLIMITED, lower=limit.lower, upper=limit.upper, origin=limit.origin)
        message = f"{subject}: no limit"
        return Finding(status=Status.PASS, reason=None, message=message, target="node", measurements=(shown,))
    return within(value, name=name, target="node", limit=limit, reason="LimitTooLow", subject=f"{subject}:")
