"""
Who has the devices, before and during active runs: looks at the machine, and the words of the host's job schedulers.

The looks go into the book; here is what a run must know of them. The job that a run was ordered for may have them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from checks.contract import Tier
from healthd.core.model import Allocation
from healthd.node.checks.active_run import Allotters, Ordered, Probes
from healthd.node.checks.catalogue import under_rule
from healthd.node.checks.unprompted_rule import unprompted_by
from healthd.node.clock import Clock
from healthd.node.occupancy import NONE_THERE
from healthd.node.occupancy.allocation import describe, foreign
from healthd.node.orders.device_use import Stay
from healthd.node.settings import Unprompted
from healthd.node.state.store import NodeBook
from healthd.runner import Survey

log = logging.getLogger(__name__)

# A look at the devices that is older than this is repeated before an active run.
FRESH_LOOK_SECONDS = 1.0

# How long a look after an active run is repeated until it shows free devices.
SETTLE_PAUSES_SECONDS = (0.05, 0.2, 0.5, 1.0)


class Claims:
    """`ours` says whether a run or a stay of ours is under way, `on_news` hears what may make an active run due."""

    def __init__(
        self,
        book: NodeBook,
        probes: Probes,
        *,
        clock: Clock,
        unprompted: Unprompted | None,
        schedulers: Allotters | None,
        ours: Callable[[], bool],
        on_news: Callable[[], None],
    ) -> None:
        """`unprompted` None: by the host's rule. `schedulers` None: none can be on the host."""
        self._book = book
        self._probes = probes
        self._clock = clock
        self._unprompted = unprompted
        self._schedulers = schedulers
        self._ours = ours
        self._on_news = on_news
        self._last_look: Survey | None = None
        self._rule: Unprompted | None = None

    @property
    def unprompted(self) -> Unprompted | None:
        """The rule by which active checks run unprompted now; None until the host's is settled."""
        return self._unprompted or self._rule

    @property
    def scheduled_here(self) -> bool:
        """Whether there may be job schedulers on the host."""
        return self._schedulers is not None

    @property
    def unheard(self) -> bool:
        """Whether the host's schedulers are still to be heard for the first time."""
        return self.scheduled_here and self._book.scheduled is NONE_THERE

    # --- looking ------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Look at the machine now, and return when that is known."""
        await asyncio.gather(self._probes.survey(), self.ask_schedulers())
        self.take_look()

    async def freshen(self) -> None:
        """See to a look at the devices of a moment ago, and to the schedulers' word."""
        looked_at = self._book.surveyed_at
        if looked_at is None or self._clock.boot() - looked_at > FRESH_LOOK_SECONDS:
            await self.refresh()
        else:
            await self.ask_schedulers()

    async def ask_schedulers(self) -> None:
        """What they have given away, and by which rule active checks run unprompted then."""
        if self._schedulers is None:
            return
        scheduled = await self._schedulers.look()
        if self._book.scheduled is NONE_THERE:
            self._on_news()
        self._book.set_scheduled(scheduled)
        rule, why = unprompted_by(scheduled)
        if self._unprompted is None and rule is not self._rule:
            log.info("active checks run unprompted by the rule %r: %s", rule.value, why)
            self._rule = rule
            self._book.set_specs(under_rule(self._book.specs, rule))
            self._on_news()

    def take_look(self) -> None:
        """Every run looks at the machine first, so what it saw costs nothing more."""
        look = self._probes.latest
        if look is None or look is self._last_look or (look.holders is None and self._ours()):
            return  # a worker of ours that is ending cannot be told from an unseen job
        self._last_look = look
        self._book.survey(look)

    async def settle(self) -> None:
        """
        Look until the devices are seen to be free of our own workers: a process that was just killed has its files
        open for a moment after it has vanished, and that must not look like a job.
        """
        for pause in SETTLE_PAUSES_SECONDS:
            latest = self._probes.latest
            if latest is not None and latest.holders == ():
                break
            await asyncio.sleep(pause)
            await self._probes.survey()

    # --- judging ------------------------------------------------------------------------------------------------------

    def needs_devices(self, names: Sequence[str] | set[str]) -> bool:
        """Whether any of these checks is active."""
        specs: Mapping[str, Tier] = {spec.name: spec.tier for spec in self._book.specs}
        return any(specs.get(name, Tier.PASSIVE) is not Tier.PASSIVE for name in names)

    def taken(self, ordered: Sequence[Ordered | Stay] = ()) -> str:
        """Why nothing active may run now; empty when the devices are free, but for the jobs it was ordered for."""
        claims = self._foreign(ordered)
        if self._book.surveyed_at is None:
            claims = tuple(claim for claim in claims if claim.by != "unseen")  # looked at before the run
        return f"the devices are taken: {describe(claims)}" if claims else ""

    def given_away(self, ordered: Sequence[Ordered | Stay]) -> str:
        """Why a run must end: a scheduler has given the devices to another job than its own; empty when none has."""
        given = self._foreign(ordered, by="scheduler")
        return f"the devices were given away: {describe(given)}" if given else ""

    def _foreign(self, ordered: Sequence[Ordered | Stay], by: str | None = None) -> tuple[Allocation, ...]:
        """The claims on the devices, of one kind or of all, without those of the jobs that runs were ordered for."""
        asking = {one.workload for one in ordered}
        claims = foreign(self._book.allocated, self._book.scheduled.workloads, asking)
        return tuple(claim for claim in claims if by in (None, claim.by))
