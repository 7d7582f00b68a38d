"""What nodes show of each other, in the history of the nodes: when it begins, and when it is over."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from healthd.aggregator.fleet.peers import PeerFindings
from healthd.aggregator.store import PutEvent, Store
from healthd.core.errors import StoreError

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0
MOST_EACH_TURN = 100

News = deque[tuple[str, str]]
"""Nodes with what there is to say of each; an empty message says that it is over."""


class PeerEvents:
    """
    Writes the history of digests, of slow ranks, and of slow devices.

    On the event loop alone; run `run()` as a task. `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        peers: PeerFindings,
        stragglers: News,
        store: Store,
        *,
        settle_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Nothing is written in the first `settle_seconds`: until all nodes have reported, the first few are no majority.
        """
        self._settle_seconds = settle_seconds
        self._begun: set[tuple[str, str]] = set()
        self._peers = peers
        self._stragglers = stragglers
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
                log.debug("comparison results are written to the history later: %s", error)

    async def write(self) -> None:
        """Write what is new now. StoreError, and it is still to be written."""
        digests, jobs = self._peers.digests.news, self._peers.jobs.news
        await self._write(digests, "digest differs", "digest agrees", "its digests match its peers")
        await self._write(jobs, "slow rank", "rank not slow", "no rank here is slow by its own time")
        await self._write(self._stragglers, "straggler")

    async def _write(self, news: News, begins: str, ends: str | None = None, ended: str = "") -> None:
        """`ends` None: the end is not written, and each message counts, since a node may have several."""
        told = [news.popleft() for _ in range(min(MOST_EACH_TURN, len(news)))]
        if not told:
            return
        now = self._clock()
        last = dict(told)  # of what came and went meanwhile there is nothing to be told
        events = [
            PutEvent(at=now, subject=node, kind=ends if ends and not message else begins, message=message or ended)
            for node, message in (told if ends is None else last.items())
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
