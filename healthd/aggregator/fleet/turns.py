"""How many syncs go on in one turn of the event loop, so that a gate never waits for a crowd of them."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8
"""Syncs in one turn of the loop: about two milliseconds of work."""


class Turns:
    """
    Each sync waits for its turn before it is read, and once more before it is answered.

    Everything else that happens on the loop (a question of a gate, a commit, a decision) goes on between two turns,
    however many syncs have come at the same moment, or are woken at the same moment by one gate.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._free = AT_ONCE
        self._is_scheduled = False

    async def wait(self) -> None:
        """Until this sync may go on: at once where few do."""
        self._schedule()
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """A turn of the loop has passed."""
        self._is_scheduled = False
        self._free = AT_ONCE
        while self._waiting and self._free > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # one whose client has gone away is
                turn.set_result(None)
                self._free -= 1
        if self._free < AT_ONCE:
            self._schedule()
