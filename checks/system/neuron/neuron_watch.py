"""
neuron-monitor as the other source of ECC counters, where sysfs has none.

It tells what came within a second, so it is remembered from look to look; a zero of a moment is no health.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from checks.accelerators.neuron.monitor import Reading, read_monitor
from checks.contract import Action, Finding, Status
from checks.host.machine import Host, HostError
from checks.printable import some
from checks.system.neuron.neuron_kinds import REPLACE_IT

if TYPE_CHECKING:
    from checks.system.neuron.neuron_counters import Params


class Watch(NamedTuple):
    """
    What was seen so far in this boot.

    `age_seconds` since neuron-monitor was started last, `watched_seconds` of all its periods together; `seen` are the
    events by target and counter (0 included: it is what says that there is a counter at all); `error` is a reason and a
    text where the last start gave nothing.
    """

    age_seconds: float
    watched_seconds: float
    seen: dict[str, dict[str, int]]
    hardware_errors: int
    error: tuple[str, str] | None
    skipped: tuple[str, ...]


def next_watch(host: Host, data: Mapping[str, Any] | None, elapsed_seconds: float, params: Params) -> Watch:
    """The watch after this look: neuron-monitor is started where it has not been for a while."""
    last = Watch(float("inf"), 0.0, {}, 0, None, ())
    if data:  # what another version of this check has left may have other members
        last = last._replace(**{name: data[name] for name in Watch._fields if name in data})
    last = last._replace(age_seconds=last.age_seconds + elapsed_seconds)
    if not params.monitor:
        return last._replace(age_seconds=0.0, error=("NoData", "neuron-monitor is not to be started (monitor = false)"))
    if last.age_seconds < params.monitor_interval_seconds:
        return last
    try:
        reading = read_monitor(host, timeout_seconds=params.monitor_timeout_seconds)
    except HostError as error:
        return last._replace(age_seconds=0.0, error=(error.reason, str(error)), skipped=())
    return add_reading(last._replace(age_seconds=0.0), reading)


def add_reading(last: Watch, reading: Reading | None) -> Watch:
    """The watch with one more object of the stream; events add up, because each object counts its own period."""
    if reading is None:
        return last._replace(error=("NoData", "neuron-monitor wrote something that is not understood"), skipped=())
    seen = {target: dict(names) for target, names in last.seen.items()}
    for index, counts in (reading.ecc or {}).items():
        names = seen.setdefault(f"neuron:{index}", {})
        for name, count in counts.items():
            if count is None:
                names.pop(name, None)
            else:
                names[name] = names.get(name, 0) + count
    return Watch(
        age_seconds=last.age_seconds,
        watched_seconds=last.watched_seconds + (reading.period_seconds or 0.0),
        seen=seen,
        hardware_errors=last.hardware_errors + (reading.hardware_errors or 0),
        error=None if reading.ecc is not None else ("NoData", "neuron-monitor tells no hardware counters"),
        skipped=reading.skipped,
    )


def judge_watch(watch: Watch, lacking: Mapping[str, Sequence[str]], why: str | None) -> Iterator[Finding]:
    """
    What neuron-monitor saw of the counters that sysfs lacks, by target.

    Events fail, as they would have been counted; a counter without events is a warning, none at all unknown.
    """
    for target, names in lacking.items():
        for name in names:
            if count := watch.seen.get(target, {}).get(name, 0):
                text = f"{name}: {count} seen by neuron-monitor; {REPLACE_IT}"
                yield Finding(
                    status=Status.FAIL, reason="EccErrors", message=text, target=target, action=Action.REPLACE
                )
    if watch.hardware_errors:
        text = f"{watch.hardware_errors} executions failed by hardware while neuron-monitor watched"
        yield Finding(status=Status.FAIL, reason="HardwareErrors", message=text, target="node")
    told = {
        target
        for target, names in lacking.items()
        if watch.error is None and all(name in watch.seen.get(target, {}) for name in names)
    }
    unseen = [target for target in lacking if target not in told]
    if told:
        text = (
            f"sysfs has no ECC counters of {some(sorted(told))}, so errors are seen only while neuron-monitor is "
            f"asked: {watch.watched_seconds:.3g} s so far; see whether /sys is the host's and which driver is loaded"
        )
        yield Finding(status=Status.WARN, reason="NoData", message=text, target="node")
    if unseen or not lacking:
        reason, text = watch.error or ("NoData", "neuron-monitor does not name it")
        skipped = f" ({'; '.join(watch.skipped)})" if watch.skipped else ""
        what = f"of {some(unseen)}" if unseen else "of any Neuron device"
        yield Finding(
            status=Status.UNKNOWN,
            reason=reason,
            message=f"sysfs has no ECC counters {what}{': ' if why else ''}{why or ''}; {text}{skipped}",
            target=unseen[0] if len(unseen) == 1 else "node",
        )
