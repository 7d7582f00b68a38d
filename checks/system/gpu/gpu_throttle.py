"""GPUs that lower their clocks to protect themselves, and how hot they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import NO_LIMIT, Context, Evidence, Finding, Limit, Measurement, Status, check, make_finding
from checks.host.nvml import Clocks, Gpu
from checks.limits import within
from checks.system.gpu.gpu_reading import Reading, earlier, not_told, read_gpus

# nvmlClocksEventReasons (nvmlClocksThrottleReasons before driver 535). Source: nvml.h. The hardware's own slowdowns
# halve the clocks or worse. What is not here is how GPUs work: idle, set by somebody, at the power limit.
_HARDWARE: Mapping[int, str] = {
    0x40: "too hot, as measured by the hardware",
    0x80: "the power supply requested less power (power brake)",
    0x08: "hardware slowdown",
}
_SOFTWARE: Mapping[int, str] = {0x20: "too hot, as measured by the driver"}


@dataclass(frozen=True)
class Params:
    """Bounds."""

    fail_seconds: float = 50.0  # seen at two looks, a minute apart by default; a change of clocks shows it for a moment
    margin_celsius: float = 0.0  # below the temperature at which the GPU slows down; more warns earlier


@check(tier="passive", interval_seconds=60, timeout_seconds=20, accelerators=True)
def gpu_throttle(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    No GPU lowers its clocks to protect itself, and none has reached its temperature limit.

    A slowdown by the hardware is a warning at first, because a clock change causes it for a moment, and a failure if it
    lasts. The power limit, clock settings and idling are not faults. Temperatures are judged against the slowdown
    temperature that the GPU itself reports.

    Reads:   NVML (nvidia-ml-py): clock event reasons, temperature, slowdown temperature.
    Judges:  fail Throttled (by the hardware, lasting), Overheating, DeviceLost, VersionMismatch | warn Throttled |
             unknown NoData, MissingTool, NoPermission | skip NotApplicable (no NVIDIA GPU).
    Cost:    some 10 ms; harmless to jobs (see gpu_memory).
    Source:  NVML API reference, NvmlClocksEventReasons and nvmlTemperatureThresholds.
             Unverified on hardware: a GPU that really throttles.
    """
    remembered: dict[str, Any] = {}
    for reading in read_gpus(ctx, Gpu.clocks):
        if isinstance(reading, Finding):
            yield reading
            continue
        before = earlier(ctx, reading.key, least_seconds=0.0)
        slowed = _named(reading.said.reasons, _HARDWARE)
        seconds = 0.0
        if before is not None and slowed:
            lasted = before[0].get("slowed_seconds")
            if isinstance(lasted, (int, float)) and not isinstance(lasted, bool) and 0 <= lasted < float("inf"):
                seconds = lasted + before[1]
        remembered[reading.key] = {"slowed_seconds": seconds if slowed else None}
        yield from _judge(ctx, reading, slowed, seconds)
    if remembered:
        yield Evidence(target="node", key="gpu_throttle", data={"gpus": remembered})


def _judge(ctx: Context[Params], reading: Reading[Clocks], slowed: list[str], seconds: float) -> Iterator[Finding]:
    said, target = reading.said, reading.target
    yield from not_told(target, said.failed)
    warm = _named(said.reasons, _SOFTWARE)
    if slowed:
        lasting = seconds >= ctx.params.fail_seconds
        text = f"clocks are lowered: {', '.join(slowed)}" + (f", for {seconds:.0f} s" if lasting else "")
        yield make_finding(Status.FAIL if lasting else Status.WARN, "Throttled", text, target)
    elif warm:
        yield make_finding(Status.WARN, "Throttled", f"clocks are lowered: {', '.join(warm)}", target)
    if said.temperature is not None:
        limit = ctx.limit("gpu_temperature_celsius", target)
        if limit is NO_LIMIT and said.slowdown_temperature is not None:
            upper = said.slowdown_temperature - ctx.params.margin_celsius
            limit = Limit(lower=None, upper=upper, origin="derived")
        yield within(
            float(said.temperature),
            name="gpu_temperature_celsius",
            target=target,
            limit=limit,
            reason="Overheating",
            subject="temperature in degrees Celsius:",
        )
    elif said.reasons is None and not said.failed:
        yield make_finding(
            Status.UNKNOWN, "NoData", "reports neither temperature nor the reasons for its clocks", target
        )
    elif said.reasons is not None and not slowed and not warm and not said.failed:
        none = Measurement(name="gpu_throttle_reasons_count", value=0.0, lower=None, upper=None, origin="none")
        text = "clocks are not lowered; reports no temperature"
        yield Finding(status=Status.PASS, reason=None, message=text, target=target, measurements=(none,))


def _named(reasons: int | None, names: Mapping[int, str]) -> list[str]:
    """The reasons of a mask in words. The plain hardware slowdown says nothing more where its cause is told."""
    found = [text for bit, text in names.items() if reasons is not None and reasons & bit]
    return found[:-1] if len(found) > 1 and reasons is not None and reasons & 0x08 else found
