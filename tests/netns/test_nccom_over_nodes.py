"""
nccom-test over several nodes by ssh: real daemons on stand-in Trainium machines in namespaces of their own, a real
aggregator, the real mpirun and its daemon; stand-ins for ssh and for nccom-test, whose processes add up numbers over
the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.aggregator.service import Command, Service, until
from tests.fakes import remote_shell
from tests.fakes.neuron import NeuronMachine
from tests.fakes.remote_shell import ssh_command
from tests.netns import fleet
from tests.netns.fleet import Fleet, Host
from tests.patience import PATIENCE

pytestmark = [*fleet.marks, pytest.mark.system("mpirun", "orted")]

# By the guards' command lines too, which name what they guard: those of passive checks (neuron-ls) come and go.
OURS = ("orted", "mpirun", "nccom-test")

NODE = """
[probe]
directories = ["{checks}"]
accelerator = "neuron"
[node]
checks = ["memory_free", "proof"]
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


class NeuronFleet(Fleet):
    """Each daemon has a trn1.2xlarge as its machine, two cores, and beside it a stand-in for sshd."""

    def __init__(self, folder: Path, count: int, **policy: Any) -> None:
        self.machines: dict[str, NeuronMachine] = {}
        self.ssh = ssh_command(folder)
        # Each test has faults of its own: a node that was at fault in one takes part in the next.
        super().__init__(folder, count, rules=False, nccom_launch="ssh", **policy)

    def _start(self) -> None:
        for name, host in self.nodes.items():
            server = Service(
                f"{name}-ssh",
                host.inside(sys.executable, remote_shell.__file__, "serve"),
                folder=self.folder,
                # By it the stand-in's processes, which mpirun starts, know the machine that they are on.
                env={**os.environ, "HEALTHD_HOST_ROOT": str(self.folder / name / "machine")},
                pattern=r"listens on port (\d+)",
            )
            self.services[server.name] = server.start()
        super()._start()

    def node_file(self, name: str, checks: Path) -> str:
        return NODE.format(checks=checks)

    def node_arguments(self, name: str) -> Sequence[str]:
        self.machines[name] = NeuronMachine(self.folder / name / "machine", "trn1.2xlarge")
        return ("--host-root", str(self.machines[name].root))

    def _service(self, host: Host, name: str, *arguments: str, pattern: str) -> Service:
        service = super()._service(host, name, *arguments, pattern=pattern)
        if name in self.machines:
            service.env["HEALTHD_HOST_ROOT"] = str(self.machines[name].root)
            service.env["PATH"] = f"{self.ssh}:{service.env['PATH']}"
        return service

    def started(self) -> list[str]:
        """What is there of a round, on any node."""
        found = []
        for name, host in self.nodes.items():
            for pid in host.pids():
                line = command_line(pid)
                if any(word in line for word in OURS):
                    found.append(f"{name}: {line}")
        return found

    def broken(self, name: str, kind: str) -> None:
        self.machines[name].fault(kind, "member")

    def mend(self) -> None:
        for machine in self.machines.values():
            machine.state["faults"] = []
            machine.save()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeuronFleet]:
    made = NeuronFleet(
        tmp_path_factory.mktemp("nccom"),
        3,
        collective_checks=["all_reduce", "reduce_scatter"],
        collective_join="15s",
        collective_timeout="5s",
    )
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def three(trio: NeuronFleet) -> Iterator[NeuronFleet]:
    """Afterwards no process of any round is left."""
    yield trio
    trio.mend()
    until(lambda: not trio.started(), 10, lambda: f"left behind: {trio.started()}")


def test_nodes_that_pass_together_are_admitted(three: NeuronFleet) -> None:
    decided = three.decide()
    assert decided.code == 0, decided
    assert sorted(decided.admitted) == ["n1", "n2", "n3"]
    (validation,) = three.aggregator.get(f"/v1/validations/{decided.id}").json()["validations"]
    whole = validation["history"][-1]  # on a busy machine a round before it may have been too late
    assert (whole["outcome"], validation["launch"]) == ("pass", "ssh")
    assert set(whole["busbw_bytes_per_second"]) == {"nccom_nodes_all_reduce", "nccom_nodes_reduce_scatter"}
    assert three.started() == []


@pytest.mark.parametrize("kind", ["nccom_fail", "nccom_wrong"])
def test_node_that_fails_with_others_is_named(three: NeuronFleet, kind: str) -> None:
    three.broken("n2", kind)
    decided = three.decide(min_nodes=2)
    assert decided.code == 0, decided
    assert sorted(decided.admitted) == ["n1", "n3"]
    assert decided.blamed == {"n2"}
    words = "output mismatch" if kind == "nccom_wrong" else "missing collectives status"
    validation, *_ = three.aggregator.get(f"/v1/validations/{decided.id}").json()["validations"]
    assert words in json.dumps(validation["history"]), decided


@pytest.mark.nightly
def test_node_whose_processes_hang_is_named_and_all_are_killed(three: NeuronFleet) -> None:
    three.broken("n3", "nccom_hang")
    decided = three.decide(min_nodes=2)
    assert decided.code == 0, decided
    assert sorted(decided.admitted) == ["n1", "n2"]
    assert decided.blamed == {"n3"}
    assert decided.seconds < 150


def test_withdrawn_gate_ends_the_round_on_every_node(three: NeuronFleet) -> None:
    with hanging(three, "n2") as gate:
        gate.process.send_signal(signal.SIGTERM)
        gate.process.wait(10 * PATIENCE)
        until(lambda: not three.started(), 4, lambda: f"left behind: {three.started()}")


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_killed_daemon_leaves_no_process_and_the_others_end_theirs(three: NeuronFleet, victim: str) -> None:
    """
    n1 runs nccom-test, which ends with its daemon. The processes of n2 are not below healthd: they end when the
    aggregator has missed n2 and called the group off.
    """
    with hanging(three, "n2"):
        service = three.services[victim]
        daemon = next(pid for pid in three.nodes[victim].pids() if "-m healthd node" in command_line(pid))
        os.kill(daemon, signal.SIGKILL)
        if victim == "n1":
            until(
                lambda: not [one for one in three.started() if one.startswith(victim)], 5, lambda: str(three.started())
            )
        until(lambda: not three.started(), 25, lambda: f"left behind: {three.started()}")
        service.ended()
        service.start(ready=False)
        three.mend()
        three.healthy(victim)
    until(lambda: three.decide().code == 0, 20)


@contextlib.contextmanager
def hanging(fleet_: NeuronFleet, name: str) -> Iterator[Command]:
    """A gate whose round is under way on all nodes, and hangs on one."""
    fleet_.broken(name, "nccom_hang")
    gate = fleet_.gate()
    everywhere = {("n1", "nccom-test"), ("n2", "--member"), ("n3", "orted")}

    def under_way() -> bool:
        found = fleet_.started()
        return all(any(one.startswith(node) and word in one for one in found) for node, word in everywhere)

    until(under_way, 15, lambda: f"there is only {fleet_.started()}; {gate.process.poll()}")
    try:
        yield gate
    finally:
        if gate.process.poll() is None:
            gate.process.send_signal(signal.SIGTERM)
            gate.process.wait(10 * PATIENCE)
