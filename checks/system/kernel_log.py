"""Known faults in the kernel log (`fault_lines` says which)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checks.contract import Context, Finding, Measurement, Status, check
from checks.host import HostError
from checks.kernel import LogLine
from checks.system.bounds import is_required
from checks.system.fault_lines import Pattern, find_fault, find_target

MAX_FINDINGS = 32


@dataclass(frozen=True)
class Params:
    """More benign lines, and whether the log must be readable."""

    benign: tuple[str, ...] = ()  # regular expressions, searched for in the line
    required: bool | None = None  # None: everywhere but on plain CPU nodes; False: cannot be read = warning


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def kernel_log(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The kernel has logged no known fault.

    Every kind is told once for each device, with the number of its lines and the last of them. Damage counts until the
    next boot, what passes by itself (a task that hung, memory that ran out) for an hour after its last line. A hang in
    collectives of Neuron devices is a warning that accuses nobody: its cause may sit on another node. A log that cannot
    be read is unknown; on a plain CPU node it is a warning, because containers and users without rights see none.

    Reads:   /dev/kmsg without waiting.
    Judges:  fail or warn KernelFault by kind, with what to do; on the device that a line of the Neuron runtime names |
             unknown (or warn) NoPermission, NoData.
    Cost:    about 1 ms for a thousand lines; harmless to jobs.
    """
    required = is_required(ctx, ctx.params.required)
    try:
        lines = ctx.host.kernel_log()
    except HostError as error:
        text = f"the kernel log cannot be read, so faults in it go unseen: {error}"
        status = Status.UNKNOWN if required else Status.WARN
        yield Finding(status=status, reason=error.reason, message=text, target="node")
        return
    if not lines:
        text = "the kernel log is empty, so faults in it go unseen"
        status = Status.UNKNOWN if required else Status.WARN
        yield Finding(status=status, reason="NoData", message=text, target="node")
        return
    found = count_faults(lines, ctx.host.uptime_seconds(), ctx.params.benign)
    for pattern, target, count, last in found[:MAX_FINDINGS]:
        yield Finding(
            status=pattern.status,
            reason="KernelFault",
            message=f"{pattern.name}: {count} {'line' if count == 1 else 'lines'}, the last: {last.strip()[:200]}",
            target=target,
            measurements=(_counted("kernel_log_faults_count", count, kind=pattern.name.replace(" ", "_")),),
            blame=pattern.blame,
            action=pattern.action,
        )
    if not found:
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"no known fault in {len(lines)} lines",
            target="node",
            measurements=(_counted("kernel_log_lines_count", len(lines)),),
        )


def count_faults(
    lines: Sequence[LogLine], now_seconds: float, benign: tuple[str, ...] = ()
) -> list[tuple[Pattern, str, int, str]]:
    """Each kind of fault that counts now and its target, with the number of its lines and the last; the worst first."""
    counted: dict[tuple[str, Status, str], tuple[Pattern, str, int, str]] = {}
    for stamp, text in lines:
        pattern = find_fault(text, benign)
        if pattern is None:
            continue
        window = pattern.window_seconds
        # A line without a time may be of now.
        if window is not None and stamp is not None and now_seconds - stamp > window:
            continue
        target = find_target(pattern, text)
        key = (pattern.name, pattern.status, target)
        counted[key] = (pattern, target, counted[key][2] + 1 if key in counted else 1, text)
    return sorted(counted.values(), key=lambda item: item[0].status is not Status.FAIL)


def _counted(name: str, count: int, **labels: str) -> Measurement:
    return Measurement(name=name, value=float(count), lower=None, upper=None, origin="none", labels=labels)
