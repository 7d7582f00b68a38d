"""The ranks of one validation over several nodes: real workers, real gloo over TCP, nodes side by side on loopback."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from checks.contract import CheckInfo
from healthd.core.model import RankReport
from healthd.runner.collective.ranks import RefusedError
from healthd.runner.device_claim import lock_file
from tests.node.node_kit import eventually
from tests.patience import PATIENCE
from tests.runner.ranks_kit import SMALL, blank, lost, nodes, orders
from tests.runner.runner_kit import below_guard, make_runner, ranks_left, wait_gone, workers_left
from tests.runner.session_kit import accused

# For ranks that are up already to meet, and then to get through a collective: what a test that has a rank fail waits.
JOIN_SECONDS = 2.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_ranks_stay_over_the_rounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 2, 1) as three:
            reports = await three.join(orders(2, 1, checks=("all_reduce", "all_gather")))
            assert lost(reports) == {}
            assert {(one.rank, one.check) for one in reports} == {
                (rank, check) for rank in range(3) for check in ("all_reduce", "all_gather")
            }
            assert {one.last for one in reports if one.check == "all_gather"} == {"all_gather/65536 left"}
            assert len({one.events for one in reports}) == 1
            before = workers_left()
            again = await three.join(orders(2, 1))
            assert workers_left() == before
            assert accused(again) == []
            sizes = next(iter(again)).data
            assert sizes is not None
            assert all(size["ready_seconds"] > 0.0 for size in sizes["sizes"])
            assert all(size["own_seconds"] > size["ready_seconds"] for size in sizes["sizes"])
            assert all(size["cpu_wait_seconds"] >= 0.0 for size in sizes["sizes"])  # any Linux of today counts it

    run(main())


def test_main_node_and_members_change_from_round_to_round_on_one_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, 1) as three:
            whole = orders(1, 1, 1)
            assert lost(await three.join(whole)) == {}
            first, second = (blank(one, group="pair", port=whole[0].port) for one in orders(1, 1))
            assert lost(await three.join([None, second, first])) == {}
            first, second = (blank(one, group="other", port=whole[0].port) for one in orders(1, 1))
            assert lost(await three.join([first, second, None])) == {}

    run(main())


def test_group_over_ipv6(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1) as two:
            assert lost(await two.join(orders(1, 1, main="::1"))) == {}

    run(main())


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason", "verdict"),
    [
        ("crash", "Crashed", "RankDied"),
        ("hang", "Timeout", "RankHung"),
        ("absent", "Timeout", "RankAbsent"),
        ("missing", "MissingDevice", "MissingDevice"),
        ("garbage", "Garbage", "Garbage"),
    ],
)
def test_faulty_rank_is_named_by_its_number_in_the_whole_group(
    tmp_path: Path, kind: str, reason: str, verdict: str
) -> None:
    async def main() -> None:
        # Rank 1 of this pair was rank 2 of the whole group, of which two nodes have left.
        async with nodes(tmp_path, 1, 1, faults=[f"all_reduce@rank:2={kind}"]) as two:
            await two.warm()
            first, second = orders(1, 1, join_seconds=JOIN_SECONDS, timeout_seconds=JOIN_SECONDS)
            reports = await two.join([first, blank(second, whole_rank=2)])
            assert lost(reports)[1] == reason
            assert [one.rank for one in reports if one.injected] == [1]
            assert accused(reports) == [("rank:1", verdict)]
            assert (reports[1].events == 0) == (kind in ("absent", "missing"))

    run(main())


def test_wrong_value_is_in_the_evidence_and_the_group_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, 1, faults=["all_reduce@rank:1=corrupt"]) as three:
            reports = await three.join(orders(1, 1, 1))
            assert lost(reports) == {}
            assert ("rank:1", "CollectiveMismatch") in accused(reports)

    run(main())


def test_slow_rank_shows_in_its_own_time_and_the_others_in_the_operation(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=slow:4"]) as two:
            reports = await two.join(orders(1, 1))
            ready = [one.data["sizes"][-1]["ready_seconds"] for one in reports if one.data is not None]
            assert ready[1] > 3 * ready[0]

    run(main())


def test_failed_rank_is_no_pass(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=fail"]) as two:
            reports = await two.join(orders(1, 1))
            assert lost(reports) == {1: "InjectedFault"}
            assert accused(reports) == [("rank:1", "InjectedFault")]

    run(main())


def test_after_a_loss_the_next_round_has_fresh_ranks(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=crash"]) as two:
            reports = await two.join(orders(1, 1, checks=("all_reduce", "all_gather")))
            assert {one.check for one in reports} == {"all_reduce"}  # after the loss there is no group
            assert accused(reports) == [("rank:1", "RankDied")]
            assert ranks_left() == []
            assert lost(await two.join(orders(1, 1, checks=("all_gather",)))) == {}

    run(main())


def test_killed_rank_is_told_at_once_and_its_neighbour_gets_a_grace(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 2, 1, params={"all_reduce": {"sizes_bytes": [2**20], "iterations": 2000}}) as three:
            joining = asyncio.create_task(three.join(orders(2, 1, timeout_seconds=30.0)))
            await eventually(lambda: three.seen(1) == "all_reduce/1048576 entered", seconds=30.0)
            victim = int(ranks_left()[0].split()[0])
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            reports = await joining
            assert time.monotonic() - began < 15.0 * PATIENCE
            assert len(lost(reports)) == 3
            ((_, verdict),) = accused(reports)
            assert verdict == "RankDied"

    run(main())


def test_main_node_that_never_comes_ends_the_waiting_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1) as two:
            began = time.monotonic()
            reports = await two.join([None, orders(1, 1, join_seconds=1.0)[1]])
            assert time.monotonic() - began < 20.0 * PATIENCE
            assert lost(reports) == {1: "Timeout"}
            assert "not complete within 1 s; last seen: joined rendezvous" in reports[0].message

    run(main())


def test_member_that_never_comes_leaves_the_others_at_the_same_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1) as two:
            await two.warm()
            first, second, _ = orders(1, 1, 1, join_seconds=JOIN_SECONDS)
            reports = await two.join([first, second])
            # Each node has a clock of its own, and who hears the main node end before its own time is up is its victim.
            assert lost(reports) in ({0: "Timeout", 1: "Timeout"}, {0: "Timeout", 1: "CheckError"})
            assert {(one.events, one.last) for one in reports} == {(2, "rendezvous/peers joined")}
            assert accused(reports) == [("node", "Timeout")]

    run(main())


def test_port_that_is_taken_is_told_apart(tmp_path: Path) -> None:
    async def main() -> None:
        wanted = orders(1, 1, join_seconds=JOIN_SECONDS)
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", wanted[0].port))
            taken.listen()
            async with nodes(tmp_path, 1, 1) as two:
                await two.warm()
                reports = await two.join(wanted)
                assert reports[0].reason == "StartFailed"
                assert f"port {wanted[0].port} is in use" in reports[0].message
                assert accused(reports) == [("rank:0", "StartFailed")]

    run(main())


def test_deadline_of_the_order_ends_all_with_what_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=hang"]) as two:
            assert lost(await two.join(orders(1, 1, checks=("all_gather",)))) == {}
            began = time.monotonic()
            reports = await two.join(orders(1, 1, timeout_seconds=60.0), deadline_seconds=JOIN_SECONDS)
            assert time.monotonic() - began < 20.0 * PATIENCE
            assert lost(reports) == {0: "Timeout", 1: "Timeout"}
            assert accused(reports) == [("rank:1", "RankHung")]

    run(main())


def test_worker_that_is_not_ready_in_time_has_not_failed_to_join(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1) as one:
            reports = await one.join([orders(1, 1)[0]], deadline_seconds=0.0)
            assert lost(reports) == {0: "StartFailed"}
            assert "not ready" in reports[0].message

    run(main())


def test_loading_the_checks_takes_of_the_time_of_the_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1) as one:
            (session,) = one.sessions
            await session.warm()
            known = await one.runners[0].catalogue()

            async def slow() -> Mapping[str, CheckInfo]:
                await asyncio.sleep(0.1)
                return known

            session._catalogue = slow
            reports = await one.join([orders(1, 1)[0]], deadline_seconds=0.1)
            assert lost(reports) == {0: "StartFailed"}

    run(main())


def test_main_node_that_dies_while_others_wait_makes_them_victims(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1) as two:
            first, second, _ = orders(1, 1, 1, join_seconds=60.0)
            joining = asyncio.create_task(two.join([first, second]))
            await eventually(lambda: two.seen(1) == "rendezvous/peers joined", seconds=30.0)
            pids = [below_guard(int(line.split()[0])) for line in ranks_left()]
            (main_pid,) = [pid for pid in pids if _listens(pid, first.port)]
            os.kill(main_pid, signal.SIGKILL)
            reports = await joining
            assert lost(reports) == {0: "Crashed", 1: "CheckError"}
            assert accused(reports) == [("rank:0", "RankDied")]
            assert accused(reports[1:]) == [("node", "Timeout")]  # alone, the one that lost it accuses nobody

    run(main())


def _listens(pid: int, port: int) -> bool:
    """Whether a process has a listening socket on a port."""
    listening = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in listening)


@pytest.mark.parametrize(
    "words",
    [
        "[pair.cc:537] Read error [10.77.0.2]:48814: Connection reset by peer.",
        "[pair.cc:553] Connection closed by peer [10.77.0.2]:32177.",
        "[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
        "[unbound_buffer.cc:129] Timed out waiting 6000ms for send operation to complete",
        "Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]",
        "wait timeout after 6000ms, keys: /0//cpu//0/2",
        "The client socket has timed out after 6000ms while trying to connect to (10.77.0.1, 29612).",
        "Timed out after 6 seconds waiting for clients. 2/3 clients joined.",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Connection refused",
        "No route to host",
        "Network is unreachable",
    ],
)
def test_rank_that_lost_a_peer_is_a_victim_by_its_words(words: str) -> None:
    """As torch 2.13 said it in namespaces: a peer killed, stopped, cut off one way and both, absent, and refusing."""
    victim = RankReport(
        rank=1, target="cpu:0", check="all_reduce", events=3, last="rendezvous left", reason="CheckError", message=words
    )
    assert accused([victim]) == [("node", "Timeout")]


# --- its end ----------------------------------------------------------------------------------------------------------


def test_cancelled_round_tells_how_far_it_was_and_leaves_no_rank(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=hang"]) as two:
            joining = asyncio.create_task(two.join(orders(1, 1)))
            await eventually(lambda: two.seen(0) == "all_reduce/1024 entered", seconds=30.0)
            joining.cancel()
            await asyncio.wait([joining])
            await asyncio.sleep(0.5)
            assert ranks_left() == []
            (last,) = two.heard[0][-1]
            assert (last.reason, last.last) == ("Cancelled", "all_reduce/1024 entered")

    run(main())


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.runner.ranks_kit import nodes\n"
        "from tests.runner.runner_kit import workers_left\n"
        "async def main():\n"
        "    async with nodes(Path(sys.argv[1]), 1, executed=True) as one:\n"
        "        await one.warm()\n"
        "        print(*(line.split()[0] for line in workers_left()), flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as daemon:
        assert daemon.stdout is not None
        pids = [int(word) for word in daemon.stdout.readline().split()]
        assert len(pids) == 2, "the rank, and what has forked it"
        daemon.kill()
    assert all(wait_gone(pid) for pid in pids)


def test_session_keeps_others_off_the_devices_until_it_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1), asyncio.timeout(30 * PATIENCE):
            other = make_runner(run_dir=tmp_path / "node0", options={"cpu_devices": 1}).session()
            with pytest.raises(RefusedError, match=r"another healthd .* is running active checks"):
                await other.open()
            await other.close()
        with lock_file(tmp_path / "node0", "cpu").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    run(main())


def test_session_whose_end_is_disturbed_keeps_nobody_off_the_devices(tmp_path: Path) -> None:
    """As when the order of another validation comes while the ranks of the last one are being ended."""

    async def main() -> None:
        session = make_runner(run_dir=tmp_path, options={"cpu_devices": 1}).session()
        await session.open()
        killing = asyncio.Event()
        kill_all = session._workers.kill_all

        async def kill_slowly() -> None:
            killing.set()
            await kill_all()
            await asyncio.Event().wait()

        session._workers.kill_all = kill_slowly  # type: ignore[method-assign]
        ending = asyncio.create_task(session.close())
        await killing.wait()
        ending.cancel()
        await asyncio.wait([ending])
        with lock_file(tmp_path, "cpu").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await eventually(lambda: workers_left() == [], 60)

    run(main())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_devices_that_somebody_holds_are_left_alone(tmp_path: Path) -> None:
    device = tmp_path / "devices" / "cpu0"
    device.parent.mkdir(parents=True)
    device.touch()
    # In a session of its own with a dead parent: a child of ours would count as ours.
    script = f"sleep 30 < {device} > /dev/null 2>&1 & echo $!"
    job = int(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout)

    async def main() -> None:
        session = make_runner(run_dir=tmp_path).session()
        try:
            with pytest.raises(RefusedError, match=f"the devices are taken: in use by .*pid {job} "):
                await session.open()
        finally:
            await session.close()

    try:
        run(main())
    finally:
        os.kill(job, signal.SIGKILL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 3}, "it asks for 3 ranks, and this node has 1"),
        ({"first_rank": 2}, "ranks 2 to 2 do not exist in a group of 2"),
        ({"checks": ("nothing",)}, "no such check: 'nothing'"),
        ({"checks": ("matmul",)}, "matmul does not compare ranks"),
        ({"checks": ()}, "it names no check"),
        ({"port": 0}, "0 is not a port"),
    ],
)
def test_order_that_cannot_be_followed_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1) as one:
            with pytest.raises(RefusedError, match=words):
                await one.join([blank(orders(1, 1)[0], **changes)])

    run(main())


def test_evidence_stays_small(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, params={"all_reduce": SMALL["all_reduce"]}) as two:
            (report, _) = await two.join(orders(1, 1))
            assert len(str(report)) < 2000

    run(main())
