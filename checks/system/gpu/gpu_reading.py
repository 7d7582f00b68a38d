"""What the passive checks of GPUs share: asking NVML about each, and what to say where it does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from checks.contract import Action, Context, Finding, Status
from checks.host.nvml import Gpu, GpuLostError, NvmlError, opened

T = TypeVar("T")

MIN_ELAPSED_SECONDS = 1.0  # over less, one burst is taken for a rate
MAX_REMEMBERED = 64  # GPUs: those of a machine, and those that were exchanged since its boot


@dataclass(frozen=True)
class Reading(Generic[T]):
    """What NVML said of one GPU. `key` names the GPU itself, so that counters of another are not taken for its own."""

    target: str
    key: str
    said: T


def read_gpus(ctx: Context[Any], read: Callable[[Gpu], T]) -> list[Reading[T] | Finding]:
    """
    A reading of each GPU of the inventory, or why there is none.

    A GPU that does not answer is lost; a library that does not fit the driver keeps every job from the GPUs; anything
    else is unknown. One skip on a node without NVIDIA GPUs.
    """
    if ctx.inventory.get("accelerator") != "cuda":
        text = "no NVIDIA GPU is in use here"
        return [Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")]
    devices = ctx.inventory.get("devices") or ()
    if not devices:
        text = "the driver shows no GPU"
        return [Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")]
    found: list[Reading[T] | Finding] = []
    try:
        with opened(ctx.host) as nvml:
            for device in devices:
                target = str(device.get("target"))
                try:
                    said = read(nvml.gpu(device))
                except GpuLostError as error:
                    text = f"the GPU does not respond: {error}"
                    found.append(Finding(status=Status.FAIL, reason="DeviceLost", message=text, target=target))
                except NvmlError as error:
                    found.append(Finding(status=Status.UNKNOWN, reason=error.reason, message=str(error), target=target))
                else:
                    found.append(Reading(target, str(device.get("serial") or device.get("bdf") or target), said))
    except NvmlError as error:
        found.append(of_nvml(error))
    return found


def of_nvml(error: NvmlError) -> Finding:
    """The finding where NVML as a whole cannot be asked."""
    if error.reason == "VersionMismatch":
        return Finding(status=Status.FAIL, reason=error.reason, message=str(error), target="node", action=Action.REBOOT)
    return Finding(status=Status.UNKNOWN, reason=error.reason, message=str(error), target="node")


def not_told(target: str, failed: tuple[str, ...]) -> Iterator[Finding]:
    """What NVML should have told and did not."""
    if failed:
        text = f"NVML does not report: {'; '.join(failed)[:400]}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def remembered(ctx: Context[Any]) -> dict[str, Mapping[str, Any]]:
    """
    What was remembered of each GPU in this boot.

    What a check remembers is `{"gpus": {key: {...}}}`.
    """
    previous = ctx.previous
    if previous is None or not previous.evidence or previous.boot_id != ctx.host.boot_id():
        return {}
    gpus = previous.evidence[-1].data.get("gpus")
    if not isinstance(gpus, dict):
        return {}
    return {key: one for key, one in list(gpus.items())[:MAX_REMEMBERED] if isinstance(one, dict)}


def earlier(
    ctx: Context[Any], key: str, *, least_seconds: float = MIN_ELAPSED_SECONDS
) -> tuple[Mapping[str, Any], float] | None:
    """What was remembered of a GPU, and how many seconds ago; None of it right after the last look."""
    found = remembered(ctx).get(key)
    if found is None or ctx.previous is None:
        return None
    seconds = ctx.previous.elapsed_seconds
    return (found, seconds) if least_seconds <= seconds < float("inf") else None


def risen(before: Mapping[str, Any], name: str, now: int | None) -> int | None:
    """By how much a counter rose; None where one of the two is not known, or it was set back meanwhile."""
    old = before.get(name)
    if now is None or not isinstance(old, int) or isinstance(old, bool) or now < old:
        return None
    return now - old
