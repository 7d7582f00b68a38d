"""
A visit: the orders of one validation, one after the other, in one session of the runner.

However an order ends, what its ranks had said by then is reported.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from healthd.core.model import CollectiveOrder, LaunchOrder, OrderReport, OrderStatus, RankReport
from healthd.core.tasks import Tasks, is_cancelling, wait_for
from healthd.node.checks.active_run import Report
from healthd.node.clock import Clock
from healthd.node.interfaces import interface_to
from healthd.node.nccom.round import NccomRound, RoundSettings, Told
from healthd.runner import OnReport, RefusedError

log = logging.getLogger(__name__)

# Orders of one validation that may wait; an aggregator has one or two open for a node.
MAX_WAITING = 8


class RankSession(Protocol):
    """What is needed of `healthd.runner.Session`."""

    async def open(self) -> None:
        """Take the devices. Raises RefusedError."""

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        """Be the ranks of an order. Raises RefusedError; when cancelled, `on_report` has heard the last of them."""

    async def look(self) -> None:
        """See that nobody uses the devices, which are ours. Raises RefusedError."""

    async def warm(self) -> None:
        """Have ranks ready for the next one."""

    async def close(self) -> None:
        """Let the ranks and the devices go."""


@dataclass(eq=False)
class Wanted:
    """
    An order that was taken on. `due_at` is its deadline by CLOCK_BOOTTIME; `ranks` and `told` what was last reported.

    `round` is that of nccom-test, once it is under way; `launches` came before that.
    """

    id: str
    collective: CollectiveOrder
    due_at: float
    report: Report
    ranks: tuple[RankReport, ...] = ()
    told: Told = field(default_factory=Told)
    round: NccomRound | None = None
    launches: list[tuple[str, LaunchOrder, Report]] = field(default_factory=list)
    why: str = ""

    def end(self, status: OrderStatus, message: str = "") -> None:
        """Report the end of it, with all that is known."""
        for _, _, report in self.launches:
            report(OrderReport(status=OrderStatus.CANCELLED, message=message or "the group has ended here"))
        self.launches.clear()
        text = message or self.told.message
        self.report(OrderReport(status=status, message=text, ranks=self.ranks, findings=self.told.findings))


class Visit:
    """The orders of one validation, one after the other, in one session."""

    def __init__(
        self,
        validation: str,
        session: Callable[[], RankSession],
        *,
        interface: str | None,
        idle_seconds: float,
        others_wait: Callable[[], bool],
        clock: Clock,
        tasks: Tasks,
        rounds: RoundSettings | None = None,
    ) -> None:
        self.validation = validation
        self._rounds = rounds
        self._others_wait = others_wait
        self.open = True
        self.why = "the node's daemon stops"
        self._interface = interface
        self._idle_seconds = idle_seconds
        self._make_session = session
        self._clock = clock
        self._tasks = tasks
        self._waiting: collections.deque[Wanted] = collections.deque()
        self._news = asyncio.Event()
        self._now: tuple[Wanted, asyncio.Task[tuple[RankReport, ...]]] | None = None

    def add(self, wanted: Wanted) -> None:
        """One more order."""
        if len(self._waiting) >= MAX_WAITING:
            wanted.end(OrderStatus.REFUSED, f"{MAX_WAITING} collectives are waiting already")
            return
        wanted.report(OrderReport(status=OrderStatus.ACCEPTED))
        self._waiting.append(wanted)
        self._news.set()

    def cancel(self, order_id: str, why: str) -> None:
        """Call one order off; its ranks are killed, and the session stays."""
        for wanted in [one for one in self._waiting if one.id == order_id]:
            self._waiting.remove(wanted)
            wanted.end(OrderStatus.CANCELLED, why)
        if self._now is not None and self._now[0].id == order_id and not self._now[0].why:
            self._now[0].why = why
            self._now[1].cancel()

    def launch(self, order_id: str, order: LaunchOrder, report: Report) -> None:
        """Start what another node of a group wants started here, when it is the turn of that group."""
        known = [*self._waiting, *([self._now[0]] if self._now is not None else [])]
        wanted = next((one for one in known if one.collective.group == order.group), None)
        if wanted is None or not self.open:
            report(
                OrderReport(status=OrderStatus.REFUSED, message=f"this node is in no group {order.group[:64]!r} now")
            )
        elif wanted.round is not None:
            wanted.round.launch(order_id, order, report)
        elif len(wanted.launches) < MAX_WAITING:
            wanted.launches.append((order_id, order, report))
        else:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"{MAX_WAITING} launches are waiting already"))

    async def cancel_launch(self, order_id: str, why: str) -> None:
        """End what a launch started, or forget it."""
        for wanted in [*self._waiting, *([self._now[0]] if self._now is not None else [])]:
            for one in [one for one in wanted.launches if one[0] == order_id]:
                wanted.launches.remove(one)
                one[2](OrderReport(status=OrderStatus.CANCELLED, message=why))
            if wanted.round is not None:
                await wanted.round.cancel(order_id, why)

    def refuse(self, why: str, status: OrderStatus = OrderStatus.REFUSED) -> None:
        """All orders that wait end, and no other will come."""
        self.open = False
        while self._waiting:
            self._waiting.popleft().end(status, why)

    def leave(self, why: str) -> None:
        """It is about to be cancelled, for this reason."""
        self.open, self.why = False, why

    def idle(self) -> bool:
        """Whether no order waits or is under way."""
        return self._now is None and not self._waiting

    async def work(self) -> None:
        """From the first order to the last. Raises nothing but CancelledError."""
        session = self._make_session()
        try:
            if self._waiting:
                await session.open()
                while (wanted := await self._next()) is not None:
                    await self._join(session, wanted)
        except RefusedError as error:
            self.refuse(str(error))
        except Exception as error:
            log.exception("the ranks of validation %s", self.validation)
            self.refuse(f"internal error of healthd: {type(error).__name__}: {error}")
        finally:
            self.refuse(self.why, OrderStatus.CANCELLED)
            await session.close()

    async def _next(self) -> Wanted | None:
        if not self._waiting:
            self._news.clear()
            if self._others_wait() or not await wait_for(self._news, self._idle_seconds):
                self.open = False
                return None
        return self._waiting.popleft() if self._waiting else await self._next()

    async def _join(self, session: RankSession, wanted: Wanted) -> None:
        def heard(ranks: tuple[RankReport, ...]) -> None:
            wanted.ranks = ranks
            wanted.report(OrderReport(status=OrderStatus.RUNNING, ranks=ranks))

        order = wanted.collective
        seconds = max(0.0, wanted.due_at - self._clock.boot())
        if order.nccom is not None:
            work = self._run_round(session, wanted, seconds)
        else:
            interface = self._interface or await asyncio.to_thread(interface_to, order.main)
            work = session.join(order, heard, interface=interface, deadline_seconds=seconds)
        wanted.report(OrderReport(status=OrderStatus.RUNNING))
        task = self._tasks.start(f"ranks of {order.group}", work)
        self._now = wanted, task
        try:
            await _ended(task)
            wanted.ranks = task.result()
        except asyncio.CancelledError:
            # Either this order was called off, or the whole session, in which case the ranks are gone as well.
            wanted.end(OrderStatus.CANCELLED, wanted.why or self.why)
            if is_cancelling():
                raise
        except RefusedError as error:
            wanted.end(OrderStatus.REFUSED, str(error))
        except Exception as error:
            log.exception("the ranks of group %s", order.group)
            wanted.end(OrderStatus.CANCELLED, f"internal error of healthd: {type(error).__name__}: {error}")
            raise
        else:
            gone = sum(report.reason is not None for report in wanted.ranks)
            wanted.end(OrderStatus.DONE, f"{gone} of {len(wanted.ranks)} ranks gave nothing" if gone else "")
        finally:
            self._now = None
        if order.nccom is None:
            await session.warm()

    async def _run_round(self, session: RankSession, wanted: Wanted, seconds: float) -> tuple[RankReport, ...]:
        """A round of nccom-test: the devices are ours, and nobody was seen to use them a moment before."""

        def told(news: Told) -> None:
            wanted.told = news
            wanted.report(
                OrderReport(
                    status=OrderStatus.RUNNING, message=news.message, launches=news.launches, findings=news.findings
                )
            )

        if self._rounds is None:
            raise RefusedError("nothing runs nccom-test over several nodes here")
        await session.look()
        wanted.round = NccomRound(wanted.collective, self._rounds, told, seconds=seconds)
        for launch in wanted.launches:
            wanted.round.launch(*launch)
        wanted.launches.clear()
        wanted.told = await wanted.round.run()
        return ()


async def _ended(task: asyncio.Task[tuple[RankReport, ...]]) -> None:
    """
    Wait for the end of a round; when we are cancelled, for its end after that.

    It is cancelled once, whoever wants its end: a second time would disturb the cleaning up after the first.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if not task.cancelling():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s: %s", task.get_name(), type(error).__name__, error)
        raise
