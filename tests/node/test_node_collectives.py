"""Collectives as orders of a node: one session for a validation, and the devices free again after every end of it."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from checks.contract import Tier
from healthd.core.errors import ConfigError
from healthd.core.model import Order, OrderReport
from healthd.node.interfaces import addresses, check_interface, interface_to, peer_address, source_to
from healthd.node.orders.collectives import MAX_WAITING
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.runner.collective.ranks import RefusedError
from tests.node.node_collectives_kit import Site, collective
from tests.node.node_kit import eventually, lease, lease_order, quiet, run, run_order
from tests.runner.ranks_kit import orders
from tests.runner.runner_kit import make_runner, ranks_left, workers_left

# --- one validation ---------------------------------------------------------------------------------------------------


def test_order_is_done_once_and_the_next_of_its_validation_finds_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            first, second = collective("C1"), collective("C2")
            for _ in range(3):
                await site.take(first)
            assert site.status("C1") == "done"
            (rank,) = site.report("C1").ranks
            assert (rank.events, rank.key) == (7, "k")
            assert site.book.running == "collective (validation v1)"
            await site.take(first, second, acknowledged=("C1",))
            assert site.status("C2") == "done"
            assert site.script.events == ["open", "join", "join"]
            assert site.script.sessions[0].events[1].endswith("by lo in 60")

    run(main())


def test_running_order_tells_its_ranks(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            told: list[OrderReport] = []
            site.orders.on_change = lambda: told.append(site.report("C1"))
            site.script.gate.clear()
            await site.take(collective())
            assert site.status("C1") == "running"
            assert [one.events for one in site.report("C1").ranks] == [1]
            assert told[-1].ranks

    run(main())


def test_session_ends_when_no_order_comes(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path, idle_seconds=0.05) as site:
            await quiet()
            await site.take(collective())
            await eventually(lambda: site.book.running is None)
            assert site.script.events == ["open", "join", "close"]
            await site.take(collective("C2"))  # and another one begins when there is work again
            assert site.status("C2") == "done"
            assert len(site.script.sessions) == 2

    run(main())


def test_another_validation_ends_the_session_of_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective("C1"))
            await site.take(collective("C1"), collective("C2", validation="v2"))
            assert site.status("C1") == "cancelled"
            assert site.report("C1").message == "validation v2 began"
            assert [one.reason for one in site.report("C1").ranks] == ["Cancelled"]
            assert site.script.sessions[0].events[-2:] == ["killed", "close"]
            assert site.book.running == "collective (validation v2)"
            assert site.status("C2") == "running"

    run(main())


def test_another_validation_takes_the_place_of_one_that_still_looks_at_the_devices(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.probes.look_gate.clear()
            await site.take(collective("C1"))
            await site.take(collective("C1"), collective("C2", validation="v2"))
            site.probes.look_gate.set()
            await quiet()
            assert site.status("C1") == "refused"
            assert site.report("C1").message == "validation v2 began"
            assert site.status("C2") == "done"
            assert len(site.script.sessions) == 1

    run(main())


def test_lease_that_comes_while_a_session_looks_at_the_devices_keeps_it_from_beginning(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.probes.look_gate.clear()
            await site.take(collective("C1"))
            await site.take(collective("C1"), lease_order(lease()))
            site.probes.look_gate.set()
            await eventually(lambda: site.status(lease().id) == "accepted")
            assert site.status("C1") == "refused"
            assert site.script.sessions == []

    run(main())


# --- called off -------------------------------------------------------------------------------------------------------


def test_order_that_is_no_longer_listed_is_cancelled_and_the_session_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective("C1"), collective("C2"))
            assert site.status("C2") == "accepted"
            site.orders.apply((), issuer="db1", acknowledged=(), carried={})
            await quiet()
            assert (site.status("C1"), site.status("C2")) == ("cancelled", "cancelled")
            assert site.report("C1").ranks
            assert site.script.events == ["open", "join", "killed"]
            site.script.gate.set()
            await site.take(collective("C3"))
            assert site.status("C3") == "done"
            assert len(site.script.sessions) == 1

    run(main())


def test_no_statement_cancels_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective())
            site.orders.apply(None, issuer="db1", acknowledged=(), carried={})
            await quiet()
            assert site.status("C1") == "running"

    run(main())


def test_order_past_its_deadline_is_called_off_by_the_watch(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective(deadline=30.0))
            site.time.move(29.0)
            site.orders.tick()
            await quiet()
            assert site.status("C1") == "running"
            site.time.move(2.0)
            site.orders.tick()
            await quiet()
            assert site.report("C1").message == "not finished within 30 s"
            assert site.status("C1") == "cancelled"

    run(main())


def test_lease_ends_the_session_before_it_is_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective())
            await site.take(collective(), lease_order(lease()))
            await eventually(lambda: site.status("L1") == "accepted")
            assert site.script.events == ["open", "join", "killed", "close"]
            assert (site.status("C1"), site.report("C1").message) == ("cancelled", "job train is about to get the node")
            assert site.book.running is None
            await site.take(collective("C2"), lease_order(lease()))
            assert site.status("C2") == "refused"
            assert "job train" in site.report("C2").message

    run(main())


def test_lease_that_comes_while_ranks_are_being_killed_waits_for_their_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective("C1"))
            site.script.kill_gate.clear()
            await site.take()  # called off: its ranks are being killed
            await site.take(lease_order(lease()))
            assert site.script.events == ["open", "join"]
            assert site.status(lease().id) == "running"
            site.script.kill_gate.set()
            await eventually(lambda: site.status(lease().id) == "accepted")
            assert site.script.events == ["open", "join", "killed", "close"]
            assert site.status("C1") == "cancelled"

    run(main())


def test_end_of_the_daemon_ends_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective())
        assert site.script.events == ["open", "join", "killed", "close"]

    run(main())


# --- beside runs ------------------------------------------------------------------------------------------------------


def test_runs_wait_for_the_end_of_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path, idle_seconds=0.1) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective(), run_order())
            assert (site.status("C1"), site.status("R1")) == ("running", "accepted")
            assert site.probes.active_plans() == []
            site.script.gate.set()
            await eventually(lambda: site.status("R1") == "done")
            assert site.script.events[-1] == "close"

    run(main())


def test_ordered_run_under_way_ends_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.probes.gate.clear()
            await site.take(run_order())
            await site.take(run_order(), collective())
            assert (site.status("R1"), site.status("C1")) == ("running", "accepted")
            assert site.script.events == []
            site.probes.gate.set()
            await eventually(lambda: site.status("C1") == "done")
            assert site.status("R1") == "done"

    run(main())


def test_run_that_nobody_ordered_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path, active=ActiveSettings(unprompted=Unprompted.IDLE)) as site:
            site.probes.gate.clear()
            await quiet()
            assert [plan.tier for plan in site.probes.active_plans()] == [Tier.QUICK]
            await site.take(collective())
            await eventually(lambda: site.status("C1") == "done")
            assert len(site.probes.cancelled) == 1

    run(main())


def test_devices_that_a_job_holds_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.probes.holders = ("cpu:0: pid 7 (python)",)
            await site.take(collective())
            await eventually(lambda: site.status("C1") == "refused")
            assert "pid 7" in site.report("C1").message
            assert site.script.events == []

    run(main())


# --- what a session does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "error", "status", "words"),
    [
        ("the devices are taken: x", None, "refused", "the devices are taken: x"),
        ("", RefusedError("it asks for 3 ranks"), "refused", "it asks for 3 ranks"),
        ("", ValueError("a bug"), "cancelled", "internal error of healthd: ValueError: a bug"),
    ],
)
def test_session_that_cannot_or_that_fails_is_told_and_the_daemon_goes_on(
    tmp_path: Path, refusal: str, error: Exception | None, status: str, words: str
) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.refusal, site.script.error = refusal, error
            await site.take(collective())
            assert (site.status("C1"), site.report("C1").message) == (status, words)
            site.script.refusal, site.script.error = "", None
            await site.take(collective("C2"))
            await eventually(lambda: site.status("C2") == "done")

    run(main())


def test_faults_in_force_reach_the_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.book.set_faults(("all_reduce@rank:2=corrupt",))
            await site.take(collective())
            assert site.script.sessions[0].faults == ("all_reduce@rank:2=corrupt",)

    run(main())


def test_too_many_orders_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(*(collective(f"C{index}") for index in range(MAX_WAITING + 2)))
            assert [site.status(f"C{index}") for index in (0, 1, MAX_WAITING + 1)] == [
                "running",
                "accepted",
                "refused",
            ]

    run(main())


def test_restarted_daemon_does_no_order_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            await site.take(collective())
            assert site.report("C1").ranks
        async with Site(tmp_path) as again:
            await quiet()
            await again.take(collective())
            assert again.status("C1") == "done"
            assert again.script.events == []

    run(main())


def test_two_nodes_with_real_ranks(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(_made(tmp_path / "a")) as one, Site(_made(tmp_path / "b")) as two:
            runners = [
                make_runner(run_dir=tmp_path / name / "run", options={"cpu_devices": 1}, heed_leases=False)
                for name in ("a", "b")
            ]
            one.use(runners[0].session)
            two.use(runners[1].session)
            first, second = orders(1, 1)
            await one.take(Order(id="C1", kind="collective", deadline_seconds=90.0, collective=first))
            await two.take(Order(id="C1", kind="collective", deadline_seconds=90.0, collective=second))
            await eventually(lambda: (one.status("C1"), two.status("C1")) == ("done", "done"), seconds=30.0)
            assert [report.reason for site in (one, two) for report in site.report("C1").ranks] == [None, None]
            assert len(ranks_left()) == 2
            await one.take(lease_order(lease()))
            await eventually(lambda: one.status("L1") == "accepted")
            assert len(ranks_left()) == 1
        assert workers_left() == []

    run(main())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- interfaces -------------------------------------------------------------------------------------------------------


def test_addresses_of_this_machine_are_those_that_it_speaks_from() -> None:
    assert "127.0.0.1" in {str(one.ip) for one in addresses() if one.interface == "lo"}
    assert source_to("127.0.0.1", 9) == "127.0.0.1"
    assert interface_to("127.0.0.1") == "lo"
    for one in addresses():
        if not one.ip.is_link_local:
            assert interface_to(str(one.ip)) == one.interface


@pytest.mark.parametrize("main", ["", "no.such.host.invalid", "not an address", "2001:db8::zz"])
def test_main_that_is_no_address_has_no_interface(main: str) -> None:
    assert interface_to(main) is None


def test_unknown_interface_is_one_line_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"node.interface: 'eth99' does not exist; choose from: .*\blo\b"):
        check_interface("eth99")
    check_interface("lo")
    check_interface(None)


def test_peer_address_is_that_of_the_interface_or_of_the_way_to_the_aggregator() -> None:
    assert peer_address("lo", "http://192.0.2.7:8090") == "127.0.0.1"
    assert peer_address("eth99", None) is None
    assert peer_address(None, None) is None
    assert peer_address(None, "http://no.such.host.invalid:8090") is None
    assert peer_address(None, "http://[bad") is None
    here = peer_address(None, "http://127.0.0.1:8090")  # this tells nothing of the way to other nodes
    outward = [str(one.ip) for one in addresses() if not one.ip.is_loopback and not one.ip.is_link_local]
    assert here in (outward or ["127.0.0.1"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((here, 0))


# --- withdrawn orders -------------------------------------------------------------------------------------------------


def withdrawn(order: Order) -> Order:
    return dataclasses.replace(order, withdrawn=True)


def test_withdrawn_order_is_called_off_and_its_end_is_repeated_as_long_as_it_is_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            site.script.gate.clear()
            await site.take(collective())
            await site.take(withdrawn(collective()))
            await eventually(lambda: site.status("C1") == "cancelled")
            assert site.script.events == ["open", "join", "killed"]
            for _ in range(3):  # of no use: a report that was told would be dropped if the order were not listed
                carried = site.orders.reports()
                listed = (withdrawn(collective()),)
                site.orders.apply(listed, issuer="db1", acknowledged=(), carried=carried)
                assert [rank.reason for rank in site.report("C1").ranks] == ["Cancelled"]
            await site.take()
            assert site.status("C1") is None

    run(main())


def test_order_that_is_withdrawn_before_it_came_is_never_begun(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(tmp_path) as site:
            await quiet()
            await site.take(withdrawn(collective()))
            assert site.status("C1") == "cancelled"
            await site.take(collective())  # an answer that was on its way
            assert site.status("C1") == "cancelled"
            assert site.script.events == []

    run(main())
