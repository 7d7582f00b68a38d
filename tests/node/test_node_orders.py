"""Orders and leases: done once, work cancelled by absence and leases never, stored first, ended with their workload."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checks.contract import Tier
from healthd.core.model import Order, OrderReport
from healthd.core.workload import Process, process_of, with_start
from healthd.node.occupancy.model import read_process
from healthd.node.orders import leases
from healthd.node.orders.leases import HeldLease, LeaseStore, Observations, ProcessFinder, judge_lease, process_start
from healthd.node.settings import ActiveSettings, SyncSettings, Unprompted
from tests.every import every
from tests.node import node_kit
from tests.node.node_kit import BOOT, MovedClock, World, eventually, lease, lease_order, quiet, run, run_order

ON_ORDER = ActiveSettings(unprompted=Unprompted.OFF)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_run_order_is_done_once_however_often_it_is_listed(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            for _ in range(3):
                await world.take(run_order())
            assert world.status("R1") == "done"
            assert len(world.probes.active_plans()) == 1
            assert world.book.result("matmul") is not None
            await world.take(run_order(), acknowledged=("R1",))
            assert world.status("R1") is None
            await world.take(run_order())  # an answer that was on its way: it is told again, not done again
            assert world.status("R1") == "done"
            assert len(world.probes.active_plans()) == 1

    run(main())


def test_end_is_repeated_until_it_is_acknowledged_or_nobody_asks_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            await world.take(run_order())
            world.orders.apply((), issuer="db1", acknowledged=(), carried={})
            assert world.status("R1") == "done"  # it was never told
            await world.take()
            assert world.status("R1") is None

    run(main())


def test_done_orders_are_remembered_by_a_restarted_daemon(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            await world.take(run_order())
        async with World(tmp_path, active=ON_ORDER) as again:
            await quiet()
            await again.take(run_order())
            assert again.status("R1") == "done"
            assert again.probes.active_plans() == []

    run(main())


def test_order_that_is_no_longer_listed_is_cancelled_and_no_statement_cancels_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.gate.clear()
            await world.take(run_order())
            assert world.status("R1") == "running"
            world.orders.apply(None, issuer="db1", acknowledged=(), carried={})
            await world.take(issuer="another-database")
            assert world.status("R1") == "running"
            await world.take()
            assert len(world.probes.cancelled) == 1
            assert world.status("R1") == "cancelled"

    run(main())


def test_run_order_past_its_deadline_is_called_off(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.gate.clear()
            await world.take(run_order(deadline=60.0))
            world.time.move(61)
            world.orders.tick()
            await quiet()
            assert world.orders.reports()["R1"] == OrderReport(status="cancelled", message="not finished within 60 s")

    run(main())


def test_kind_of_order_that_is_not_known_here_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await world.take(Order(id="C1", kind="collective", deadline_seconds=5.0))
            assert world.status("C1") == "refused"

    run(main())


# --- taking a lease ---------------------------------------------------------------------------------------------------


def test_lease_is_on_disk_before_it_is_accepted_and_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.orders.apply((lease_order(lease()),), issuer="db1", acknowledged=(), carried={})
            assert world.status("L1") == "running"  # nothing is promised yet
            await quiet()
            assert world.status("L1") == "accepted"
            assert b'"L1"' in (tmp_path / "orders.json").read_bytes()
            assert [claim.by for claim in world.book.allocated] == ["lease"]
        async with World(tmp_path, active=ON_ORDER) as again:
            assert again.status("L1") == "accepted"
            assert [one.id for one in again.book.leases] == ["L1"]
            await again.take(lease_order(lease()))
            assert again.status("L1") == "accepted"

    run(main())


def test_lease_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            (tmp_path / ".orders.json.new").mkdir()
            await world.take(lease_order(lease()))
            assert world.status("L1") == "refused"
            assert world.book.leases == ()

    run(main())


def test_second_lease_is_refused_and_so_is_one_where_somebody_else_has_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOOK_AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.holders = ("cpu:0: pid 77 (python)",)
            await world.take(lease_order(lease("L0")))
            assert world.orders.reports()["L0"].message == "the devices are taken: cpu:0: pid 77 (python)"
            await world.take(lease_order(lease("L1", workload="pid:77")))
            assert world.status("L1") == "accepted"  # the job itself may hold them already
            await world.take(lease_order(lease("L1", workload="pid:77")), lease_order(lease("L2")))
            assert world.status("L2") == "refused"

    run(main())


def test_a_lease_waits_for_processes_that_are_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of the validation of the same gate are, when it is granted the node."""
    monkeypatch.setattr(leases, "LOOK_AGAIN_SECONDS", 0.01)

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.holders = ("cpu:0: pid 77 (python)",)
            await world.take(lease_order(lease("L0")))
            assert world.status("L0") == "running"
            world.probes.holders = ()
            await eventually(lambda: world.status("L0") == "accepted")

    run(main())


