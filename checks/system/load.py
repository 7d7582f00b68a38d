"""Who else uses the processors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Status, check
from checks.host.machine import Host, HostError
from checks.limits import within
from checks.system.bounds import bound


@dataclass(frozen=True)
class Params:
    """Bounds."""

    max_load_per_core_ratio: float = 4.0  # of the 15-minute average; our own probes last seconds and cannot reach it


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def load(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The processors have not been overloaded for a quarter of an hour.

    While a job holds the devices, its load is not judged.

    Reads:   /proc/loadavg (the 15-minute average), /sys/devices/system/cpu/online, else /proc/cpuinfo.
    Judges:  warn LoadByOthers | unknown NoData | skip NotApplicable (a job holds the devices).
    Cost:    under 1 ms; harmless to jobs.
    """
    if ctx.inventory.get("holders"):
        text = "a job holds the devices, so the load is its own"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    average, cores = parse_loadavg(ctx.host.read("/proc/loadavg")), read_cores(ctx.host)
    yield within(
        average / cores if average is not None and cores else None,
        name="load_per_core_ratio",
        target="node",
        limit=bound(ctx, "load_per_core_ratio", upper="max_load_per_core_ratio"),
        reason="LoadByOthers",
        subject="15-minute load per core",
        outside=Status.WARN,
    )


def parse_loadavg(text: str) -> float | None:
    """The 15-minute average of `0.20 0.18 0.12 1/80 11206`."""
    words = text.split()
    try:
        return float(words[2])
    except (IndexError, ValueError):
        return None


def read_cores(host: Host) -> int:
    """How many processors are on; 0 where it cannot be told. /proc/cpuinfo of many cores is slow, so it comes last."""
    try:
        return parse_cpu_list(host.read("/sys/devices/system/cpu/online"))
    except HostError:
        return sum(line.startswith("processor") for line in host.read("/proc/cpuinfo").splitlines())


def parse_cpu_list(text: str) -> int:
    """How many processors `0-3,8` names; 0 for anything else."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and len(first) < 7 and len(last) < 7):
            return 0
        count += max(0, int(last) - int(first) + 1)
    return count
