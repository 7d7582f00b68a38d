"""The host's memory and swap, from /proc/meminfo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, Status, check
from checks.limits import within


@dataclass(frozen=True)
class Params:
    """Bounds; ctx.limits beats them."""

    min_available_ratio: float = 0.05  # of all memory; below it a data loader is killed within minutes
    max_swap_used_ratio: float = 0.5  # of the swap there is; a training job that swaps stands still


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def memory_free(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Memory is available, and swap is not in heavy use.

    Reads:   /proc/meminfo (MemTotal, MemAvailable, SwapTotal, SwapFree).
    Judges:  fail LowMemory (memory), warn LowMemory (swap) | unknown NoData.
    Cost:    under 1 ms; harmless to jobs.
    """
    readings = parse_meminfo(ctx.host.read("/proc/meminfo"))
    total, available = readings.get("MemTotal"), readings.get("MemAvailable")
    yield within(
        available / total if total and available is not None else None,
        name="memory_available_ratio",
        target="node",
        limit=_limit(ctx, "memory_available_ratio", lower=ctx.params.min_available_ratio),
        reason="LowMemory",
        subject="memory available",
    )
    swap, free = readings.get("SwapTotal"), readings.get("SwapFree")
    if not swap:
        yield Finding(status=Status.PASS, reason=None, message="no swap in use: there is none", target="node")
        return
    yield within(
        (swap - free) / swap if free is not None else None,
        name="swap_used_ratio",
        target="node",
        limit=_limit(ctx, "swap_used_ratio", upper=ctx.params.max_swap_used_ratio),
        reason="LowMemory",
        subject="swap used",
        outside=Status.WARN,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Name -> bytes; lines that are not `Name:  123 kB` are left out."""
    readings = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            readings[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return readings


def _limit(ctx: Context[Params], name: str, *, lower: float | None = None, upper: float | None = None) -> Limit:
    return ctx.limits.get(name) or Limit(lower=lower, upper=upper, origin="default")
