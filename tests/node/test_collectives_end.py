"""Every order to be ranks ends with an outcome within its time, whatever becomes of its session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from checks.worker.faults import Fault
from healthd.core.model import OrderReport, OrderStatus
from healthd.node.orders import collectives
from healthd.node.orders.orders import END_SECONDS
from tests.node.node_collectives_kit import ScriptedSession, Site, collective
from tests.node.node_kit import eventually, lease, lease_order, quiet, run, run_order


def test_an_order_whose_session_cannot_be_made_ends(tmp_path: Path) -> None:
    def broken(faults: Sequence[Fault]) -> ScriptedSession:
        raise ValueError("a bug")

    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.use(broken)
            await site.take(collective())
            assert site.status("C1") == "refused"
            assert site.report("C1").message == "internal error of healthd: ValueError: a bug"

    run(main())


def test_an_order_whose_session_is_stopped_before_its_first_step_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            orders = [collective("C1")]

            def replace() -> None:
                site.orders.apply(tuple(orders), issuer="db1", acknowledged=(), carried={})

            def stop_as_it_starts() -> None:
                if site.book.running is not None and len(orders) == 1:
                    orders.append(collective("C2", validation="v2"))
                    asyncio.get_running_loop().call_soon(replace)  # before the first step of the session's task

            site.book.listen(stop_as_it_starts)
            await site.take(*orders)
            await eventually(lambda: site.status("C2") == "done")
            assert site.status("C1") in ("refused", "cancelled")

    run(main())


class SlowLookUp:
    """The look-up of the interface to the main node, which takes as long as `answer` is not set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began = threading.Event()
        self.answer = threading.Event()
        self.error = error

    def __call__(self, main: str) -> str | None:
        self.began.set()
        self.answer.wait(30.0)
        if self.error is not None:
            raise self.error
        return "lo"


@pytest.mark.parametrize("error", [None, OSError("no more files can be opened")])
def test_an_order_ends_where_the_interface_to_its_main_node_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    look_up = SlowLookUp(error)
    monkeypatch.setattr(collectives, "interface_to", look_up)

    async def main() -> None:
        async with Site(tmp_path, interface=None) as site:
            await quiet()
            await site.take(collective())
            await eventually(look_up.began.is_set)
            await site.take(collective(), run_order())  # for which a session without an order makes room
            look_up.answer.set()
            await eventually(lambda: site.status("R1") == "done")
            assert site.status("C1") == ("done" if error is None else "cancelled")

    run(main())


def test_an_order_is_called_off_while_the_interface_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = SlowLookUp()
    monkeypatch.setattr(collectives, "interface_to", look_up)

    async def main() -> None:
        async with Site(tmp_path, interface=None) as site:
            await quiet()
            await site.take(collective())
            await eventually(look_up.began.is_set)
            await site.take()
            assert site.status("C1") == "cancelled"
            look_up.answer.set()

    run(main())


def test_an_order_that_does_not_end_when_it_is_called_off_is_reported_with_what_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            site.script.kill_gate.clear()
            await site.take(collective(deadline=30.0))
            site.time.move(31.0)
            site.orders.tick()
            await quiet()
            assert site.status("C1") == "running"
            site.time.move(END_SECONDS)
            site.orders.tick()
            assert site.status("C1") == "cancelled"
            assert site.report("C1").message == "not finished within 30 s, and it does not stop"
            assert [one.rank for one in site.report("C1").ranks] == [0]
            site.script.kill_gate.set()

    run(main())


def test_a_report_that_cannot_be_stored_ends_its_order_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(order_id: str, report: OrderReport) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            monkeypatch.setattr(site.ledger, "add_final_report", fail)
            await site.take(collective("C1"), collective("C2"))
            for name in ("C1", "C2"):
                assert site.status(name) == OrderStatus.CANCELLED
                assert "cannot be stored" in site.report(name).message

    run(main())


@pytest.mark.parametrize("comes", ["validation", "lease"])
def test_a_session_that_is_ending_is_left_to_its_end(tmp_path: Path, comes: str) -> None:
    """Else its ranks might still have the devices when the next one looks who has them."""

    async def main() -> None:
        async with Site(tmp_path, idle_seconds=0.0) as site:
            await quiet()
            site.script.close_gate.clear()
            await site.take(collective("C1"))
            await eventually(lambda: "close" in site.script.events)
            other = collective("C2", validation="v2") if comes == "validation" else lease_order(lease())
            await site.take(collective("C1"), other)
            assert site.script.events[-1] == "close"
            assert site.status(other.id) in ("accepted", "running")
            site.script.close_gate.set()
            await eventually(lambda: site.status(other.id) == ("done" if comes == "validation" else "accepted"))
            assert "disturbed" not in site.script.events

    run(main())
