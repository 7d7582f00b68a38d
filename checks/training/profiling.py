"""Which operations take the time of a step: one more of it under torch's profiler, in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checks.contract import Device

_SHOWN = 3
_LONGEST_SECONDS = 20.0  # of a step that is profiled: a profile takes memory for each of its events


def profile(device: Device, operation: Callable[[], object], seconds: float) -> str:
    """
    The operations that took most of the time of one more run, with their shares; empty where nobody can say.

    `seconds` is what a run takes. A device that records work and does it later runs programs, not operations: torch's
    profiler would tell how long the recording took.
    """
    if hasattr(device, "fallbacks") or not 0 < seconds <= _LONGEST_SECONDS:
        return ""
    profiler = device.torch.profiler
    on_gpu = str(device.torch_device).startswith("cuda")
    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler.profile(activities=activities) as found:
        operation()
        device.synchronize()
    times = {event.key: _own_time(event, on_gpu=on_gpu) for event in found.key_averages()}
    whole = sum(times.values())
    if whole <= 0:
        return ""
    most = sorted(times, key=lambda name: -times[name])[:_SHOWN]
    shares = ", ".join(f"{name} {100 * times[name] / whole:.0f} %" for name in most)
    return f"most of the time of one more step went to {shares}"


def _own_time(event: Any, *, on_gpu: bool) -> float:
    """Microseconds of an operation without those that it calls."""
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return float(getattr(event, name, 0.0))
