"""
How aggregators share the shards of a fleet: each leads as many as its share, and hands one over when another has fewer.

Every aggregator decides for itself, by the rows that all of them read; when two decide the same, the takeover of a
shard refuses one of them. So what is here makes the shares even and never decides who leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping

from healthd.aggregator.api import ShardList, ShardRow
from healthd.aggregator.course import Course
from healthd.aggregator.front import Front
from healthd.aggregator.store import DEFAULT_SHARD, LEASE_SECONDS, Leadership, Shards, Store, Watch, boot_seconds
from healthd.core.errors import HealthdError, StoreError
from healthd.core.tasks import OnEnd, Tasks, wait_for

log = logging.getLogger(__name__)

HANGS_SECONDS = 5.0
"""A look that takes so long is ended, and the connection made anew."""
ANYBODY_SECONDS = 2.0
"""After this a shard that nobody leads is taken over beyond one's share: the others may be gone, or cannot lead it."""
GIVE_PAUSE_SECONDS = 2.0
"""Between two shards that are handed over: the rows must show the first one."""
UNWANTED_SECONDS = 120.0
"""The pause after a shard that was handed over came back: the others cannot lead it."""


def share_of(shards: int, aggregators: int) -> int:
    """How many shards an aggregator leads at most, as long as there are others for the rest."""
    return math.ceil(shards / max(1, aggregators))


def to_give(own: str, leaders: Mapping[str, str], alive: Collection[str]) -> str | None:
    """
    The shard that the aggregator `own` hands over now; None: none. `leaders` are the URLs by shard, "" for nobody.

    One at a time, by the one that has most, and only where that makes the shares more even: so it comes to an end.
    """
    counts = dict.fromkeys((*alive, own), 0)
    for url in leaders.values():
        if url not in counts:
            return None  # nobody leads it, or who does is not known to live: it is not settled who has what
        counts[url] += 1
    most = max(counts.values())
    if counts[own] - min(counts.values()) < 2 or own != min(url for url, count in counts.items() if count == most):
        return None
    return max(shard for shard, url in leaders.items() if url == own)


