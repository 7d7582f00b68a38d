"""
Runs the ranks of this node over the rounds of one validation: claims the devices once, and imports torch once.

    session = runner.session(faults)
    await session.open()                                    # RefusedError: the devices are not ours to use
    reports = await session.join(order, on_report, interface="eth0", deadline_seconds=60.0)
    await session.close()                                   # no rank is left, and the devices are free

Unverified on hardware: groups over several nodes of GPUs (NCCL) and of NeuronCores; on CPUs (gloo) it is tested.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from checks.contract import CheckInfo, Scope
from checks.printable import some
from checks.worker.faults import Fault
from healthd.core.errors import HealthdError
from healthd.core.model import CollectiveOrder, RankReport
from healthd.runner.collective.order_ranks import OnReport, OrderRanks, Round
from healthd.runner.collective.rank_group import group_over_nodes
from healthd.runner.compilation import compile_over_nodes
from healthd.runner.device_claim import ClaimError, DeviceClaim
from healthd.runner.settings import OnProgress, RunProgress, Survey
from healthd.runner.workers.node_lane import ask_node
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Workers

FRESH_SURVEY_SECONDS = 1.0
MAX_RANKS = 1 << 20  # of a group: beyond it the sums of the checks would no longer be exact


class RefusedError(HealthdError):
    """The node cannot take part; the message says why in one sentence."""


class Session:
    """Made by `Runner.session`. One `join` at a time; after `close` it cannot be used any more."""

    def __init__(
        self,
        *,
        make_workers: Callable[[OnProgress | None], Workers],
        catalogue: Callable[[], Awaitable[Mapping[str, CheckInfo]]],
        on_survey: Callable[[Outcome], Survey],
        on_device_seconds: Callable[[float], None],
        faults: Sequence[Fault] = (),
    ) -> None:
        self._workers = make_workers(self._note_progress)
        self._claim = DeviceClaim(self._workers, self._survey)
        self._catalogue = catalogue
        self._on_survey = on_survey
        self._on_device_seconds = on_device_seconds
        self._faults = tuple(faults)
        self._claimed = AsyncExitStack()
        self._targets: tuple[str, ...] = ()
        self._lanes: list[WorkerLane] = []
        self._ranks: OrderRanks | None = None
        self._seen_free_at = self._looked_at = -math.inf

    # --- the devices --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the devices. Raises RefusedError when there are none, or they are in use; close the session then."""
        surveyed = await self._survey()
        if not self._targets:
            raise RefusedError("no devices were found, so that there is nothing to be a rank on")
        try:
            await self._claimed.enter_async_context(self._claim.held(surveyed))
        except ClaimError as error:
            raise _refused(error) from None
        self._seen_free_at = self._looked_at
        together = self._kind == "together"
        targets = [",".join(self._targets)] if together else self._targets
        self._lanes = [WorkerLane(self._workers, target) for target in targets]

    async def check_free(self) -> None:
        """See that no other process uses the devices, which are claimed. Raises RefusedError."""
        if time.monotonic() - self._seen_free_at > FRESH_SURVEY_SECONDS:
            try:
                await self._claim.check_free(await self._survey())
            except ClaimError as error:
                raise _refused(error) from None
            self._seen_free_at = self._looked_at

    async def _survey(self) -> Outcome:
        """The devices and their holders. Raises RefusedError when they cannot be found."""
        self._looked_at = time.monotonic()
        outcome = await ask_node(self._workers, "survey", self._workers.settings.survey_timeout_seconds)
        survey = self._on_survey(outcome)
        if outcome.missing is not None or not outcome.answers:
            why = outcome.missing.message if outcome.missing else "no answer"
            raise RefusedError(f"the devices could not be found: {why}")
        self._workers.note_survey(outcome.answers[0])
        self._targets = survey.inventory.rank_targets
        return outcome

    @property
    def _kind(self) -> str:
        """How ranks become a group: see `NodeCollective`."""
        return str(self._workers.inventory.get("ranks", "kept"))

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        """
        Run the ranks of an order; the reports of all ranks in all checks that were begun.

        `on_report` receives the progress of all ranks about twice a second, and at once when one is lost. At the
        deadline the ranks that are left are killed, and are `Timeout`; on cancellation they are killed as well, and
        `on_report` has received their last reports. Raises RefusedError for an order that this node cannot follow.
        """
        deadline = time.monotonic() + deadline_seconds  # to load the checks of others takes of it too
        round_ = Round(
            order=order,
            checks=self._checks_of(order, await self._catalogue()),
            interface=interface,
            faults=self._faults,
            deadline=deadline,
        )
        self._workers.compile = compile_over_nodes(order, round_.checks, self._workers)
        if self._kind == "fresh":
            self._workers.group = group_over_nodes(order, self._targets)
        self._ranks = ranks = OrderRanks(round_, self._workers, self._lanes, self._targets, on_report)
        try:
            return await ranks.run()
        finally:
            self._ranks = None
            if self._kind != "kept":
                await self._retire()

    async def warm(self) -> None:
        """Start the ranks of the next round, where a round before has lost its own."""
        if self._kind == "kept":
            await asyncio.gather(*(lane.start() for lane in self._lanes))

    def _checks_of(self, order: CollectiveOrder, catalogue: Mapping[str, CheckInfo]) -> tuple[CheckInfo, ...]:
        """The checks of an order. Raises RefusedError for an order that this node cannot follow."""
        own = len(self._targets)
        if order.ranks != own:
            raise RefusedError(f"it asks for {order.ranks} ranks, and this node has {own} ({some(self._targets)})")
        if not (0 <= order.first_rank <= order.first_rank + order.ranks <= order.size <= MAX_RANKS):
            last = order.first_rank + order.ranks - 1
            raise RefusedError(f"ranks {order.first_rank} to {last} are no ranks of a group of {order.size}")
        if self._kind == "together" and order.size > own:
            accelerator = self._workers.inventory.get("accelerator")
            raise RefusedError(
                f"one process drives all devices of {accelerator!r} here, so that its ranks form no group with other"
                f" nodes: {order.size} ranks were asked for, {own} of them on this node"
            )
        if not order.checks:
            raise RefusedError("it names no check")
        if not 0 < order.port < 65536:
            raise RefusedError(f"{order.port} is no port")
        for name in order.checks:
            if name not in catalogue:
                raise RefusedError(f"no such check here: {name!r}")
            if catalogue[name].scope is not Scope.GROUP or not catalogue[name].judged:
                raise RefusedError(f"{name} compares no ranks; a collective is wanted, such as all_reduce")
        return tuple(catalogue[name] for name in dict.fromkeys(order.checks))

    def _note_progress(self, progress: RunProgress) -> None:
        if self._ranks is not None:
            self._ranks.note_progress(progress)

    async def _retire(self) -> None:
        await asyncio.gather(*(lane.retire() for lane in self._lanes))

    async def close(self) -> None:
        """Let the ranks end, and kill those that do not; returns when the devices are free, or known to be stuck."""
        try:
            await self._retire()
        finally:
            try:
                for lane in self._lanes:
                    lane.count_seconds()
                await self._workers.kill_all()
            finally:
                self._on_device_seconds(self._workers.device_seconds)
                await self._claimed.aclose()


def _refused(error: ClaimError) -> RefusedError:
    return RefusedError(f"the devices are taken: {error}" if error.reason == "Busy" else str(error))