@pytest.mark.parametrize(("holders", "status"), [((), "accepted"), (("cpu:0: pid 77 (python)",), "refused")])
def test_a_lease_that_a_restart_kept_from_looking_is_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders: tuple[str, ...], status: str
) -> None:
    monkeypatch.setattr(leases, "LOOK_AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.look_gate.clear()
            await world.take(lease_order(lease()))
            assert world.status("L1") == "running"
        async with World(tmp_path, active=ON_ORDER) as again:
            assert again.status("L1") == "running", "stored, and who holds the devices was not looked at"
            assert [claim.by for claim in again.book.allocated] == ["unseen", "lease"]
            again.probes.holders = holders
            await again.take(lease_order(lease()))
            assert again.status("L1") == status
            assert [one.id for one in again.book.leases] == (["L1"] if status == "accepted" else [])
        async with World(tmp_path, active=ON_ORDER) as third:
            assert third.status("L1") == ("accepted" if status == "accepted" else None)

    run(main())


@pytest.mark.parametrize("holders", [(), ("cpu:0: pid 77 (python)",)])
def test_a_lease_survives_one_look_at_the_devices_that_fails_and_goes_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders: tuple[str, ...]
) -> None:
    monkeypatch.setattr(leases, "LOOK_AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.look_fails = ["did not end within 10 s"]
            world.probes.holders = holders
            await world.take(lease_order(lease()))
            await eventually(lambda: world.status("L1") == ("refused" if holders else "accepted"))
            if holders:
                assert world.orders.reports()["L1"].message == "the devices are taken: cpu:0: pid 77 (python)"

    run(main())


@pytest.mark.parametrize("others", [0, 1], ids=["one after the other", "processes are seen in between"])
def test_a_lease_is_refused_where_two_looks_at_the_devices_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(leases, "LOOK_AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.holders = ("cpu:0: pid 77 (python)",)
            world.probes.look_fails = ["did not end within 10 s", *[""] * others, "did not end within 10 s"]
            before = world.probes.surveys
            await world.take(lease_order(lease()))
            await eventually(lambda: world.status("L1") == "refused")
            report = world.orders.reports()["L1"]
            assert report.message == "the devices could not be checked: did not end within 10 s"
            assert world.probes.surveys - before == 2 + others
            assert world.book.leases == ()

    run(main())


def test_a_lease_is_accepted_where_it_cannot_be_seen_who_holds_the_devices(tmp_path: Path) -> None:
    """The gate goes by that; it asks here only where a hook in the job's container has seen who holds them."""

    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.probes.holders = None
            await world.take(lease_order(lease()))
            assert world.status("L1") == "accepted"
            assert [claim.by for claim in world.book.allocated] == ["unseen", "lease"]

    run(main())


def test_lease_waits_until_no_probe_of_ours_uses_the_devices(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.gate.clear()
            await quiet()
            assert world.book.running == "quick"
            await world.take(lease_order(lease()))
            await eventually(lambda: world.status("L1") == "accepted")
            assert len(world.probes.cancelled) == 1
            assert world.book.running is None

    run(main())


def test_leased_node_refuses_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            await world.take(lease_order(lease()))
            await world.take(lease_order(lease()), run_order())
            assert world.status("R1") == "refused"
            await world.take(lease_order(lease()), run_order("R2", Tier.PASSIVE))
            assert world.status("R2") == "done"  # passive checks never disturb a job

    run(main())


def test_checks_of_a_dead_jobs_suspect_pass_its_own_lease_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            own = lease_order(lease())
            await world.take(own)
            await world.take(own, run_order("R1", past="g0"))
            assert world.status("R1") == "refused"
            await world.take(own, run_order("R2", past="g1"))
            await eventually(lambda: world.status("R2") == "done")
            assert world.status("L1") == "accepted"
            world.probes.holders = ("cpu:0: pid 77 (python)",)  # its launcher has tried again
            world.time.move(2)
            await world.take(own, run_order("R3", past="g1"))
            await eventually(lambda: world.status("R3") == "refused")

    run(main())


# --- the end of a lease -----------------------------------------------------------------------------------------------


def test_lease_that_is_no_longer_listed_goes_on_whoever_gave_it(tmp_path: Path) -> None:
    """The database may be an old copy, or the machine may have another name now."""

    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            await world.take(lease_order(lease()))
            for issuer in ("db1", "db2", "db1"):
                await world.take(issuer=issuer)
                assert world.status("L1") == "accepted"
            await world.take(dataclasses.replace(lease_order(lease()), withdrawn=True))
            assert world.status("L1") == "cancelled"
            assert world.book.leases == ()

    run(main())


def test_lease_that_is_withdrawn_ends_whoever_gave_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            await world.take(lease_order(lease()))
            withdrawn = dataclasses.replace(lease_order(lease()), withdrawn=True)
            for _ in range(2):
                await world.take(withdrawn, issuer="db2")  # which has never listed it before
                assert world.status("L1") == "cancelled"
                assert world.book.leases == ()
            await world.take(dataclasses.replace(lease_order(lease("L2")), withdrawn=True), issuer="db2")
            assert world.status("L2") == "cancelled", "it was never here, and that ends it too"

    run(main())


def test_lease_ends_with_its_process_and_the_quick_tier_is_overdue(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def main() -> None:
        try:
            async with World(tmp_path) as world:
                await quiet()
                runs = len(world.probes.active_plans())
                await world.take(lease_order(lease(workload=f"pid:{job.pid}")))
                world.orders.tick()
                assert world.status("L1") == "accepted"
                job.kill()
                job.wait()
                world.orders.tick()
                assert world.orders.reports()["L1"] == OrderReport(
                    status="done", message=f"process {job.pid} has ended"
                )
                await world.passed(60)
                assert len(world.probes.active_plans()) == runs + 1
        finally:
            job.kill()
            job.communicate()

    run(main())


def test_reboot_ends_leases_and_the_order_is_not_taken_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            await world.take(lease_order(lease()))
        async with World(tmp_path, boot_id="boot-2") as again:
            await again.take(lease_order(lease()))
            assert again.orders.reports()["L1"] == OrderReport(status="done", message="the machine was restarted")
            assert again.book.leases == ()

    run(main())


# --- leases that may have been lost -----------------------------------------------------------------------------------


@pytest.fixture
def with_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are made from here on have one."""
    sync = SyncSettings(aggregators=("http://127.0.0.1:1",))
    monkeypatch.setattr(node_kit, "settings", functools.partial(node_kit.settings, sync=sync))


def unseen(world: World) -> list[str]:
    return [claim.holder for claim in world.book.allocated if claim.by == "unseen"]


DAMAGED = "the lease file was damaged, so a job may have the node"


@pytest.mark.usefixtures("with_aggregator")
def test_after_a_damaged_file_the_node_is_taken_until_its_listed_lease_is_stored_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            await world.take(lease_order(lease()))
        (tmp_path / "orders.json").write_text("garbage")
        for _ in range(2):  # a restart does not settle it
            async with World(tmp_path) as again:
                await quiet()
                assert unseen(again) == [DAMAGED]
                again.orders.apply(None, issuer="db1", acknowledged=(), carried={})
                assert unseen(again) == [DAMAGED]
                assert again.probes.active_plans() == []
        assert (tmp_path / "orders.json.damaged").read_text() == "garbage"
        async with World(tmp_path) as again:
            again.probes.holders = ("cpu:0: pid 77 (python)",)  # its job is at work
            await quiet()
            (tmp_path / ".orders.json.new").mkdir()
            await again.take(lease_order(lease()))
            assert (again.status("L1"), unseen(again)) == (None, [DAMAGED])  # a refusal would end it
            (tmp_path / ".orders.json.new").rmdir()
            again.orders.apply((lease_order(lease()),), issuer="db1", acknowledged=(), carried={})
            assert unseen(again) == [DAMAGED]
            await quiet()
            assert (again.status("L1"), unseen(again)) == ("accepted", [])
        async with World(tmp_path) as last:
            await quiet()
            assert (last.status("L1"), unseen(last)) == ("accepted", [])

    run(main())


@pytest.mark.usefixtures("with_aggregator")
def test_after_a_damaged_file_a_node_without_listed_leases_is_free_and_does_its_runs(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "orders.json").mkdir()  # cannot be read
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            assert unseen(world) == [DAMAGED]
            await world.take(run_order())
            assert (world.status("R1"), world.book.allocated) == ("done", ())

    run(main())


def test_node_without_an_aggregator_does_not_wait_for_one(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "orders.json").write_text("garbage")
        async with World(tmp_path) as world:
            await quiet()
            assert world.book.allocated == ()

    run(main())


@pytest.mark.usefixtures("with_aggregator")
@pytest.mark.parametrize(("before", "after"), [(BOOT, None), (None, None), (None, BOOT)])
def test_leases_are_kept_where_the_boot_is_not_known(tmp_path: Path, before: str | None, after: str | None) -> None:
    async def main() -> None:
        async with World(tmp_path, boot_id=before) as world:
            await quiet()
            await world.take(lease_order(lease()))
        async with World(tmp_path, boot_id=after) as again:
            await quiet()
            assert again.status("L1") == "accepted"
            assert unseen(again) == ["it is unknown whether the machine was restarted since its lease"]
            await again.take(lease_order(lease()))
            assert (again.status("L1"), unseen(again)) == ("accepted", [])
            await again.take(dataclasses.replace(lease_order(lease()), withdrawn=True))
            assert (again.status("L1"), again.book.allocated) == ("cancelled", ())

    run(main())


def held(*, age: float, seen: float | None = None, start: int | None = None, **changes: object) -> HeldLease:
    return HeldLease(
        lease=lease(**changes),
        taken_at=1000.0 - age,
        process_start=start,
        seen_at=None if seen is None else 1000.0 - seen,
    )


@every(
    ("one", "holders", "start", "looked", "ended"),
    [
        (held(age=5), (), None, 0.0, ""),
        (held(age=901), (), None, 0.0, "no process took the devices within 900 s"),
        (held(age=901), (), None, 600.0, ""),  # the last look is too old to say so
        (held(age=9e4), ("x",), None, 0.0, ""),  # who can be seen has no bound
        (held(age=500, seen=59), (), None, 0.0, ""),
        (held(age=500, seen=60), (), None, 0.0, "the devices have been free for 60 s"),
        (held(age=500, seen=600), (), None, 595.0, ""),
        (held(age=8.6e4), None, None, 0.0, ""),
        (held(age=8.7e4), None, None, 0.0, "its time of 24 h is over, and no node can observe its job"),
        (held(age=5, workload="pid:9"), (), None, 0.0, ""),
        (held(age=901, workload="pid:9"), ("x",), None, 0.0, "process 9 was not seen within 900 s"),
        (held(age=9e5, workload="pid:9", start=7), (), 7, 0.0, ""),
        (held(age=50, workload="pid:9", start=7), ("x",), 8, 0.0, "process 9 has ended"),  # its id was used again
        (held(age=50, workload="pid:9", start=7), ("x",), None, 0.0, "process 9 has ended"),
        (held(age=50, grace_seconds=10.0), (), None, 0.0, "no process took the devices within 10 s"),
        # Its pods come when Kueue admits, and its controller says when it has ended.
        (held(age=8.6e4, workload="kueue:c/ml/train/u1"), (), None, 0.0, ""),
        (held(age=500, seen=600, workload="kueue:c/ml/train/u1"), (), None, 0.0, ""),
        (
            held(age=8.7e4, workload="kueue:c/ml/train/u1"),
            (),
            None,
            0.0,
            "its time of 24 h is over, and no node can observe",
        ),
        (held(age=9e4, workload="kueue:c/ml/train/u1"), ("x",), None, 0.0, ""),
    ],
)
def test_fate_of_a_lease(
    one: HeldLease, holders: tuple[str, ...] | None, start: int | None, looked: float, ended: str
) -> None:
    sight = Observations(start_of=lambda pid: start, holders=holders, surveyed_at=1000.0 - looked)
    found = judge_lease(one, sight, now=1000.0, settle_seconds=60.0).ended
    assert (found.startswith(ended), bool(found)) == (True, bool(ended)), found


@pytest.mark.parametrize(
    ("one", "ended"),
    [
        (held(age=901), ""),
        (held(age=8.7e4), "its time of 24 h is over, and no node can observe its job"),
        (held(age=500, seen=60), "the devices have been free for 60 s"),
    ],
)
def test_on_plain_cpus_nobody_at_the_devices_does_not_end_a_lease_before_somebody_was(
    one: HeldLease, ended: str
) -> None:
    sight = Observations(start_of=lambda pid: None, holders=(), surveyed_at=1000.0, jobs_hold=False)
    assert judge_lease(one, sight, now=1000.0, settle_seconds=60.0).ended == ended


def test_process_is_known_by_its_start_and_a_zombie_has_ended() -> None:
    assert process_start(Path("/proc"), os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(Path("/proc"), child.pid) is None
    child.wait()
    assert process_of("pid:12") == Process(pid=12)
    assert process_of("pid:12@345") == Process(pid=12, started=345)
    assert [process_of(text) for text in (None, "pid:", "pid:-1", "pod:12", "pid:99999999999", "pid:12@")] == [None] * 6


def test_process_is_found_by_its_start_from_another_pid_namespace() -> None:
    """As of a container, where it is called 1; a stranger of that number here is another process."""
    line = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "sleep", "1000"]
    with subprocess.Popen(line, stderr=subprocess.PIPE) as outer:
        try:
            child = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            while not (pids := child.read_text().split()):
                if outer.poll() is not None:
                    pytest.skip("needs 'unshare --user --pid'; allow namespaces of users, or run as root")
            inside = int(pids[0])
            started = process_start(Path("/proc"), inside)
            assert started is not None
            finder = ProcessFinder(Path("/proc"))
            first = Process(pid=1, started=started)
            assert finder.start_of(first) == finder.start_of(first) == started
            assert finder.start_of(Process(pid=2, started=started)) is None
            assert finder.start_of(Process(pid=1, started=started + 1)) is None
            os.kill(inside, signal.SIGKILL)
            outer.wait()
            assert finder.start_of(first) is None
        finally:
            outer.kill()


def test_a_hook_tells_the_start_of_a_process_of_its_machine() -> None:
    own = f"pid:{os.getpid()}"
    assert process_of(with_start(own)) == Process(pid=os.getpid(), started=process_start(Path("/proc"), os.getpid()))
    assert [with_start(text) for text in ("pid:7@9", "slurm:7", "pid:2147483000")] == [
        "pid:7@9",
        "slurm:7",
        "pid:2147483000",
    ]


@pytest.mark.parametrize(
    ("one", "start", "ended", "is_seen"),
    [
        (held(age=5, workload="pid:9@7"), 7, "", True),
        (held(age=50, workload="pid:9@7", start=7), None, "process 9 has ended", False),
        # Of a PID namespace that is not seen here: it goes by who has the devices.
        (held(age=901, workload="pid:9@7"), None, "no process took the devices within 900 s", False),
        (held(age=500, workload="pid:9@7"), None, "", False),
    ],
)
def test_a_process_that_was_never_seen_may_be_out_of_sight(
    one: HeldLease, start: int | None, ended: str, is_seen: bool
) -> None:
    sight = Observations(start_of=lambda _: start, holders=(), surveyed_at=1000.0)
    found = judge_lease(one, sight, now=1000.0, settle_seconds=60.0)
    assert (found.ended, found.seen) == (ended, is_seen)


def test_a_lease_outlasts_a_moment_in_which_no_file_can_be_opened(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            await world.take(lease_order(lease(workload=f"pid:{os.getpid()}")))
            await quiet()
            world.orders.tick()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):  # its task is started again
                    world.orders.tick()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert world.status("L1") == "accepted"
            world.orders.tick()
            assert world.status("L1") == "accepted"

    run(main())


def test_a_process_of_which_only_the_name_can_be_read_just_now_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "12/stat").mkdir(parents=True)
    (tmp_path / "12/comm").write_text("train\n")
    with pytest.raises(IsADirectoryError):
        read_process(tmp_path, 12)


def test_ledger_is_bounded_and_keeps_the_newest_fates(tmp_path: Path) -> None:
    ledger = LeaseStore(tmp_path / "orders.json", clock=MovedClock().clock, boot_id=BOOT)
    for number in range(520):
        ledger._final_reports[f"R{number}"] = OrderReport(status="done")
    ledger.add_final_report("last", OrderReport(status="done"))
    again = LeaseStore(tmp_path / "orders.json", clock=MovedClock().clock, boot_id=BOOT)
    assert again.final_report("last") is not None
    assert again.final_report("R0") is None
