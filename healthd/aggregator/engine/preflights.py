"""
Gates of several hooks: settles their two-step end, and answers the roll call of a preflight.

Also here:

- who has come to a preflight, and what each was started with. In memory: it lasts as long as the gate's aggregator.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from healthd.aggregator.gate import Handshake
from healthd.core.errors import BadInputError, ConflictError
from healthd.core.model import Decision, HandshakeAnswer, HandshakeBody, Verdict
from healthd.core.node_name import can_name
from healthd.core.wire import FROM_OUTSIDE

# Gates whose end is being settled at once; the aggregator of a preflight has one.
MOST_HANDSHAKES = 1000

MOST_PROCESSES = 100_000
"""Processes that may answer: some thousand nodes, each with a process for every device."""
MOST_OPTIONS = 16
LONGEST_TEXT = 300
MOST_ASKED = 64
"""Ranks whose hosts one process asks for: those that one decision names."""
MOST_NAMED = 8
"""Ranks that one sentence names; the others are counted."""


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


@dataclass
class RollCall:
    """The processes that have come, by rank and local rank; `told` of them know of a difference; `nodes` they run."""

    came: dict[tuple[int, int], RollCallBody] = field(default_factory=dict)
    told: set[tuple[int, int]] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    wait_seconds: float | None = None
    _first: Mapping[str, str] | None = field(default=None, init=False)
    _odd: set[tuple[int, int]] = field(default_factory=set, init=False)  # whose options are not those of the first
    _difference: str | None = field(default=None, init=False)

    def answer(self, body: RollCallBody) -> RollCallAnswer:
        """Take in a process, which may ask again. BadInputError for what cannot be meant, ConflictError when full."""
        _check(body)
        key = (body.rank, body.local_rank)
        if key not in self.came and len(self.came) >= MOST_PROCESSES:
            raise ConflictError(f"{MOST_PROCESSES} processes have answered already")
        self.came[key] = body
        self.nodes.add(body.node)
        if self.wait_seconds is None:
            self.wait_seconds = body.wait_seconds
        self._compare(key, body.options)
        if self._difference is not None:
            self.told.add(key)
        all_told = self._difference is not None and len(self.told) == len(self.came)
        asked = {rank: self.came.get((rank, 0)) for rank in body.asked}
        return RollCallAnswer(
            difference=self._difference,
            wait_seconds=self.wait_seconds,
            all_told=all_told,
            hosts={str(rank): one.host for rank, one in asked.items() if one is not None and one.host},
        )

    def _compare(self, key: tuple[int, int], options: Mapping[str, str]) -> None:
        """With the first that came; all are gone through only for one that differs, or has changed its options."""
        if self._first is None:
            self._first = options
        was_odd, is_odd = key in self._odd, options != self._first
        if not (was_odd or is_odd):
            return
        (self._odd.add if is_odd else self._odd.discard)(key)
        self._difference = difference((rank, one.options) for (rank, _), one in sorted(self.came.items()))


@dataclass(frozen=True, kw_only=True)
class RollCallBody:
    """One process of a preflight: it runs `node`, number `rank`."""

    __pydantic_config__ = FROM_OUTSIDE

    node: str
    rank: int
    options: Mapping[str, str]
    """What it was started with, each as people write it."""
    local_rank: int = 0
    """It counts the processes of a node."""
    wait_seconds: float | None = None
    """How long the gate is to hold; the main node says it."""
    host: str = ""
    """What its machine calls itself; empty: not known."""
    asked: tuple[int, ...] = ()
    """Ranks whose hosts it wants to know."""


@dataclass(frozen=True, kw_only=True)
class RollCallAnswer:
    """
    `difference` says which ranks were started otherwise than others; None while all are alike. `wait_seconds` is None
    until the main node has come. `all_told`: there is a difference, and all who have come know it. `hosts` are those of
    the ranks that were asked for, by rank, as far as they are known.
    """

    difference: str | None
    wait_seconds: float | None
    all_told: bool
    hosts: Mapping[str, str] = field(default_factory=dict)


def difference(processes: Iterable[tuple[int, Mapping[str, str]]]) -> str | None:
    """The first option that is not the same of all processes, by their ranks; None where all are alike."""
    processes = list(processes)
    for name in dict.fromkeys(name for _, options in processes for name in options):
        ranks: dict[str, dict[int, None]] = {}
        for rank, options in processes:
            ranks.setdefault(options.get(name, "not given"), {})[rank] = None
        if len(ranks) > 1:
            said = " and ".join(f"{value} on {_ranks(list(which))}" for value, which in ranks.items())
            return f"the ranks were not started alike: {name} is {said}; start all of them with the same value"
    return None


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _check(body: RollCallBody) -> None:
    texts = (body.node, *body.options, *body.options.values())
    if len(body.options) > MOST_OPTIONS or not all(len(text) <= LONGEST_TEXT and text.isprintable() for text in texts):
        raise BadInputError(f"at most {MOST_OPTIONS} options of at most {LONGEST_TEXT} printable characters each")
    if body.host and not can_name(body.host):
        raise BadInputError(f"host {body.host[:80]!r} is not a host name")
    if len(body.asked) > MOST_ASKED:
        raise BadInputError(f"asked: at most {MOST_ASKED} ranks, not {len(body.asked)}")
    if not 0 <= body.rank < MOST_PROCESSES or not 0 <= body.local_rank < MOST_PROCESSES:
        raise BadInputError(f"rank and local_rank must be from 0 to {MOST_PROCESSES - 1}")
    if body.wait_seconds is not None and body.wait_seconds < 0:
        raise BadInputError(f"wait_seconds must be 0 or more, not {body.wait_seconds}")