class Living:
    """Which aggregators live, as seen from here: whose row has changed within a lease. Pure, as `course.Observed`."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def note(self, renewed: Mapping[str, float] | None, now: float) -> None:
        """One more look; None: a failed one, after which all of them have their time anew."""
        if renewed is None:
            self._seen = {url: (stamp, now) for url, (stamp, _) in self._seen.items()}
            return
        before = self._seen
        self._seen = {
            url: before[url] if url in before and before[url][0] == stamp else (stamp, now)
            for url, stamp in renewed.items()
        }

    def alive(self, now: float) -> frozenset[str]:
        """Their URLs."""
        return frozenset(url for url, (_, since) in self._seen.items() if now - since < LEASE_SECONDS)


REMOVED_SECONDS = 5.0
"""How long the end of a shard that was removed may take."""


async def _end(course: Course) -> None:
    await course.stop(REMOVED_SECONDS)
    await course.front.close()


class Sharing:
    """
    The shards of the fleet, each with its front and its course; run `run` as a fatal task. `stop` ends all of them.

    With a `watch` several aggregators share the database. `sharded`: there may be more shards than `default`, and a new
    one is led as soon as it is seen.
    """

    def __init__(
        self,
        make: Callable[[str, Callable[[], bool]], Course],
        *,
        watch: Watch | None,
        own_url: str,
        sharded: bool,
        tasks: Tasks,
        leave: Callable[[], None],
    ) -> None:
        """`make` makes the course of a shard, `leave` says in the database that this aggregator ends; it blocks."""
        self.rows: Mapping[str, Leadership] = {}
        self._make, self._watch, self._own_url, self._sharded = make, watch, own_url, sharded
        self._tasks, self._leave = tasks, leave
        self._courses: dict[str, Course] = {}
        self._living = Living()
        self._looked_at = boot_seconds()
        self._news = asyncio.Event()
        self._stopping = False
        self._given: tuple[str, float] | None = None  # the last shard, and before when none is handed over again

    @property
    def fronts(self) -> Mapping[str, Front]:
        """Who answers for each shard."""
        return {shard: course.front for shard, course in self._courses.items()}

    def shown(self) -> ShardList:
        """All shards, for people."""
        rows = []
        for shard, front in sorted(self.fronts.items()):
            status, text = (200, "") if front.leads else front.readiness()
            trouble = text if status != 200 else None
            rows.append(ShardRow(shard=shard, leader=front.leader, term=self.rows[shard].term, trouble=trouble))
        return ShardList(aggregator=self._own_url, shards=tuple(rows))

    @property
    def terms(self) -> Mapping[str, int]:
        """How many leaders each shard has had."""
        return {shard: row.term for shard, row in self.rows.items()}

    def begin(self, found: Shards, over: Collection[str]) -> None:
        """What is seen at the start; nobody leads the shards `over`."""
        self._note(found, over)

    def lead(self, store: Store) -> None:
        """Of a database that nobody shares: lead its shard."""
        self.rows = {store.shard: Leadership(term=store.term, holder=store.holder, url=self._own_url, renewed=0.0)}
        course = self._courses[store.shard] = self._make(store.shard, lambda: True)
        self._run(store.shard, course, store)

    async def settled(self) -> None:
        """Until this aggregator leads or stands by in every shard that was there at the start."""
        for course in list(self._courses.values()):
            await course.settled.wait()

    def _run(self, shard: str, course: Course, store: Store | None) -> None:
        self._tasks.supervise(f"course of leadership of {shard}", lambda: course.run(store), OnEnd.FATAL)

    async def run(self) -> None:
        """Follow what the watch sees, for ever."""
        loop = asyncio.get_running_loop()

        def tell(look: Shards | StoreError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone with the process
                loop.call_soon_threadsafe(self._note, look)

        if self._watch is None:
            await asyncio.Event().wait()
            return
        self._watch.start(tell)
        while True:
            await wait_for(self._news, 1.0)
            if boot_seconds() - self._looked_at > HANGS_SECONDS:
                self._watch.cut()
                self._note(StoreError(f"the database has not answered for {HANGS_SECONDS:g} s"))
            self._even_out()

    async def stop(self, seconds: float) -> None:
        """Let go of all shards; waits for that, at most so long."""
        if not self._stopping and self._watch is not None:
            with contextlib.suppress(HealthdError, TimeoutError):  # else it would hide why the process ends
                async with asyncio.timeout(seconds / 8):
                    await asyncio.to_thread(self._leave)
        self._stopping = True
        if self._watch is not None:
            self._watch.cut()  # it may hang with the server
        await asyncio.gather(*(course.stop(seconds) for course in self._courses.values()))

    def _note(self, look: Shards | StoreError, over: Collection[str] = ()) -> None:
        now = self._looked_at = boot_seconds()
        if isinstance(look, StoreError):
            self._living.note(None, now)
            for course in self._courses.values():
                course.note(look)
            return
        self._living.note(look.aggregators, now)
        self.rows = {
            shard: row for shard, row in sorted(look.leaders.items()) if self._sharded or shard == DEFAULT_SHARD
        }
        for shard in self._courses.keys() - self.rows.keys():
            log.warning("shard %s was removed", shard)
            self._tasks.start(f"end of {shard}", _end(self._courses.pop(shard)))
        for shard, row in self.rows.items():
            if shard not in self._courses and not self._stopping:
                course = self._courses[shard] = self._make(shard, functools.partial(self._may_take, shard))
                course.note(row, over=shard in over)
                self._run(shard, course, None)
            elif shard in self._courses:
                self._courses[shard].note(row)
        self._news.set()

    def _may_take(self, shard: str) -> bool:
        claimed = sum(course.claims for course in self._courses.values())
        alive = self._living.alive(boot_seconds()) | {self._own_url}
        vacant = self._courses[shard].vacant_seconds
        return claimed < share_of(len(self.rows), len(alive)) or (vacant is not None and vacant >= ANYBODY_SECONDS)

    def _even_out(self) -> None:
        now = boot_seconds()
        leaders = {shard: row.url if row.holder else "" for shard, row in self.rows.items()}
        if self._given is not None:
            shard, until = self._given
            if now < until:
                return
            if leaders.get(shard) == self._own_url and not self._courses[shard].gives:
                log.warning("no other aggregator has taken %s over; it stays here", shard)
                self._given = ("", now + UNWANTED_SECONDS)
                return
        shard = to_give(self._own_url, leaders, self._living.alive(now)) or ""
        if shard:
            self._given = (shard, now + GIVE_PAUSE_SECONDS)
            self._courses[shard].give_away()
