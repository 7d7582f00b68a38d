"""The rounds of the passive checks, and of the look at who holds the devices: by their ticks, one round at a time."""

from __future__ import annotations

import asyncio
import math

from checks.contract import Tier
from healthd.core.tasks import LONGEST_SLEEP_SECONDS, wait_for
from healthd.node.checks.active_run import Probes
from healthd.node.checks.catalogue import in_tier
from healthd.node.checks.recording import Recorder
from healthd.node.checks.timetable import PassiveTimetable
from healthd.node.clock import Clock
from healthd.node.occupancy.watch import Claims
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeBook
from healthd.runner import Plan


class PassiveRounds:
    """Start `run` as a supervised task. `wake` makes it look at the clock again."""

    def __init__(
        self,
        book: NodeBook,
        probes: Probes,
        settings: NodeSettings,
        *,
        claims: Claims,
        recorder: Recorder,
        clock: Clock,
        phase_ratio: float,
    ) -> None:
        """`phase_ratio` in [0, 1) keeps nodes apart."""
        self._book = book
        self._probes = probes
        self._settings = settings
        self._claims = claims
        self._recorder = recorder
        self._clock = clock
        self._table = PassiveTimetable(book.specs, now=clock.boot(), phase_ratio=phase_ratio)
        self._rounded_at = -math.inf
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """The eternal round."""
        while True:
            now = self._clock.boot()
            due = self._table.due(now)
            look_at = self._rounded_at + self._settings.look_seconds
            if due or self._book.surveyed_at is None or now >= look_at:
                self._rounded_at = now
                self._table.started(due, now)
                await self._round(due)
            else:
                next_at = min(self._table.next_at(), look_at)
                await wait_for(self.wake, max(0.0, min(next_at - now, LONGEST_SLEEP_SECONDS)))

    async def _round(self, due: tuple[str, ...]) -> None:
        if not due:
            await self._claims.refresh()
            return
        plan = Plan(tier=Tier.PASSIVE, checks=due, executor=self._settings.executor)
        work = self._probes.run(plan, faults=self._recorder.faults(), on_result=self._recorder.start(()))
        await asyncio.gather(work, self._claims.ask_schedulers())
        self._claims.take_look()

    def force(self) -> None:
        """All passive checks are due now."""
        self._table.force(in_tier(self._book.specs, Tier.PASSIVE), self._clock.boot())
        self.wake.set()

    def look(self) -> None:
        """Look at the machine again now, because something about it has changed."""
        self._rounded_at = -math.inf
        self.force()
