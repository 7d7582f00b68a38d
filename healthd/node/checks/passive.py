"""Runs the passive checks by their intervals, and looks at who holds the devices: one round at a time."""

from __future__ import annotations

import asyncio
import math

from checks.contract import Tier
from healthd.core.model import CheckResult
from healthd.core.tasks import LONGEST_SLEEP_SECONDS, wait_for
from healthd.node.checks.active_run import CheckRunner
from healthd.node.checks.catalogue import in_tier
from healthd.node.checks.timetable import PassiveTimetable
from healthd.node.clock import Clock
from healthd.node.occupancy.occupancy import Occupancy
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeStore
from healthd.runner.settings import Plan


class PassiveRounds:
    """Start `run` as a supervised task. `wake` makes it look at the clock again."""

    def __init__(
        self,
        store: NodeStore,
        runner: CheckRunner,
        settings: NodeSettings,
        *,
        occupancy: Occupancy,
        clock: Clock,
        phase_ratio: float,
    ) -> None:
        """`phase_ratio` in [0, 1) spreads the rounds of a fleet."""
        self._store = store
        self._runner = runner
        self._settings = settings
        self._occupancy = occupancy
        self._clock = clock
        self._table = PassiveTimetable(store.specs, now=clock.boot(), phase_ratio=phase_ratio)
        self._round_at = -math.inf
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Run rounds for ever."""
        while True:
            now = self._clock.boot()
            due = self._table.due(now)
            survey_at = self._round_at + self._settings.look_seconds
            if due or self._store.surveyed_at is None or now >= survey_at:
                self._round_at = now
                self._table.started(due, now)
                await self._round(due)
            else:
                next_at = min(self._table.next_at(), survey_at)
                await wait_for(self.wake, max(0.0, min(next_at - now, LONGEST_SLEEP_SECONDS)))

    async def _round(self, due: tuple[str, ...]) -> None:
        if not due:
            await self._occupancy.refresh()
            return
        plan = Plan(tier=Tier.PASSIVE, checks=due, executor=self._settings.executor)
        faults, record = self._store.start_run()

        def on_result(result: CheckResult) -> None:
            self._occupancy.note_survey()  # that of the round is known by now
            record(result)

        work = self._runner.run(plan, faults=faults, on_result=on_result)
        await asyncio.gather(work, self._occupancy.ask_schedulers())
        self._occupancy.note_survey()

    def force(self) -> None:
        """Make all passive checks due now."""
        self._table.force(in_tier(self._store.specs, Tier.PASSIVE), self._clock.boot())
        self.wake.set()

    def survey_soon(self) -> None:
        """Look at the machine again soon, because something about it has changed."""
        self._round_at = -math.inf
        self.force()
