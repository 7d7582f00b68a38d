"""Rejects that are held back until the nodes they accuse are out of the scheduler's way, or their time is over."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from checks.contract import Status
from healthd.core.evidence import reason
from healthd.core.model import Decision, Verdict

log = logging.getLogger(__name__)

MOST_PENDING = 1000
# Whoever asked and has not come back for the answer by then does not come any more.
FORGET_SECONDS = 600.0


@dataclass
class _Pending:
    """A reject that is held back until `nodes` are out of the way."""

    nodes: set[str]
    deadline: float
    done: asyncio.Event = field(default_factory=asyncio.Event)


class DeferredRejects:
    """On the event loop alone. `clock` counts seconds and never jumps."""

    def __init__(self, answer_seconds: float, *, clock: Callable[[], float]) -> None:
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._stopping = False

    def hold(self, gate_id: str, nodes: Iterable[str]) -> None:
        """The gate is rejected for these nodes."""
        if self._answer_seconds > 0 and len(self._pending) < MOST_PENDING:
            self._pending[gate_id] = _Pending(nodes=set(nodes), deadline=self._clock() + self._answer_seconds)

    async def settle(self, gate_id: str, decision: Decision, wait_seconds: float) -> Decision:
        """
        The decision, once its nodes are out of the way or the time for that is over; until then a hold.

        Waits for `wait_seconds` at most. Any other decision comes back as it is.
        """
        pending = self._pending.get(gate_id)
        if pending is None or decision.decision is not Verdict.REJECT:
            return decision
        left = min(wait_seconds, pending.deadline - self._clock())
        if left > 0 and not self._stopping:
            try:
                async with asyncio.timeout(left):
                    await pending.done.wait()
            except TimeoutError:
                log.debug("gate %s: its nodes are not out of the way yet", gate_id)
        if gate_id not in self._pending:
            return decision
        names = ", ".join(sorted(pending.nodes)[:8])
        if self._clock() >= pending.deadline:
            self._pending.pop(gate_id, None)
            log.warning("gate %s is answered although %s could not be taken out of the way in time", gate_id, names)
            return decision
        text = f"rejected; {names} is taken out of the scheduler's way first, so that the next attempt starts elsewhere"
        first = reason("Removing", text, status=Status.UNKNOWN)
        return dataclasses.replace(decision, decision=Verdict.HOLD, reasons=(first, *decision.reasons))

    def nodes(self) -> set[str]:
        """All nodes that somebody waits for."""
        return {node for pending in self._pending.values() for node in pending.nodes}

    def arrived(self, node: str) -> None:
        """It is out, or will not be: gates that wait for this node alone are answered."""
        for gate_id, pending in list(self._pending.items()):
            pending.nodes.discard(node)
            if not pending.nodes:
                del self._pending[gate_id]
                pending.done.set()

    def forget(self) -> None:
        """Drop those that nobody comes back for."""
        old = [i for i, pending in self._pending.items() if self._clock() - pending.deadline > FORGET_SECONDS]
        for gate_id in old:
            del self._pending[gate_id]

    def stop(self) -> None:
        """The aggregator ends: who is held is told so."""
        self._stopping = True
        for pending in self._pending.values():
            pending.done.set()
