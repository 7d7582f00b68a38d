"""
The order of work on the event loop: syncs, which come by the hundred, give way to gates.

One gate of 64 nodes makes 64 nodes answer at once, several times. Served in order of arrival, the next gate would wait
for all of them at each of its steps. So work that may wait is done in slices: at most `SLICE_SECONDS` of it in one turn
of the loop, and none while something urgent is under way, for `URGENT_SECONDS` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.002
"""So long the backlog works in one turn of the loop; one piece more may have begun before."""
URGENT_SECONDS = 0.05
"""So long something urgent holds it back at most: neither a transaction that hangs nor a stream of gates may make nodes
silent."""

Work = Callable[[], None]


class Urgency:
    """Something urgent that is under way, until `end`. Safe to repeat."""

    __slots__ = ("_backlog",)

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog

    def end(self) -> None:
        """It is done, or waits for something that the backlog may bring."""
        self._backlog.ended(self)


_URGENCY: ContextVar[Urgency | None] = ContextVar("URGENCY", default=None)
ARRIVED: ContextVar[float | None] = ContextVar("ARRIVED", default=None)
"""When the request of this context began to be read, by `time.perf_counter`."""


class Backlog:
    """
    Work that may wait, on one event loop. `do` does it at once while there is time in this turn and nothing waits.

    `prior` is what a gate waits for: two of three pieces, as long as there are some. Work that raises is logged.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._prior: deque[Work] = deque()
        self._rest: deque[Work] = deque()
        self._urgent: set[Urgency] = set()
        self._spent = 0.0
        self._turn = 0
        self._turn_ends = False  # whether the end of this turn is scheduled
        self._held_since: float | None = None
        self._free_until = float("-inf")
        self._recheck: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._prior) + len(self._rest)

    def do(self, work: Work, *, prior: bool = False) -> None:
        """Do it now, or as soon as its turn comes."""
        if self._prior or self._rest or self._spent >= SLICE_SECONDS or self._held_back():
            (self._prior if prior else self._rest).append(work)
            self._go_on()
        else:
            self._work(work)
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """What runs within is urgent, until it ends or calls `no_longer_urgent`."""
        urgency = Urgency(self)
        self._urgent.add(urgency)
        token = _URGENCY.set(urgency)
        try:
            yield
        finally:
            _URGENCY.reset(token)
            urgency.end()

    def ended(self, urgency: Urgency) -> None:
        """That is no longer urgent. Safe to repeat."""
        self._urgent.discard(urgency)
        if len(self):
            self._go_on()

    def _held_back(self) -> bool:
        """Whether something urgent is under way. After `URGENT_SECONDS` of that the backlog has as long for itself."""
        if not self._urgent:
            self._held_since = None
            return False
        now = self._clock()
        if now < self._free_until:
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < URGENT_SECONDS:
            return True
        self._held_since, self._free_until = None, now + URGENT_SECONDS
        return False

    def _go_on(self) -> None:
        """See to it that what waits is done: in the next turn, or when what is urgent has had its time."""
        loop = asyncio.get_running_loop()
        if not self._held_back():
            if self._recheck is not None:
                self._recheck.cancel()
                self._recheck = None
            if not self._turn_ends:
                self._turn_ends = True
                loop.call_soon(self._next_turn)
        elif self._recheck is None:
            self._recheck = loop.call_later(URGENT_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._recheck = None
        if len(self):
            self._go_on()

    def _next_turn(self) -> None:
        """A new turn of the loop: a new slice."""
        self._turn_ends, self._spent = False, 0.0
        while len(self) and self._spent < SLICE_SECONDS and not self._held_back():
            self._work(self._next())
        if len(self):
            self._go_on()

    def _next(self) -> Work:
        """The piece whose turn it is: a flood of what claims to be prior must not make nodes silent."""
        self._turn = (self._turn + 1) % 3
        first, second = (self._rest, self._prior) if self._turn == 0 else (self._prior, self._rest)
        return (first or second).popleft()

    def _work(self, work: Work) -> None:
        began = self._clock()
        try:
            work()
        except Exception:
            log.exception("a piece of work of the backlog failed")
        self._spent += self._clock() - began


def no_longer_urgent() -> None:
    """What is under way in this context waits for nodes from now on."""
    if (urgency := _URGENCY.get()) is not None:
        urgency.end()
