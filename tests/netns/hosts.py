"""
Hosts that are network namespaces on one bridge, and the faults that befall their links and processes.

Those of a test run that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import string
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aggregator.service import until
from tests.patience import PATIENCE

PREFIX = "hdf"

# 198.18.0.0/15 is set aside for tests of networks (RFC 2544): no machine has a route there that matters. Runs
# beside each other have networks of their own, or one would ask the other's aggregator.
_OWN = os.getpid() % (1 << 16)
NET4, NET6 = f"198.{18 + _OWN // 256 % 2}.{_OWN % 256}", f"fd77:{_OWN:x}"
CENTRE, ROOT_HOST = 253, 254  # last numbers of the addresses of the aggregator and of this process
WRONG_MAC = "02:00:00:00:00:99"

marks = [pytest.mark.system("ip", "tc", root=True)]
# Of every link: far below what a busy machine carries, so that how fast a group is hangs on the links alone.
LINK_RATE = "200mbit"  # 25e6 bytes/s
SLOW_RATE = "20mbit"  # a tenth


def run(*words: str) -> str:
    """A command of the system's, its output; the error says what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def ip(*words: str) -> str:
    return run("ip", *words)


class Host:
    """One namespace on the bridge, `number` its address. Names of namespaces and links begin with that of the net."""

    def __init__(self, net: str, name: str, number: int) -> None:
        self.net, self.name, self.number = net, name, number
        self.space, self.link = f"{net}-{name}", f"{net}{number}"
        self.address, self.address6 = f"{NET4}.{number}", f"{NET6}::{number}"
        self.mac = f"02:77:00:00:00:{number:02x}"
        self.daemon: Callable[[], int] = lambda: 0
        """The process whose children its ranks are; 0 before it is started."""

    def make(self) -> None:
        ip("netns", "add", self.space)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        ip("link", "set", self.link, "master", f"{self.net}b", "up")
        ip("-n", self.space, "link", "set", "eth0", "address", self.mac)
        ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.space, "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        for interface in ("lo", "eth0"):
            ip("-n", self.space, "link", "set", interface, "up")
        self._sends_at(LINK_RATE)

    def inside(self, *words: str) -> list[str]:
        """The command line that runs a command in there; it dies with this process."""
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*guard, "ip", "netns", "exec", self.space, *words]

    def pids(self) -> list[int]:
        return pids_in(self.space)

    def ranks(self) -> list[int]:
        """What the guards below its daemon guard, where it has torch loaded, which ranks alone have here."""
        return [pid for guard in _children(self.daemon()) for pid in _children(guard) if _is_rank(pid)]

    # --- faults of the network ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            ip("link", "set", self.link, "up")

    def _sends_at(self, rate: str) -> None:
        words = ("dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        run("tc", "-n", self.space, "qdisc", "replace", *words)

    @contextlib.contextmanager
    def slow_link(self, rate: str = SLOW_RATE) -> Iterator[None]:
        """What it sends leaves at this rate, a tenth of that of the others."""
        self._sends_at(rate)
        try:
            yield
        finally:
            self._sends_at(LINK_RATE)

    @contextlib.contextmanager
    def mute_to(self, *others: Host) -> Iterator[None]:
        """What it sends to these goes nowhere; what they send arrives."""
        for other in others:
            for address in (other.address, other.address6):
                wrong = ("lladdr", WRONG_MAC, "dev", "eth0", "nud", "permanent")
                ip("-n", self.space, "neigh", "replace", address, *wrong)
        try:
            yield
        finally:
            for other in others:
                for address in (other.address, other.address6):
                    ip("-n", self.space, "neigh", "del", address, "dev", "eth0")

    # --- faults of the processes --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ranks_get(self, number: signal.Signals, *, joined: bool = False) -> Iterator[None]:
        """Every rank that it starts gets this signal at once, or when it has `joined` the others of its group."""
        ended = threading.Event()
        struck: set[int] = set()

        def strike() -> None:
            while not ended.wait(0.02):
                for pid in self.ranks():
                    if pid not in struck and (not joined or _has_joined(pid)):
                        struck.add(pid)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)

        thread = threading.Thread(target=strike, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5)
            for pid in struck:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def few_processors(self, share: float = 0.015) -> Iterator[None]:
        """A rank that has joined others may use this share of one processor."""
        period, root = 100_000, Path("/sys/fs/cgroup")  # microseconds
        old = (root / "cpu").is_dir()
        group = (root / "cpu" if old else root) / self.space
        quota = str(int(period * share))
        try:
            group.mkdir()
            (group / ("cpu.cfs_quota_us" if old else "cpu.max")).write_text(quota if old else f"{quota} {period}")
        except OSError as error:
            with contextlib.suppress(OSError):
                group.rmdir()
            pytest.skip(f"no control group of processors can be made here: {error}")
        ended = threading.Event()

        def move(home: Path) -> None:
            for pid in self.ranks():
                with contextlib.suppress(OSError):
                    (home / "cgroup.procs").write_text(str(pid))

        def keep() -> None:
            while not ended.wait(0.02):
                if any(map(_has_joined, self.ranks())):  # to start on so little would take it a minute
                    move(group)

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5)
            move(group.parent)
            until(lambda: _removed(group), 10, lambda: f"{group} cannot be removed")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _has_joined(pid: int) -> bool:
    """Whether it listens or has a connection as the ranks of a group do, which no idle one has."""
    with contextlib.suppress(OSError):
        inodes = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                if f"socket:[{line.split()[9]}]" in inodes:
                    return True
    return False


def pids_in(space: str) -> list[int]:
    return [int(line) for line in ip("netns", "pids", space).split()]


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir()) if pid else []
        return [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    return []


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    return False


class Net:
    """A bridge and its namespaces. No two nets of a process share names: the kernel may remove the last one late."""

    _letters = itertools.cycle(string.ascii_lowercase)

    def __init__(self) -> None:
        reap()
        self.name = f"{PREFIX}{os.getpid()}{next(self._letters)}"  # a link's name has 15 characters at most
        self.bridge = f"{self.name}b"
        self.hosts: list[Host] = []
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{NET4}.{ROOT_HOST}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def host(self, name: str, number: int) -> Host:
        host = Host(self.name, name, number)
        self.hosts.append(host)
        host.make()
        return host

    def remove(self) -> None:
        remove(self.name)


def remove(net: str) -> None:
    """All of a net, with the processes in it."""
    for space in [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(f"{net}-")]:
        end = time.monotonic() + 5
        while (left := pids_in(space)) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        ip("netns", "del", space)
    for link in _links():
        if re.fullmatch(rf"{net}(b|[0-9]+)", link):
            with contextlib.suppress(OSError):  # the kernel removes those whose namespace is gone, too
                ip("link", "del", link)


def _links() -> list[str]:
    """Bridges and ends of pairs in this namespace."""
    lines = [line for kind in ("bridge", "veth") for line in ip("-o", "link", "show", "type", kind).splitlines()]
    return [line.split()[1].rstrip(":").partition("@")[0] for line in lines]


def reap() -> None:
    """Remove nets whose test run is gone, however it ended."""
    spaces = [line.split()[0] for line in ip("netns", "list").splitlines() if line]
    found = [re.match(rf"({PREFIX}([0-9]+)[a-z])(-|b$|[0-9]+$)", name) for name in [*spaces, *_links()]]
    for net, pid in {(one[1], one[2]) for one in found if one}:
        if pid != str(os.getpid()) and not Path(f"/proc/{pid}").exists():
            remove(net)
