"""
Leading and standing by, in turn: when an aggregator takes a shard over, and when it lets go of it.

A lease is over when its row has stood still for its length, by our own clock and as seen from here: neither the clocks
of other machines nor that of the server matter, nor an outage of the server, after which the leader renews first. The
term in every transaction stands above all of this: who is wrong here is refused there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from healthd.aggregator.front import Front, Serving
from healthd.aggregator.leading import Leading
from healthd.aggregator.store import (
    LEASE_SECONDS,
    FencedError,
    Leadership,
    Look,
    NotVacantError,
    Store,
    boot_seconds,
)
from healthd.core.errors import HealthdError, StoreError
from healthd.core.tasks import LogOnce, wait_for

log = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 1.0
AGAIN_SECONDS = 0.5
"""The pause after a takeover that failed, or that another one was faster in."""
HANGS_SECONDS = 5.0
"""A look that takes so long is ended, and the connection made anew."""


class Watching(Protocol):
    """Who looks at the row of the shard, about once a second; a `Watch`."""

    def start(self, on_look: Callable[[Look], None]) -> None:
        """Begin; `on_look` is called with each look, by any thread."""

    def cut(self) -> None:
        """End a look that hangs."""


class Observed:
    """A lease as it is seen from here. Pure: `now` counts seconds by a clock that nobody sets."""

    def __init__(self) -> None:
        self.row: Leadership | None = None
        self._since = 0.0

    def note(self, look: Look, now: float) -> None:
        """One more look. After a failed one it begins anew: the leader may not have reached the server either."""
        found = look if isinstance(look, Leadership) else None
        if found is None or found != self.row:
            self.row, self._since = found, now

    def vacant(self, now: float) -> Leadership | None:
        """The row of a shard that nobody leads any more; None while somebody may."""
        over = self.row is not None and (not self.row.holder or now - self._since >= LEASE_SECONDS)
        return self.row if over else None

    def due_in(self, now: float) -> float:
        """In how many seconds the lease is over if nothing is heard."""
        return max(0.0, self._since + LEASE_SECONDS - now)


class Course:
    """
    Run `run` as a fatal task; `settled` is set once it leads or stands by. `stop` ends it.

    Without a `watch` nobody shares the database: it leads until the end, and a FencedError is the end.
    """

    def __init__(
        self,
        *,
        front: Front,
        watch: Watching | None,
        take: Callable[[Leadership], Awaitable[Store]],
        leading: Callable[[Store], AbstractAsyncContextManager[Leading]],
        shard: str,
    ) -> None:
        """`take` opens the database and takes the shard over from a leader that is gone."""
        self.settled = asyncio.Event()
        self._front, self._watch, self._take, self._leading, self._shard = front, watch, take, leading, shard
        self._observed = Observed()
        self._looked_at = boot_seconds()
        self._not_before = 0.0
        self._former = ""
        self._news = asyncio.Event()
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._trouble = LogOnce(log)

    def note(self, look: Look) -> None:
        """What the watch has seen."""
        self._looked_at = boot_seconds()
        self._observed.note(look, self._looked_at)
        if isinstance(look, StoreError):
            self._front.follow(None, 0, str(look))
        self._news.set()

    async def run(self, store: Store | None) -> None:
        """Lead with this store, or stand by without one; then in turn, for ever. Waits to be cancelled once stopped."""
        if self._watch is not None:
            self._watch.start(self._from_thread(asyncio.get_running_loop()))
        while not self._stop.is_set():
            if store is None:
                self._show()
                self.settled.set()
                store = await self._win()
            if store is not None and self._stop.is_set():
                store.close()
            elif store is not None:
                await self._lead(store)
            store = None
        self._ended.set()
        await asyncio.Event().wait()

    async def stop(self, seconds: float) -> None:
        """Let go of the shard; waits for that, at most so long."""
        self._stop.set()
        self._front.stop()
        self._news.set()
        if self._watch is not None:
            self._watch.cut()  # it may hang with the server
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def _from_thread(self, loop: asyncio.AbstractEventLoop) -> Callable[[Look], None]:
        def tell(look: Look) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone with the process
                loop.call_soon_threadsafe(self.note, look)

        return tell

    def _show(self) -> None:
        """Tell the front whom it may ask."""
        if (row := self._observed.row) is None:
            return
        if row.holder and row.holder == self._former:  # it is not known yet who came after us
            self._front.follow(None, row.term, "it has just lost the lead")
        elif not row.holder:
            self._front.follow(None, row.term, "its leader has left, and nobody has taken over yet")
        elif not row.url:
            self._front.follow(None, row.term, f"{row.holder} leads and does not say where it answers")
        else:
            self._front.follow(row.url, row.term, "")

    async def _win(self) -> Store | None:
        """Stand by until the shard is ours; None at the end."""
        while not self._stop.is_set():
            now = boot_seconds()
            vacant = self._observed.vacant(now)
            if vacant is not None and now >= self._not_before:
                if (store := await self._try(vacant)) is not None:
                    return store
                self._not_before = boot_seconds() + AGAIN_SECONDS
                continue
            if self._watch is not None and now - self._looked_at > HANGS_SECONDS:
                self._watch.cut()
                self.note(StoreError(f"the database has not answered for {HANGS_SECONDS:g} s"))
            pause = max(self._not_before - now, 0.0) if vacant is not None else self._observed.due_in(now)
            await wait_for(self._news, min(max(pause, 0.01), LONGEST_PAUSE_SECONDS))
            self._show()
        return None

    async def _try(self, vacant: Leadership) -> Store | None:
        try:
            store = await self._take(vacant)
        except NotVacantError as error:
            self._trouble.say(f"{self._shard} is not taken over: {error}", logging.INFO)
            return None
        except HealthdError as error:
            self._trouble.say(f"{self._shard} could not be taken over: {error}")
            return None
        self._trouble.clear()
        return store

    async def _lead(self, store: Store) -> None:
        """Until it leads no more, or the process ends."""
        self._former = store.holder
        try:
            async with self._leading(store) as leader:
                self._front.lead(Serving(app=leader.app, leads=store.leads, trouble=store.trouble))
                self.settled.set()
                log.info("leads %s (term %d)", self._shard, store.term)
                try:
                    await leader.tasks.first(self._until_over(store, leader.let_go))
                finally:
                    if not self._stop.is_set():
                        self._front.stand_by("it has just lost the lead")
                        self._show()
        except FencedError as lost:
            if self._watch is None:
                raise
            log.warning("%s; it stands by", lost)
        except StoreError as error:
            if not self.settled.is_set() or self._watch is None:
                raise
            log.error("%s could not be led: %s; it stands by", self._shard, error)
        self._not_before = boot_seconds() + LEASE_SECONDS

    async def _until_over(self, store: Store, let_go: Callable[[], None]) -> None:
        """
        Until another one has the lead by what the watch sees, or the process ends.

        A lease that cannot be renewed is no end: the leader may be the first whom the database hears again. But nodes
        that wait are answered, so that they find another one if there is one.
        """
        led = True
        while not self._stop.is_set():
            if led and not store.leads():
                log.warning("the lease of %s is over: %s", self._shard, store.trouble() or "it was not renewed in time")
                let_go()
            led = store.leads()
            row = self._observed.row
            # A look may be older than our takeover; who was faster has a higher term.
            if row is not None and (row.term > store.term or (row.term == store.term and row.holder != store.holder)):
                log.warning(
                    "%s leads %s now (term %d); this one stands by", row.holder or "nobody", self._shard, row.term
                )
                return
            await wait_for(self._news, LONGEST_PAUSE_SECONDS)
            if self._watch is not None and boot_seconds() - self._looked_at > HANGS_SECONDS:
                self._watch.cut()
                self._looked_at = boot_seconds()
