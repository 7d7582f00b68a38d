"""
One process of a job at its gate, whichever hook it is: its line to the aggregator, the confirmation of an admission by
all that it includes, and the checks of its node meanwhile.

`gate --join` and `preflight` differ in what is around this: who runs the aggregator, how the members find each other,
and what follows an admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from healthd.core.backoff import Backoff
from healthd.core.errors import HealthdError, UnreachableError
from healthd.core.http.client import Endpoint
from healthd.core.http.gates import GateClient
from healthd.core.model import HandshakeAnswer, HandshakeBody, HandshakeEvent
from healthd.core.threads import in_thread

T = TypeVar("T")

RETRIES = Backoff(0.1, 2.0)


class GateLine:
    """
    The line to the aggregator of a gate. `gone_seconds` is after how long without an answer to one step of the
    handshake it counts as gone.
    """

    def __init__(self, endpoint: Endpoint, *, gone_seconds: float) -> None:
        self._endpoint = endpoint
        self._gone_seconds = gone_seconds

    async def call(self, work: Callable[[GateClient], T]) -> T:
        """Speak to it in a thread that nobody waits for; when this is cancelled, the thread asks nothing more."""
        with GateClient(self._endpoint) as aggregator:
            return await in_thread("line to the aggregator", lambda: work(aggregator))

    async def handshake(
        self, gate: str, node: str, event: HandshakeEvent, *, wait_seconds: float = 10.0
    ) -> HandshakeAnswer:
        """One step of the handshake, tried again for a while: the line may be cut at any moment."""
        step = HandshakeBody(node=node, event=event)
        loop = asyncio.get_running_loop()
        end, failures = loop.time() + self._gone_seconds, 0
        while True:
            try:
                return await self.call(lambda aggregator: aggregator.handshake(gate, step, wait_seconds=wait_seconds))
            except UnreachableError:
                failures += 1
                pause = RETRIES.after(failures)
                if loop.time() + pause > end:
                    raise
                await asyncio.sleep(pause)

    async def confirm(
        self, gate: str, node: str, *, seconds: float, event: HandshakeEvent = "acknowledge"
    ) -> HandshakeAnswer:
        """
        Confirm the start, or only `wait` for the others: what is settled. UnreachableError where nothing is in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            answer = await self.handshake(gate, node, event)
            if answer.go is not None:
                return answer
            if loop.time() > end:
                raise UnreachableError(f"aggregator {self._endpoint.names} did not confirm the start in time")


async def check_node(run_executor: Callable[[], Awaitable[None]]) -> None:
    """Run the executor of this node, to be cancelled when the gate is answered. HealthdError when it ends before."""
    await run_executor()
    raise HealthdError("the checks of this node ended before the gate did")
