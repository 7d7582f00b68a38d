"""The kernel's clock: whether a time service synchronizes it, and its last measured offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Status, check
from checks.host.machine import HostError
from checks.limits import within
from checks.system.bounds import bound, is_required

TIME_SERVICES = frozenset({"chronyd", "ntpd", "systemd-timesyn", "openntpd", "ptp4l", "phc2sys"})  # as /proc cuts them


@dataclass(frozen=True)
class Params:
    """Bounds."""

    max_offset_seconds: float = 1.0  # logs and tokens go wrong beyond it; healthd itself trusts no clock
    required: bool | None = None  # None: on nodes with accelerators, and wherever a time service runs


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def clock(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The clock is synchronized, and its offset is small.

    If no time service runs and the kernel reports an unsynchronized clock, the offset is not measured either. On plain
    CPU nodes (laptops, small virtual machines) the check then does not apply, unless `required` is true.

    Reads:   adjtimex(2), the names of processes.
    Judges:  fail ClockOffset, warn ClockUnsynchronized | skip NotApplicable (plain CPUs without a time service).
    Cost:    1 ms for every thousand processes; harmless to jobs.
    """
    state = ctx.host.clock()
    if not state.synchronized:
        service = _time_service(ctx)
        required = is_required(ctx, ctx.params.required)
        if service is not None and ctx.params.required is None:
            required = True
        who = f"{service} runs" if service else "no time service is running"
        yield Finding(
            status=Status.WARN if required else Status.SKIP,
            reason="ClockUnsynchronized" if required else "NotApplicable",
            message=f"the kernel reports that the clock is not synchronized; {who}",
            target="node",
        )
        return
    yield within(
        abs(state.offset_seconds),
        name="clock_offset_seconds",
        target="node",
        limit=bound(ctx, "clock_offset_seconds", upper="max_offset_seconds"),
        reason="ClockOffset",
        subject="clock synchronized, offset",
    )


def _time_service(ctx: Context[Params]) -> str | None:
    for entry in ctx.host.listdir("/proc"):
        if entry.isdecimal():
            try:
                name = ctx.host.read(f"/proc/{entry}/comm").strip()
            except HostError:  # it has ended meanwhile
                continue
            if name in TIME_SERVICES:
                return name
    return None
