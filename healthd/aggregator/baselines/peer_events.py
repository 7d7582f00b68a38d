"""Writes to the history of nodes when their peers show something of them, and when that is over."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.store.changes import PutEvent
from healthd.aggregator.store.store import Store
from healthd.core.errors import StoreError

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0
MOST_EACH_TURN = 100


class PeerEvents:
    """On the event loop alone; run `run()` as a task. `clock` gives seconds since the epoch."""

    def __init__(self, fleet: Fleet, store: Store, *, settle_seconds: float, clock: Callable[[], float]) -> None:
        """
        Nothing is written in the first `settle_seconds`: until all nodes have reported, the first few are no majority.
        """
        self._settle_seconds = settle_seconds
        self._begun: set[tuple[str, str]] = set()
        self._fleet = fleet
        self._store = store
        self._clock = clock

    async def run(self) -> None:
        """Write what is new, for ever. Ends by cancellation."""
        await asyncio.sleep(self._settle_seconds)
        while True:
            await asyncio.sleep(TURN_SECONDS)
            try:
                await self.write()
            except StoreError as error:
                log.debug("what nodes show of each other is written later: %s", error)

    async def write(self) -> None:
        """Write what is new now. StoreError, and it is still to be written."""
        peers = self._fleet.peers
        await self._write(peers.digests.news, "digest differs", "digest agrees", "its digests are those of its peers")
        await self._write(peers.jobs.news, "slow rank", "rank not slow", "no rank here is slow by its own time")

    async def _write(self, news: deque[tuple[str, str]], begins: str, ends: str, ended: str) -> None:
        told = [news.popleft() for _ in range(min(MOST_EACH_TURN, len(news)))]
        if not told:
            return
        now = self._clock()
        last = dict(told)  # of what came and went meanwhile there is nothing to be told
        events = [
            PutEvent(at=now, subject=node, kind=begins if message else ends, message=message or ended)
            for node, message in last.items()
            if message or (begins, node) in self._begun
        ]
        try:
            if events:
                await self._store.write(events)
        except StoreError:
            news.extendleft(reversed(told))
            raise
        self._begun |= {(begins, node) for node, message in last.items() if message}
        self._begun -= {(begins, node) for node, message in last.items() if not message}
