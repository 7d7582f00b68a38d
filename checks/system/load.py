"""Who else uses the processors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, Status, check
from checks.limits import within


@dataclass(frozen=True)
class Params:
    """Bounds."""

    max_load_per_core_ratio: float = 4.0  # of the 15-minute average; our own probes last seconds and cannot reach it


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def load(ctx: Context[Params]) -> Iterator[Finding]:
    """
    No crowd of processes has been using the processors for a quarter of an hour.

    While a job holds the devices its load is its own affair.

    Reads:   /proc/loadavg (the 15-minute average), /proc/cpuinfo.
    Judges:  warn LoadByOthers | skip NotApplicable (a job holds the devices).
    Cost:    under 1 ms; harmless to jobs.
    """
    if ctx.inventory.get("holders"):
        yield Finding(
            status=Status.SKIP,
            reason="NotApplicable",
            message="a job holds the devices: the load is its own",
            target="node",
        )
        return
    words = ctx.host.read("/proc/loadavg").split()
    cores = sum(line.startswith("processor") for line in ctx.host.read("/proc/cpuinfo").splitlines())
    yield within(
        float(words[2]) / cores if len(words) > 2 and cores else None,
        name="load_per_core_ratio",
        target="node",
        limit=ctx.limits.get("load_per_core_ratio")
        or Limit(lower=None, upper=ctx.params.max_load_per_core_ratio, origin="default"),
        reason="LoadByOthers",
        subject="load of 15 minutes by core",
        outside=Status.WARN,
    )
