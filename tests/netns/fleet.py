"""
A fleet in network namespaces: an aggregator and node daemons with addresses of their own on one bridge.

Faults are made from outside: links are slowed, cut and taken down, processes are stopped and killed. Leaving a `Fleet`
ends all processes and removes all namespaces; those of a test run that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.cluster import HEALTHD, PROOF
from tests.fleet.service import ROOT, Command, Said, Service, until

TOOLS = ("ip", "tc")
PREFIX = "hdf"
MARK = "FLEET_OF_A_TEST"

# 198.18.0.0/15 is set aside for tests of networks (RFC 2544): no machine has a route there that matters. Runs
# beside each other have networks of their own, or one would ask the other's aggregator.
_OWN = os.getpid() % (1 << 16)
NET4, NET6 = f"198.{18 + _OWN // 256 % 2}.{_OWN % 256}", f"fd77:{_OWN:x}"
CENTRE, ROOT_HOST = 253, 254  # last numbers of the addresses of the aggregator and of this process
WRONG_MAC = "02:00:00:00:00:99"

marks = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)} (iproute2)"),
]

POLICY: dict[str, str | list[str]] = {
    "settle": "1s",
    "recovery": "1s",
    "node_grace": "4s",
    "silent": "8s",
    "lease_ack": "10s",
    "collective_checks": ["all_reduce"],
    "collective_start": "15s",
    "collective_join": "4s",
    "collective_timeout": "5s",
    "collective_contact": "4s",
    "collective_grace": "1s",
    "validation": "60s",
}

NODE = """
[probe]
directories = ["{checks}"]
[checks.all_reduce]
sizes_bytes = [1024, {size_bytes}]
iterations = 3
[limits.all_reduce_busbw_bytes_per_second]
lower = {least_busbw}
[node]
checks = ["all_reduce", "memory_free", "proof"]
passive_floor = "5s"
look = "5s"
[node.active]
unprompted = "idle"
retry = "1s"
[node.lease]
settle = "1s"
watch = "0.2s"
[node.sync]
wait = "5s"
backoff_max = "0.3s"
"""

SIZE_BYTES = 1 << 20
LEAST_BUSBW = 6e6  # bytes/s; links here carry a hundred times as much where two processors are not fought over
SLOW_RATE = "20mbit"  # 2.5e6 bytes/s


def run(*words: str) -> str:
    """A command of the system's, its output; the error says what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
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

    def inside(self, *words: str) -> list[str]:
        """The command line that runs a command in there; it dies with this process."""
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*guard, "ip", "netns", "exec", self.space, *words]

    def pids(self) -> list[int]:
        return pids_in(self.space)

    def ranks(self) -> list[int]:
        """Children of its daemon that have torch loaded, which ranks alone do here."""
        return [pid for pid in _children(self.daemon()) if _is_rank(pid)]

    # --- faults of the network ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            ip("link", "set", self.link, "up")

    @contextlib.contextmanager
    def slow_link(self, rate: str = SLOW_RATE) -> Iterator[None]:
        """What it sends leaves at this rate."""
        words = ("dev", "eth0", "root")
        run("tc", "-n", self.space, "qdisc", "add", *words, "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        try:
            yield
        finally:
            run("tc", "-n", self.space, "qdisc", "del", *words)

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
    """A bridge and its namespaces."""

    def __init__(self) -> None:
        reap()
        self.name = f"{PREFIX}{os.getpid()}"
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
    if f"{net}b" in ip("-o", "link", "show", "type", "bridge"):
        ip("link", "del", f"{net}b")


def reap() -> None:
    """Remove nets whose test run is gone, however it ended."""
    names = {line.split()[0].partition("-")[0] for line in ip("netns", "list").splitlines()}
    bridges = ip("-o", "link", "show", "type", "bridge").splitlines()
    names |= {line.split()[1].strip(":").removesuffix("b") for line in bridges}
    for name in names:
        pid = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and pid.isdigit() and pid != str(os.getpid()) and not Path(f"/proc/{pid}").exists():
            remove(name)


class Fleet:
    """`count` daemons n1, n2, ... with one device each, and an aggregator; ready once all are healthy."""

    def __init__(self, folder: Path, count: int, **policy: str) -> None:
        self.folder, self.policy = folder, {**POLICY, **policy}
        self.net = Net()
        self.mark = secrets.token_hex(8)
        self.nodes: dict[str, Host] = {}
        self.services: dict[str, Service] = {}
        self.commands: list[subprocess.Popen[str]] = []
        self.jobs = 0
        try:
            self.centre = self.net.host("agg", CENTRE)
            for number in range(1, count + 1):
                self.nodes[f"n{number}"] = self.net.host(f"n{number}", number)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        checks = self.folder / "checks"
        checks.mkdir()
        (checks / "proof.py").write_text(PROOF)
        (checks / "number").write_text("1")
        file = self.folder / "aggregator.toml"
        file.write_text("[policy]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.policy.items()))
        self.aggregator = self._service(
            self.centre,
            "aggregator",
            *("--config", str(file), "--state-dir", str(self.folder / "aggregator")),
            *("--listen", f"{self.centre.address}:8090", "--insecure"),
            pattern=r"aggregator listens on (\S+)",
        )
        self.aggregator.start()
        for name, host in self.nodes.items():
            config = self.folder / f"{name}.toml"
            config.write_text(NODE.format(checks=checks, size_bytes=SIZE_BYTES, least_busbw=LEAST_BUSBW))
            self._service(
                host,
                name,
                *("--config", str(config), "--name", name, "--listen", f"{host.address}:8080"),
                *("--state-dir", str(self.folder / name / "state"), "--run-dir", str(self.folder / name / "run")),
                *("--interface", "eth0", "--label", "pool=a", "--aggregator", self.aggregator.url),
                pattern=r"answers on (http://\S+)",
            ).start(ready=False)
        for name in self.nodes:
            self.healthy(name)

    def _service(self, host: Host, name: str, *arguments: str, pattern: str) -> Service:
        kind = "node" if name in self.nodes else "aggregator"
        environ = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "HEALTHD_CPU_DEVICES": "1"}
        command = host.inside(*HEALTHD, kind, *arguments)
        service = Service(name, command, folder=self.folder, env=environ, pattern=pattern)
        service.url = f"http://{host.address}:{8080 if kind == 'node' else 8090}"
        self.services[name] = service
        host.daemon = lambda: service.pid if service.process is not None else 0
        return service

    def healthy(self, name: str, seconds: float = 40.0) -> None:
        """Returns once a node is, and its aggregator knows it."""
        service = self.services[name]

        def well() -> bool:
            assert service.process is not None
            assert service.process.poll() is None, f"{name} ended: {service.said()}"
            with contextlib.suppress(Exception):
                return service.health("?tier=quick&max_age=3600") == 200
            return False

        until(well, seconds, lambda: f"{name} is not healthy: {service.said()}")

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def gate(self, *names: str, min_nodes: int | None = None, wait: str = "60s") -> Command:
        """Start `healthd gate` as a job's hook would, on a host of its own."""
        self.jobs += 1
        more = ("--min-nodes", str(min_nodes)) if min_nodes is not None else ()
        nodes = [word for name in names or self.nodes for word in ("--node", name)]
        command = [*HEALTHD, "gate", "--aggregator", self.aggregator.url, "--job", f"job-{self.jobs}", "--wait", wait]
        process = subprocess.Popen(
            [*command, "--json", *nodes, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT)},
        )
        self.commands.append(process)
        return Command(process)

    def decide(self, *names: str, min_nodes: int | None = None, seconds: float = 60.0) -> Decided:
        """A gate from question to answer; what an admitted job was given is given back."""
        began = time.monotonic()
        said = self.gate(*names, min_nodes=min_nodes).said(seconds)
        return self.decided(said, time.monotonic() - began)

    def decided(self, said: Said, seconds: float) -> Decided:
        assert said.out, said.err
        decided = Decided(said.code, said.json, seconds, self)
        if said.code == 0:
            # The devices are the job's from now on: no rank may be on them.
            left = {name: self.nodes[name].ranks() for name in decided.admitted}
            self.release(decided)
            assert not any(left.values()), f"admitted while ranks were there: {left}"
        return decided

    def release(self, decided: Decided) -> None:
        """Give back what a job was given; returns when its nodes are free."""
        answer = httpx.delete(f"{self.aggregator.url}/v1/gates/{decided.id}/lease", trust_env=False, timeout=10)
        assert answer.status_code == 200, answer.text

        def free() -> bool:
            return not any(self.services[name].get("/v1/node").json()["leases"] for name in decided.admitted)

        until(free, 10, lambda: "leases did not end")

    def fault(self, name: str, *faults: str) -> None:
        """Set the faults of a node, or clear them when there are none."""
        words = ("set", *faults) if faults else ("clear",)
        run(sys.executable, "-m", "healthd", "fault", *words, "--run-dir", str(self.folder / name / "run"))

    def no_ranks(self, seconds: float = 25.0) -> None:
        """No rank is left anywhere, after the while that they are kept for another round."""
        until(lambda: not any(host.ranks() for host in self.nodes.values()), seconds, lambda: "ranks are left")

    def explain(self, gate: str) -> str:
        """Every group of a gate with its outcome, for a test that failed."""
        runs = self.aggregator.get(f"/v1/validations/{gate}").json()["validations"]
        lines = []
        for validation in runs:
            lines.append(f"validation of {validation['members']}: {validation.get('verdict')}")
            for one in validation["history"]:
                words = [reason["message"] for reason in one["reasons"]]
                lines.append(f"  round {one['round']} {one['members']} {one['outcome']} {one['seconds']:.1f} s {words}")
        return "\n".join(lines)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """All processes and namespaces are gone afterwards."""
        for process in self.commands:
            process.kill()
            process.communicate()
        for service in self.services.values():
            if service.process is not None and service.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    service.signal(signal.SIGCONT)
                    service.signal(signal.SIGTERM)
        slow = [name for name, service in self.services.items() if not _ends(service, 8)]
        left = {host.name: host.pids() for host in self.net.hosts if host.pids()}
        self.net.remove()
        assert not slow, f"did not end within 8 s of SIGTERM: {slow}"
        assert not left, f"left behind: {left}"


