"""
Ranks on three nodes with addresses of their own: faults are made in the network and the processes, not in our code.

Each node is a process in a network namespace; all are on one bridge. What each rank reports is what a judge gets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from healthd.core import wire
from healthd.core.model import CollectiveOrder, OrderReport, RankReport
from tests.patience import PATIENCE
from tests.runner.runner_kit import below_guard
from tests.runner.session_kit import accused

ROOT = Path(__file__).parents[2]
COUNT = 3

pytestmark = [pytest.mark.system("ip", root=True)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


class Node:
    """One namespace, with a process whose ranks are in it."""

    def __init__(self, network: str, index: int, run_dir: Path) -> None:
        self.name = f"{network}n{index}"
        self.link = f"{network}v{index}"
        self.address = f"10.77.0.{index + 1}"
        self.address6 = f"fd77::{index + 1}"
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth1", "netns", self.name)
        ip("link", "set", self.link, "master", f"{network}b", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth1")
        ip("-n", self.name, "addr", "add", f"{self.address6}/64", "dev", "eth1", "nodad")
        for interface in ("lo", "eth1"):
            ip("-n", self.name, "link", "set", interface, "up")
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "tests.netns.executor", str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.said: list[OrderReport] = []
        self.news = threading.Condition()
        self.reader = threading.Thread(target=self._read, args=(_pipe(self.process.stdout),), daemon=True)
        self.reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            report = wire.decode(line.encode(), OrderReport, what="report")
            with self.news:
                self.said.append(report)
                self.news.notify_all()

    def order(self, order: CollectiveOrder) -> None:
        self.said.clear()
        pipe = _pipe(self.process.stdin)
        pipe.write(wire.encode(order).decode() + "\n")
        pipe.flush()

    def wait(self, seconds: float = 40.0) -> tuple[RankReport, ...]:
        """The final report, once the node is ready for more."""
        self.wait_ready(seconds)
        last = self.said[-2]
        assert last.status == "done", last.message
        return last.ranks

    def wait_ready(self, seconds: float = 40.0) -> None:
        with self.news:
            said, seconds = self.said, seconds * PATIENCE
            assert self.news.wait_for(lambda: said and said[-1].status == "accepted", seconds), said

    def wait_for(self, last: str, seconds: float = 20.0) -> None:
        """Until the rank is at a place."""
        with self.news:
            said, seconds = self.said, seconds * PATIENCE
            assert self.news.wait_for(lambda: any(r.last == last for one in said for r in one.ranks), seconds), said

    def worker(self) -> int:
        """The process of its rank, which is the child of its guard."""
        pids = self._pids()
        parents = {_parent_of(pid) for pid in pids}  # the fork server, which looks as its workers do, is none
        (guard,) = [pid for pid in pids if _is_worker(pid) and not _is_worker(_parent_of(pid)) and pid in parents]
        return below_guard(guard)

    def _pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(line) for line in listed.stdout.split()]

    def close(self) -> None:
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self.reader.join(5)
        _pipe(self.process.stdout).close()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.name)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


class Network:
    """Three nodes on a bridge."""

    def __init__(self, folder: Path) -> None:
        self.name = f"hd{os.getpid() % 100000}"
        self.ports = itertools.count(29500)
        ip("link", "add", f"{self.name}b", "type", "bridge")
        ip("link", "set", f"{self.name}b", "up")
        self.nodes: list[Node] = []
        for index in range(COUNT):
            self.nodes.append(Node(self.name, index, folder / f"node{index}"))

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        ip("link", "del", f"{self.name}b")

    def start(
        self, members: Sequence[int] = (0, 1, 2), *, main: str | None = None, join: float = 6.0, timeout: float = 8.0
    ) -> None:
        port = next(self.ports)
        for rank, member in enumerate(members):
            self.nodes[member].order(
                CollectiveOrder(
                    validation="v1",
                    group=f"g{port}",
                    checks=("all_reduce",),
                    first_rank=rank,
                    ranks=1,
                    size=len(members),
                    whole_rank=member,
                    main=main or self.nodes[members[0]].address,
                    port=port,
                    seed=7,
                    join_seconds=join,
                    timeout_seconds=timeout,
                )
            )

    def end(self, members: Sequence[int] = (0, 1, 2)) -> list[RankReport]:
        return [report for member in members for report in self.nodes[member].wait()]

    def run(self, members: Sequence[int] = (0, 1, 2), *, main: str | None = None) -> list[RankReport]:
        self.start(members, main=main)
        return self.end(members)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    try:
        made = Network(tmp_path_factory.mktemp("netns"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode(errors='replace').strip()}")
    try:
        for node in made.nodes:
            node.wait_ready()
        yield made
    finally:
        made.close()
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert made.name not in left


@contextlib.contextmanager
def one_way_cut(network: Network, sender: int, receiver: int) -> Iterator[None]:
    """What one node sends to another goes nowhere; the other direction works."""
    there = (network.nodes[receiver].address, "dev", "eth1")
    namespace = ("-n", network.nodes[sender].name)
    ip(*namespace, "neigh", "replace", there[0], "lladdr", "02:00:00:00:00:99", *there[1:], "nud", "permanent")
    try:
        yield
    finally:
        ip(*namespace, "neigh", "del", *there)


def test_rounds_of_changing_members_on_kept_ranks(network: Network) -> None:
    workers = [node.worker() for node in network.nodes]
    for members in ((0, 1, 2), (2, 0), (1, 2), (0, 1)):
        began = time.monotonic()
        reports = network.run(members)
        assert accused(reports) == []
        assert time.monotonic() - began < 5.0 * PATIENCE
    assert [node.worker() for node in network.nodes] == workers


def test_group_over_ipv6_addresses(network: Network) -> None:
    assert accused(network.run(main=network.nodes[0].address6)) == []


def test_group_where_there_is_no_ipv4(network: Network) -> None:
    for node in network.nodes:
        ip("-n", node.name, "addr", "del", f"{node.address}/24", "dev", "eth1")
    try:
        assert accused(network.run(main=network.nodes[0].address6)) == []
    finally:
        for node in network.nodes:
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth1")


def test_killed_rank_is_named(network: Network) -> None:
    victim = network.nodes[1].worker()
    os.kill(victim, signal.SIGSTOP)  # so that the others wait for it when it dies
    network.start()
    network.nodes[0].wait_for("rendezvous/peers joined")
    os.kill(victim, signal.SIGKILL)
    reports = network.end()
    assert accused(reports) == [("rank:1", "RankDied")]


@pytest.mark.nightly
def test_stopped_rank_is_named_and_those_that_wait_are_not(network: Network) -> None:
    victim = network.nodes[2].worker()
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    reports = network.run()
    assert time.monotonic() - began < 20.0 * PATIENCE
    assert accused(reports) == [("rank:2", "RankAbsent")]


@pytest.mark.nightly
def test_node_whose_link_is_down_reaches_nobody(network: Network) -> None:
    ip("link", "set", network.nodes[2].link, "down")
    try:
        reports = network.run()
    finally:
        ip("link", "set", network.nodes[2].link, "up")
    # It never reached the main node, as the others did.
    assert [one.events for one in reports] == [2, 2, 1], [one.message for one in reports]
    # It, or the main node that ought to have answered it: that is for other groups to tell.
    assert accused(reports) == [("node", "Timeout")], [one.message for one in reports]
    assert accused(network.run()) == []


def test_path_that_is_cut_one_way_shows_as_the_two_that_did_not_meet(network: Network) -> None:
    with one_way_cut(network, 1, 2):
        reports = network.run()
    assert reports[1].last == reports[2].last == "rendezvous/peers joined"
    assert reports[0].events > reports[1].events
    assert accused(reports) == [("node", "Timeout")]  # one of the two, and nobody can say which
    assert accused(network.run()) == []


@pytest.mark.nightly
def test_slow_link_shows_in_the_seconds_and_not_in_the_own_time_of_a_rank(network: Network) -> None:
    before = network.run()
    link = network.nodes[1].link
    words = ["dev", link, "root", "tbf", "rate", "50mbit", "burst", "256kb", "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "add", *words], check=True)
    try:
        network.start(timeout=60.0)
        after = network.end()
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", link, "root"], check=True)
    assert accused(after) == []
    assert longest(after, "seconds") > 2 * longest(before, "seconds")
    assert longest(after, "ready_seconds") < 0.1 * longest(after, "seconds")


@pytest.mark.nightly
def test_rank_whose_processors_are_cut_shows_in_what_it_waited_for_them(network: Network) -> None:
    with processors_cut(network.nodes[1].worker(), share=0.1):
        network.start(join=25.0, timeout=60.0)
        reports = network.end()
    assert accused(reports) == []
    waited = [sum(size["cpu_wait_seconds"] for size in one.data["sizes"]) for one in reports if one.data is not None]
    assert waited[1] == max(waited)
    assert waited[1] > 0.3, waited
    # All took equally long in the operation: that alone tells nobody from the others.
    seconds = [one.data["sizes"][-1]["seconds"] for one in reports if one.data is not None]
    assert max(seconds) < 2 * min(seconds)


@contextlib.contextmanager
def processors_cut(pid: int, *, share: float) -> Iterator[None]:
    """A process may use this share of one processor."""
    period = 100_000  # microseconds
    quota = str(int(period * share))
    root = Path("/sys/fs/cgroup")
    old = (root / "cpu").is_dir()
    group = (root / "cpu" if old else root) / f"healthd-test-{os.getpid()}"
    home = group.parent / "cgroup.procs"
    try:
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if old else "cpu.max")).write_text(quota if old else f"{quota} {period}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of processors can be made here: {error}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            home.write_text(str(pid))
        group.rmdir()


def longest(reports: Sequence[RankReport], name: str) -> float:
    """Of all ranks, for the largest size."""
    return max(float(one.data["sizes"][-1][name]) for one in reports if one.data is not None)
