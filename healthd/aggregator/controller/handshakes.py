"""The preflights whose end is being settled: who waits for what. The rules are in `handshake`, which is pure."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from healthd.aggregator.gate.handshake import Handshake
from healthd.core.errors import BadInputError
from healthd.core.model import Decision, Verdict

# Gates whose end is being settled at once; a preflight's aggregator has one.
MOST_HANDSHAKES = 1000


@dataclass(frozen=True, kw_only=True)
class HandshakeBody:
    """A step of a preflight's end: `event` is acknowledge, withdraw, wait, told or ended."""

    node: str
    event: Literal["acknowledge", "withdraw", "wait", "told", "ended"]


@dataclass(frozen=True, kw_only=True)
class HandshakeAnswer:
    """`go` is None until it is settled; see `healthd.aggregator.gate.handshake`."""

    go: bool | None
    missing: tuple[str, ...]
    all_told: bool
    over: bool


class Handshakes:
    """The handshakes under way: `parts.stopping` and every step wake those who wait."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: OrderedDict[str, Handshake] = OrderedDict()
        self._moved = asyncio.Condition()
        self._stopping = False

    async def stop(self) -> None:
        """Hold nobody any longer."""
        self._stopping = True
        async with self._moved:
            self._moved.notify_all()

    async def step(
        self,
        gate: str,
        nodes: tuple[str, ...],
        decision: Decision,
        body: HandshakeBody,
        wait: float,
        *,
        came: AbstractSet[str] | None = None,
    ) -> HandshakeAnswer:
        """
        Take in an event; then, for `acknowledge` and `wait`, hold until the next thing to know, at most `wait` s.

        `came` are the nodes that are there to be told the end: nobody waits for the others. None: all may be.
        """
        shake = self._of(gate, nodes, decision)
        if body.node not in shake.included | frozenset(nodes):
            raise BadInputError(f"{body.node[:80]!r} is not one of the nodes of gate {gate}")
        if came is not None:
            there = frozenset(name for name in nodes if name in came or name == body.node)
            shake = self._open[gate] = dataclasses.replace(shake, everyone=shake.included | there)
        now = time.monotonic()
        steps = {
            "acknowledge": lambda: shake.acknowledge(body.node, now),
            "withdraw": lambda: shake.withdraw(body.node, now),
            "wait": lambda: shake.settle(now),
            "told": lambda: shake.settle(now).tell(body.node),
            "ended": lambda: shake.end(body.node),
        }
        known = (shake.go, shake.all_told, shake.over)
        self._open[gate] = shake = steps[body.event]()
        if (shake.go, shake.all_told, shake.over) != known or body.event in ("told", "ended"):
            async with self._moved:
                self._moved.notify_all()
        if body.event in ("acknowledge", "wait"):
            shake = await self._hold(gate, shake, now + wait, told=shake.go is not None and body.event == "wait")
        return HandshakeAnswer(go=shake.go, missing=shake.missing, all_told=shake.all_told, over=shake.over)

    async def _hold(self, gate: str, shake: Handshake, end: float, *, told: bool) -> Handshake:
        """Until go is settled; for one who knows that already, until everybody was told or the job is over."""
        async with self._moved:
            while True:
                now = time.monotonic()
                shake = self._open.get(gate, shake).settle(now)  # it may have made room for another one
                if gate in self._open:
                    self._open[gate] = shake
                news = shake.over or (shake.all_told if told else shake.go is not None)
                left = min(end, shake.deadline if shake.go is None else end) - now
                if news or now >= end or self._stopping:
                    return shake
                try:
                    async with asyncio.timeout(max(0.0, left)):
                        await self._moved.wait()
                except TimeoutError:
                    continue

    def _of(self, gate: str, nodes: tuple[str, ...], decision: Decision) -> Handshake:
        if gate not in self._open:
            included = frozenset(node.node for node in decision.nodes)
            admitted = decision.decision is Verdict.ADMIT
            self._open[gate] = Handshake(
                everyone=included | frozenset(nodes),
                included=included if admitted else frozenset(),
                deadline=time.monotonic() + self._seconds,
                go=None if admitted else False,
            )
            while len(self._open) > MOST_HANDSHAKES:
                self._open.popitem(last=False)
        return self._open[gate]
