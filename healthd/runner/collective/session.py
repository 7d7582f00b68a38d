"""
The ranks of this node over the rounds of one validation: the devices are taken once, and torch is imported once.

    session = runner.session(faults)
    await session.open()                                    # RefusedError: the devices are not ours to use
    reports = await session.join(order, on_report, interface="eth0", deadline_seconds=60.0)
    await session.close()                                   # no rank is left, and the devices are free

Unverified on hardware: groups over several nodes of GPUs (NCCL) and of NeuronCores; on CPUs (gloo) it is tested.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from checks.contract import Scope
from checks.worker.faults import Fault
from healthd.core.errors import HealthdError
from healthd.core.model import CollectiveOrder, RankReport
from healthd.runner.collective.ranks import OnReport, Ranks, Round
from healthd.runner.device_claim import busy_by
from healthd.runner.device_lock import DeviceLock, LockBusyError, read_leased
from healthd.runner.settings import CheckInfo, OnProgress, RunProgress, Survey
from healthd.runner.warm import compile_over_nodes, group_over_nodes
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, Lane
from healthd.runner.workers.workers import Workers

log = logging.getLogger(__name__)

FRESH_LOOK_SECONDS = 1.0
MAX_RANKS = 1 << 20  # of a group: beyond it the sums of the checks would no longer be exact


class RefusedError(HealthdError):
    """The node cannot take part; the message says why in one sentence."""


class Session:
    """Made by `Runner.session`. One `join` at a time; after `close` it is of no more use."""

    def __init__(
        self,
        *,
        make_workers: Callable[[OnProgress | None], Workers],
        catalogue: Callable[[], Awaitable[Mapping[str, CheckInfo]]],
        on_survey: Callable[[Outcome], Survey],
        on_device_seconds: Callable[[float], None],
        faults: Sequence[Fault] = (),
    ) -> None:
        self._workers = make_workers(self._heard)
        self._settings = self._workers.settings
        self._catalogue = catalogue
        self._on_survey = on_survey
        self._on_device_seconds = on_device_seconds
        self._faults = tuple(faults)
        self._held = AsyncExitStack()
        self._boot_id: str | None = None
        self._targets: tuple[str, ...] = ()
        self._kind = "kept"
        self._lanes: list[Lane] = []
        self._ranks: Ranks | None = None
        self._seen_free_at = -math.inf

    # --- taking the devices -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the devices. Raises RefusedError when they cannot be found, or are not ours to use; then close it."""
        surveyed = await self._survey()
        if not self._targets:
            raise RefusedError("no devices were found, so that there is nothing to be a rank on")
        if await self._lock():
            # While we waited, somebody else's workers had the devices: what was seen then is old.
            surveyed = await self._survey()
        await self._free(surveyed)
        together = self._kind == "together"
        self._lanes = [Lane(self._workers, name) for name in ([",".join(self._targets)] if together else self._targets)]

    async def look(self) -> None:
        """See that the devices, which we have, are still in nobody's hands. Raises RefusedError."""
        if time.monotonic() - self._seen_free_at > FRESH_LOOK_SECONDS:
            await self._free(await self._survey())

    async def _free(self, surveyed: Outcome) -> None:
        attempt = 0
        while busy := self._leased() or busy_by(surveyed):
            attempt += 1
            if attempt > self._settings.retries:
                raise RefusedError(f"the devices are taken: {busy}")
            await self._workers.back_off(attempt)  # it may be somebody who is just leaving
            surveyed = await self._survey()
        self._seen_free_at = time.monotonic()

    async def _survey(self) -> Outcome:
        """What there is, and who holds it."""
        lane, answers = Lane(self._workers, None), list[Outcome]()
        lane.submit(
            Job(
                check="survey",
                command={"kind": "survey"},
                timeout_seconds=self._settings.survey_timeout_seconds,
                finish=answers.append,
            )
        )
        lane.close()
        await lane.serve()
        (outcome,) = answers
        survey = self._on_survey(outcome)
        if outcome.missing is not None or not outcome.answers:
            why = outcome.missing.message if outcome.missing else "no answer"
            raise RefusedError(f"the devices could not be found: {why}")
        found = outcome.answers[0]
        self._workers.inventory = {**found["inventory"], "holders": found["holders"]}
        self._boot_id = found["boot_id"]
        self._targets = survey.inventory.rank_targets
        self._kind = str(found["inventory"].get("ranks", "kept"))
        return outcome

    async def _lock(self) -> bool:
        """Keep other healthd processes of this host off the devices; whether we had to wait for one."""
        run_dir = self._settings.run_dir
        if run_dir is None:
            return False
        path = run_dir / f"{self._workers.inventory['accelerator']}.lock"
        lock = DeviceLock(path, self._settings.lock_wait_seconds)
        try:
            await self._held.enter_async_context(lock)
        except LockBusyError as error:
            raise RefusedError(f"the devices are taken: {error}") from None
        except OSError as error:
            text = f"cannot lock {path}: {error.strerror or error}; set run_dir to a directory of ours"
            raise RefusedError(text) from None
        return lock.waited

    def _leased(self) -> str | None:
        """Why the node is a job's although nobody holds devices, as its daemon says."""
        if self._settings.run_dir is None or not self._settings.heed_leases:
            return None
        return read_leased(self._settings.run_dir, self._boot_id)

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        """
        Be the ranks of an order, and say what became of each in each check that was begun.

        `on_report` hears how far all are, about twice a second, and at once when one is lost. When the deadline comes
        the ranks that are left are killed, and are `Timeout`; when it is cancelled they are killed as well, and
        `on_report` has heard the last of them. Raises RefusedError for an order that this node cannot follow.
        """
        round_ = Round(
            order=order,
            checks=self._checks_of(order, await self._catalogue()),
            interface=interface,
            faults=self._faults,
            deadline=time.monotonic() + deadline_seconds,
        )
        self._workers.compile = compile_over_nodes(order, round_.checks, self._workers)
        if self._kind == "fresh":
            self._workers.group = group_over_nodes(order, self._targets)
        self._ranks = ranks = Ranks(round_, self._lanes, self._targets, self._settings, on_report)
        try:
            return await ranks.run()
        finally:
            self._ranks = None
            if self._kind != "kept":
                await self._let_go()

    async def warm(self) -> None:
        """Have ranks ready that the next round finds, where a round before has lost its own."""
        if self._kind == "kept":
            await asyncio.gather(*(lane.ensure() for lane in self._lanes))

    def _checks_of(self, order: CollectiveOrder, catalogue: Mapping[str, CheckInfo]) -> tuple[CheckInfo, ...]:
        """What the order wants to be run. Raises RefusedError for an order that cannot be followed here."""
        own = len(self._targets)
        if order.ranks != own:
            raise RefusedError(f"it asks for {order.ranks} ranks, and this node has {own} ({_some(self._targets)})")
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

    def _heard(self, progress: RunProgress) -> None:
        if self._ranks is not None:
            self._ranks.heard(progress)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _let_go(self) -> None:
        await asyncio.gather(*(lane.retire() for lane in self._lanes))

    async def close(self) -> None:
        """Let the ranks go, and kill what does not; returns when the devices are free, or known to be stuck."""
        try:
            await self._let_go()
        finally:
            self._workers.kill_all()
            for lane in self._lanes:
                lane.count_seconds()
            await self._workers.bury_all(self._settings.kill_grace_seconds)
            self._on_device_seconds(self._workers.device_seconds)
            await self._held.aclose()


def _some(targets: Sequence[str]) -> str:
    return ", ".join(targets[:4]) + (f" and {len(targets) - 4} more" if len(targets) > 4 else "")
