"""The host's memory and swap, from /proc/meminfo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Status, check
from checks.limits import within
from checks.system.bounds import bound, in_use


@dataclass(frozen=True)
class Params:
    """Bounds; configured limits of the measurements beat them."""

    min_available_ratio: float = 0.05  # of all memory; below it a data loader is killed within minutes
    max_swap_used_ratio: float = 0.5  # of the swap there is; a training job that swaps stands still


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def memory_free(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Memory is available, and swap is not in heavy use.

    While a job holds the devices, or may hold them, low memory is only a warning.

    Reads:   /proc/meminfo (MemTotal, MemAvailable, SwapTotal, SwapFree). A container's own limit is not in it.
    Judges:  fail LowMemory (memory, devices free), warn LowMemory (memory otherwise, swap) | unknown NoData.
    Cost:    under 1 ms; harmless to jobs.
    """
    readings = parse_meminfo(ctx.host.read("/proc/meminfo"))
    total, available = readings.get("MemTotal"), readings.get("MemAvailable")
    yield within(
        available / total if total and available is not None else None,
        name="memory_available_ratio",
        target="node",
        limit=bound(ctx, "memory_available_ratio", lower="min_available_ratio"),
        reason="LowMemory",
        subject="memory available",
        outside=Status.WARN if in_use(ctx) else Status.FAIL,
    )
    swap, free = readings.get("SwapTotal"), readings.get("SwapFree")
    used = None if swap is None or free is None else (swap - free) / swap if swap else 0.0
    yield within(
        used,
        name="swap_used_ratio",
        target="node",
        limit=bound(ctx, "swap_used_ratio", upper="max_swap_used_ratio"),
        reason="LowMemory",
        subject="swap used" if swap else "swap used (no swap)",
        outside=Status.WARN,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Name -> bytes; lines that are not `Name:  123 kB` are left out."""
    readings = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal() and len(words[0]) < 20:
            readings[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return readings
