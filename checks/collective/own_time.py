"""What a rank spends on its own account, so that who is late can be told from those who wait for it."""

from __future__ import annotations

import time

from checks.host.machine import Host, HostError


class OwnTime:
    """Counts from its making."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._since = time.perf_counter()
        self._withheld = cpu_wait_seconds(host)

    def spent(self, *, without_seconds: float) -> dict[str, float | None]:
        """
        `own_seconds` of work that waits for no other rank: all of the time but `without_seconds`, which ranks shared.

        `cpu_wait_seconds` is how long the threads of this process were ready to run and were given no processor, in
        all that time: near zero on a machine of its own, and large in a rank whose share of the processors is cut,
        while those that wait for it in an operation sleep. None where the kernel does not count it.
        """
        own_seconds = time.perf_counter() - self._since - without_seconds
        now = cpu_wait_seconds(self._host)
        known = now is not None and self._withheld is not None
        return {
            "own_seconds": max(0.0, own_seconds),
            "cpu_wait_seconds": max(0.0, (now or 0.0) - (self._withheld or 0.0)) if known else None,
        }


def cpu_wait_seconds(host: Host) -> float | None:
    """
    How long all threads of this process have waited for a processor since they began; None where it is not told.

    Source: Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat: time on the cpu and time spent waiting on a
    runqueue, both in nanoseconds, and timeslices run. A group at its cpu.max counts as waiting.
    """
    total = 0
    try:
        for thread in host.listdir("/proc/self/task"):
            total += int(host.read(f"/proc/self/task/{thread}/schedstat").split()[1])
    except (HostError, ValueError, IndexError):  # also a thread that has just ended: the sum would be no sum
        return None
    return total / 1e9
