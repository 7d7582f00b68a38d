"""Those who wait until a gate is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Container


class Followers:
    """An event for each gate that somebody waits for. On the event loop alone."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._stopping = False

    async def wait(self, gate_id: str, seconds: float) -> None:
        """Until the gate is decided or gone, the aggregator stops, or the time is up: TimeoutError."""
        if self._stopping or seconds <= 0:
            return
        async with asyncio.timeout(seconds):
            await self._events.setdefault(gate_id, asyncio.Event()).wait()

    def wake(self, gate_id: str) -> None:
        """The gate is decided."""
        if (event := self._events.pop(gate_id, None)) is not None:
            event.set()

    def keep(self, open_gates: Container[str]) -> None:
        """Wake those whose gate is open no more."""
        for gate_id in [one for one in self._events if one not in open_gates]:
            self.wake(gate_id)

    def stop(self) -> None:
        """Wake everybody, and let nobody wait from now on."""
        self._stopping = True
        for event in self._events.values():
            event.set()
