"""What a device counts of a check beside its results: the time it compiled, and the work that it left to the host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from checks.contract import Device, Finding, Status


class Stopwatch:
    """How long a device has compiled since the start of the stopwatch: by its own count, else by the clock."""

    def __init__(self, device: Device | None) -> None:
        self._count = getattr(device, "compile_seconds", None)
        self._started = time.monotonic()
        self._before = self._count() if self._count is not None else None

    def seconds(self, *, first_run: bool = False) -> float:
        """Seconds of compilation; without a count of the device 0.0, or with `first_run` the whole time."""
        if self._count is not None and self._before is not None:
            return max(0.0, float(self._count()) - float(self._before))
        return time.monotonic() - self._started if first_run else 0.0


def with_fallbacks(device: Device | None, items: Iterator[Any]) -> Iterator[Any]:
    """What a check yields, and an unknown finding where the host's processor did work of the device."""
    fallbacks = getattr(device, "fallbacks", None)
    if device is None or fallbacks is None:
        yield from items
        return
    fallbacks()
    yield from items
    names: Sequence[str] = fallbacks()
    if names:
        text = f"the host's processor did {', '.join(names[:8])} for the device, so the device was not tested with it"
        yield Finding(status=Status.UNKNOWN, reason="HostFallback", message=text, target=device.target)