class Decided:
    """What a gate came to, and how long it took."""

    def __init__(self, code: int, decision: dict[str, Any], seconds: float, fleet: Fleet) -> None:
        self.code, self.decision, self.seconds, self._fleet = code, decision, seconds, fleet
        self.id: str = decision["id"]
        self.admitted: Sequence[str] = [one["node"] for one in decision["nodes"]]

    @property
    def excluded(self) -> dict[str, str]:
        """Node -> code of its first reason."""
        return {one["node"]: one["reasons"][0]["code"] for one in self.decision["excluded"] if one["reasons"]}

    @property
    def blamed(self) -> set[str]:
        """Nodes that are said to be at fault."""
        reasons = [reason for one in self.decision["excluded"] for reason in one["reasons"]] + self.decision["reasons"]
        return {one["node"] for one in reasons if one["blame"] == "node" and one["status"] == "fail"}

    def words(self, node: str) -> str:
        """All that is said of a node."""
        found = [one["reasons"] for one in self.decision["excluded"] if one["node"] == node]
        return "; ".join(reason["message"] for reasons in found for reason in reasons)

    def __repr__(self) -> str:
        return (
            f"exit {self.code} after {self.seconds:.1f} s: {self.decision['decision']}, with {self.admitted}, without"
            f" {self.excluded}: {[one['message'] for one in self.decision['reasons']]}\n{self._fleet.explain(self.id)}"
        )


def _ends(service: Service, seconds: float) -> bool:
    if service.process is None:
        return True
    try:
        service.process.wait(seconds)
    except subprocess.TimeoutExpired:
        service.process.kill()
        service.process.wait()
        return False
    return True
