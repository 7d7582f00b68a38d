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
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.aggregator.cluster import HEALTHD, PROOF, TUNED
from tests.aggregator.service import ROOT, Command, Said, Service, until
from tests.netns.hosts import CENTRE, Host, Net, marks, run
from tests.patience import PATIENCE

__all__ = ["Decided", "Fleet", "Host", "marks"]

MARK = "FLEET_OF_A_TEST"

POLICY: dict[str, Any] = {
    "tuning.settle": "1s",
    "recovery": "1s",
    "node_grace": "4s",
    "silent": "8s",
    "tuning.lease_ack": "10s",
    "collective_checks": ["all_reduce"],
    "collective_start": "240s",
    "collective_join": "8s",
    "collective_timeout": "6s",
    "tuning.collective_contact": "8s",
    "tuning.collective_grace": "1s",
    "validation": "500s",
    # The same nodes are at fault again and again here; that such a node is kept out is tested elsewhere.
    "rules_observe": ["accused"],
}

NODE = """
[probe]
directories = ["{checks}"]
[checks.all_reduce]
sizes_bytes = [1024, {size_bytes}]
iterations = 3
[limits.nodes_all_reduce_busbw_bytes_per_second]
lower = {least_busbw}
[node]
checks = ["all_reduce", "memory_free", "proof"]
passive_floor = "5s"
look = "5s"
[node.allocations]
read = false # other tests of this machine may run a Slurm
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
# Bytes/s. Measured on two processors that five such loads fought over: the six together 11e6 to 16e6, pairs 8e6 and
# more; with one link at a tenth never above 2.5e6, which is its rate.
LEAST_BUSBW = 3.5e6


class Fleet:
    """`count` daemons n1, n2, ... with one device each, and an aggregator; ready once all are healthy."""

    def __init__(self, folder: Path, count: int, **policy: Any) -> None:
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
        policy = "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.policy.items())
        file.write_text(f"[policy]\n{policy}")
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
            config.write_text(self.node_file(name, checks))
            self._service(
                host,
                name,
                *("--config", str(config), "--name", name, "--listen", f"{host.address}:8080"),
                *("--state-dir", str(self.folder / name / "state"), "--run-dir", str(self.folder / name / "run")),
                *("--interface", "eth0", "--label", "pool=a", "--aggregator", self.aggregator.url),
                *self.node_arguments(name),
                pattern=r"answers on (http://\S+)",
            ).start(ready=False)
        for name in self.nodes:
            self.healthy(name)

    def node_file(self, name: str, checks: Path) -> str:
        """The configuration of a daemon; `checks` is the folder of the tests' own."""
        return NODE.format(checks=checks, size_bytes=SIZE_BYTES, least_busbw=LEAST_BUSBW)

    def node_arguments(self, name: str) -> Sequence[str]:
        """What a daemon is told beside that."""
        return ()

    def _service(self, host: Host, name: str, *arguments: str, pattern: str) -> Service:
        kind = "node" if name in self.nodes else "aggregator"
        environ = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "HEALTHD_CPU_DEVICES": "1"}
        command = host.inside(*(TUNED if kind == "aggregator" else HEALTHD), kind, *arguments)
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

    def gate(self, *names: str, min_nodes: int | None = None, wait: str = "540s") -> Command:
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

    def decide(self, *names: str, min_nodes: int | None = None, seconds: float = 200.0) -> Decided:
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
        answer = httpx.delete(
            f"{self.aggregator.url}/v1/gates/{decided.id}/lease", trust_env=False, verify=False, timeout=60
        )
        assert answer.status_code == 200, answer.text

        def free() -> bool:
            return not any(self.services[name].get("/v1/node").json()["leases"] for name in decided.admitted)

        until(free, 10, lambda: "leases did not end")

    def fault(self, name: str, *faults: str) -> None:
        """Set the faults of a node, or clear them when there are none."""
        words = ("set", *faults) if faults else ("clear",)
        run(sys.executable, "-m", "healthd", "fault", *words, "--run-dir", str(self.folder / name / "run"))

    @contextlib.contextmanager
    def cut(self, one: Sequence[str], other: Sequence[str]) -> Iterator[None]:
        """What is between these and those is cut: what either sends to the other goes nowhere."""
        with contextlib.ExitStack() as cuts:
            for here, there in ((one, other), (other, one)):
                for name in here:
                    cuts.enter_context(self.nodes[name].mute_to(*(self.nodes[far] for far in there)))
            yield

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
        slow = [name for name, service in self.services.items() if not _ends(service, 8 * PATIENCE)]
        left = {host.name: host.pids() for host in self.net.hosts if host.pids()}
        self.net.remove()
        assert not slow, f"did not end within {8 * PATIENCE:.0f} s of SIGTERM: {slow}"
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
