"""
Profiles of probes that are slow: one more repetition under torch's profiler, as a sentence and as a trace.

The trace is in the Trace Event Format (Chrome, Perfetto), JSON compressed by gzip. A profile is bounded: it is left out
where the time limit of the check leaves no room for it, and a trace keeps the longest events that fit in its size.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import MAX_PROFILE_BYTES, PROFILE_FORMAT, Context, Device, Finding, Profile, Status

SLOW = "SlowDevice"
MAX_EVENTS = 20_000
"""Events in a trace: the longest. A step of the large model has 2,700."""
_SHOWN = 3
_LONGEST_SECONDS = 20.0  # of an operation that is profiled: a profile takes memory for each of its events
# See `_time_for`: a profiled operation takes several times as long, and besides the profiler takes 2 s to start and 3 s
# to read _MOST_SEEN events, several times that on a busy machine.
_ROOM = 5.0
_FLOOR_SECONDS = 30.0
_MOST_SEEN = 50_000
"""Events of a run, counted before they are read: reading takes 60 microseconds for each."""
# What torch's autograd puts around operations: what it takes is not an operation's.
_WRAPPER = "autograd::"


@dataclass(frozen=True)
class Taken:
    """One operation under the profiler."""

    said: str
    """The operations that took most of its time, in words."""
    events: Sequence[Mapping[str, Any]]
    """In the Trace Event Format."""


def with_profile(
    ctx: Context[Any],
    device: Device,
    name: str,
    operation: Callable[[], object],
    seconds: float,
    findings: Sequence[Finding],
) -> Iterator[Finding | Profile]:
    """
    Findings on the speed of `operation`, after a profile of one more run of it where one of them says that it is slow.

    `seconds` is what a run takes, and `name` what it is, for the id of the profile. What is slow says which operations
    took the time.
    """
    wanted = ctx.profiling
    slow = [one for one in findings if one.status is not Status.PASS and one.reason == SLOW]
    if wanted is None or not (slow or wanted.always):
        yield from findings
        return
    left = wanted.until - time.monotonic()
    made = _made(device, name, operation, seconds) if _time_for(device, seconds, left) else None
    if made is None:
        yield from findings
        return
    yield made
    about = slow or findings
    for one in findings:
        if one in about:
            message = f"{one.message}; {made.said}" if slow else one.message
            one = dataclasses.replace(one, message=message, profile=made.id)
        yield one


def _made(device: Device, name: str, operation: Callable[[], object], seconds: float) -> Profile | None:
    """A profile, or None: whatever goes wrong in the profiler is a line on standard error, never a lost finding."""
    try:
        taken = _take(device, operation)
        return None if taken is None else _profile(device, name, seconds, taken)
    except Exception as error:  # noqa: BLE001  a profiler may raise anything
        sys.stderr.write(f"no profile of {name}: {type(error).__name__}: {error}\n")
        return None


def _time_for(device: Device, seconds: float, left: float) -> bool:
    """
    Whether there is a profile to be had: of operations that run when they are called, and end long before the time.

    A device that records work and does it later runs programs, not operations: torch's profiler would tell how long the
    recording took.
    """
    needed = _FLOOR_SECONDS + _ROOM * seconds
    return not hasattr(device, "fallbacks") and 0 < seconds <= _LONGEST_SECONDS and needed < left


def _take(device: Device, operation: Callable[[], object]) -> Taken | None:
    """One run under the profiler; None where it saw no operation, or too many events."""
    profiler = device.torch.profiler
    on_gpu = str(device.torch_device).startswith("cuda")
    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler.profile(activities=activities) as found:
        operation()
        device.synchronize()
    if len(found.profiler.kineto_results.events()) > _MOST_SEEN:
        return None
    said = in_words({event.key: _own_time(event, on_gpu=on_gpu) for event in found.key_averages() if _on_host(event)})
    return Taken(said, [_event(event) for event in found.events()]) if said else None


def in_words(microseconds: Mapping[str, float]) -> str:
    """A sentence of the operations that took most of the time, by their own times; empty without an operation."""
    return shares({name: time for name, time in microseconds.items() if "::" in name and not name.startswith(_WRAPPER)})


def shares(times: Mapping[str, float]) -> str:
    """A sentence of what took most of the time; empty where nothing took any."""
    whole = sum(times.values())
    if whole <= 0:
        return ""
    first, *others = sorted(times, key=lambda name: (-times[name], name))[:_SHOWN]
    most = [first, *(name for name in others if times[name] >= whole / 100)]
    text = ", ".join(f"{name} {100 * times[name] / whole:.0f} %" for name in most)
    return f"in one more run, most time was spent in {text}"


def _own_time(event: Any, *, on_gpu: bool) -> float:
    """Microseconds of an operation without those that it calls; on a GPU those of its kernels."""
    return float(getattr(event, "self_device_time_total" if on_gpu else "self_cpu_time_total", 0.0))


def _on_host(event: Any) -> bool:
    """Whether it is an operation: kernels are events of the device, and their time is that of operations too."""
    return str(event.device_type).endswith("CPU")


def _event(event: Any) -> dict[str, Any]:
    """A complete event of the Trace Event Format, in microseconds."""
    span = event.time_range
    return {
        "name": str(event.name)[:200],
        "cat": "op" if _on_host(event) else "kernel",
        "ph": "X",
        "ts": round(float(span.start), 3),
        "dur": round(float(span.end) - float(span.start), 3),
        "pid": "host" if _on_host(event) else "device",
        "tid": int(event.thread) if isinstance(event.thread, int) else 0,
    }


def _profile(device: Device, name: str, seconds: float, taken: Taken) -> Profile:
    now = time.time()
    about = {
        "probe": name,
        "target": device.target,
        "device": device.key,
        "said": taken.said,
        "seconds": seconds,
        "taken_at": round(now, 3),
    }
    return Profile(
        id=profile_id(name, device.target, now),
        target=device.target,
        said=taken.said,
        format=PROFILE_FORMAT,
        content=packed(about, taken.events),
    )


def profile_id(name: str, target: str, seconds: float) -> str:
    """An id for what was profiled on a target at a time (seconds since the epoch)."""
    stamp = time.strftime("%Y%m%dt%H%M%Sz", time.gmtime(seconds))
    text = re.sub(r"[^a-z0-9_]+", "-", f"{name} {target}".lower()).strip("-")[:64].rstrip("-")
    return f"{text}-{stamp}-{os.urandom(3).hex()}"


def packed(about: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bytes:
    """The trace, compressed; the longest events of it where all of them are too many or too large."""
    most = MAX_EVENTS
    while True:
        longest = sorted(events, key=lambda event: -event["dur"])[:most]
        kept = sorted(longest, key=lambda event: event["ts"])
        data = {**about, "events_left_out": len(events) - len(kept)}
        text = json.dumps({"displayTimeUnit": "ms", "otherData": data, "traceEvents": kept}, separators=(",", ":"))
        content = gzip.compress(text.encode(), mtime=0)
        if len(content) <= MAX_PROFILE_BYTES or not kept:
            return content
        most = len(kept) // 2
