"""
DMA aborts as the driver counts them: whether the device was reset after the last one, and whether it came again.

The count itself stays until the driver is loaded again. So the time at which it rose is remembered, and compared with
the resets in the kernel log. Source of what to do: aws-neuron-sdk issue 1390.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from checks.accelerators.neuron.leaves import DeviceCounters
from checks.contract import Action, Status
from checks.host.kernel import LogLine
from checks.host.machine import Host, HostError
from checks.system.kernel.fault_lines import find_fault
from checks.system.kernel.fault_stages import Stage
from checks.system.neuron.neuron_kinds import KINDS, REPLACE_IT, Kind
from checks.system.neuron.neuron_log import Devices, ResetReader, target_of

ABORTS = "hw_dma_abort_error"
_LINE = "Neuron DMA error"


class Abort(NamedTuple):
    """
    What is known of a device that has counted aborts, `total` in all. `seen_seconds` is when the last one came, since
    boot, as nearly as that is known; `again`: one came after a reset that had followed another.
    """

    total: int
    seen_seconds: float
    again: bool
    stage: Stage


def read_aborts(
    host: Host, devices: Mapping[str, DeviceCounters], before: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Abort]:
    """
    The devices that have counted aborts; `before` is what the last look of this boot has returned, as JSON.

    Of a device whose count cannot be read this time that is what is known of it still.
    """
    earlier = {target: Abort(**one) for target, one in (before or {}).items() if set(one) == set(Abort._fields)}
    counts = {target: _count(device) for target, device in devices.items()}
    found = {target: abort for target, abort in earlier.items() if counts.get(target) is None}
    if not any(counts.values()):
        return found
    try:
        lines = host.kernel_log()
    except HostError:  # `kernel_log` tells that; no reset is known then
        lines = []
    names = Devices({}, {device.number: target for target, device in devices.items()}, whole=True)
    for target, count in counts.items():
        if count:
            resets, aborts = read_times(lines, target, names)
            found[target] = next_abort(earlier.get(target), count, host.uptime_seconds(), resets, aborts)
    return found


def _count(device: DeviceCounters) -> int | None:
    """Over the cores of a device; None where one of them does not tell."""
    row, cores = device.cores.get(ABORTS, {}), {core for row in device.cores.values() for core in row}
    known = [count for core in cores if (count := row.get(core)) is not None]
    return sum(known) if cores and len(known) == len(cores) else None


def read_times(lines: list[LogLine], target: str, devices: Devices) -> tuple[list[float], list[float]]:
    """When a device was reset, and when the runtime logged aborts of it, in seconds since boot."""
    reader, resets, aborts = ResetReader(), [], []
    for stamp, text in lines:
        reset = reader.read(text)
        if stamp is None:
            continue
        if reset is not None and reset.covers(target, devices):
            resets.append(stamp)
        elif _is_abort(text) and target_of(text, devices) == target:
            aborts.append(stamp)
    return resets, aborts


def _is_abort(text: str) -> bool:
    pattern = find_fault(text)
    return pattern is not None and pattern.name == _LINE


def next_abort(before: Abort | None, count: int, now_seconds: float, resets: list[float], aborts: list[float]) -> Abort:
    """
    What is known after a look; pure. Without a line of the log the last abort came when its count was seen.

    The log forgets old lines: a reset that an earlier look has seen stays one.
    """
    logged = max(aborts, default=None)
    known_reset = before is not None and before.stage == "reset"
    if before is not None and count == before.total:
        seen, again = before.seen_seconds, before.again
    else:
        seen = now_seconds if logged is None else logged
        earlier = [stamp for stamp in aborts if stamp < seen]
        if before is not None and count > before.total:
            earlier.append(before.seen_seconds)
            again = before.again or known_reset
        else:
            again = False
        known_reset = False  # it was of the abort before
        again = again or (logged is not None and any(old < reset < logged for reset in resets for old in earlier))
    was_reset = known_reset or any(reset > seen for reset in resets)
    stage: Stage = "again" if again else "reset" if was_reset else "new"
    return Abort(count, seen, again, stage)


def abort_kind(stage: Stage) -> Kind:
    """How the count is judged."""
    kind = KINDS[ABORTS]
    if stage == "reset":
        advice = "the device was reset since: run the active checks"
        return kind._replace(status=Status.WARN, action=Action.INSPECT, advice=advice)
    if stage == "again":
        return kind._replace(action=Action.REPLACE, advice=f"it came back after a reset: {REPLACE_IT}")
    return kind
