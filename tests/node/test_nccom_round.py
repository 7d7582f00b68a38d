"""
One node's part in nccom-test over several nodes: the main node runs it and judges what it says, the others wait, and no
process is left. Programs are stand-ins; the same with Open MPI is `tests/netns/test_nccom_over_nodes.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Finding, Status
from checks.host.machine import Host
from healthd.core.model import CollectiveOrder, NccomGroup, Order
from healthd.node.nccom import NccomRound, RoundProgress, RoundSettings, own_node
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.orders import Orders
from tests.fakes.neuron import NeuronMachine
from tests.node.node_collectives_kit import Site
from tests.node.node_kit import eventually, quiet, run
from tests.patience import PATIENCE
from tests.runner.runner_kit import alive

NODES = ("n1", "n2", "n3")
CHECK = "nccom_nodes_all_reduce"


def order(first_rank: int = 0, **changes: Any) -> CollectiveOrder:
    values: dict[str, Any] = {
        "validation": "g-1:c0",
        "group": "g-1:c0.0",
        "checks": (CHECK,),
        "first_rank": first_rank,
        "ranks": 2,
        "size": 6,
        "whole_rank": first_rank,
        "main": "10.77.0.1",
        "port": 29500,
        "seed": 1,
        "join_seconds": 10.0,
        "timeout_seconds": 10.0,
        "nccom": NccomGroup(mode="ssh", hosts=("10.77.0.1", "10.77.0.2", "10.77.0.3"), nodes=NODES),
    }
    return CollectiveOrder(**{**values, **changes})


def test_order_that_does_not_add_up_is_for_nobody() -> None:
    def owner(**changes: Any) -> str | None:
        one = order(**changes)
        assert one.nccom is not None
        return own_node(one, one.nccom)

    assert (owner(), owner(first_rank=2), owner(first_rank=4)) == ("n1", "n2", "n3")
    assert owner(first_rank=1) is owner(first_rank=6) is owner(size=8) is owner(ranks=0) is None


# --- the main node ----------------------------------------------------------------------------------------------------

TOOL = """#!{python}
import json, os, subprocess, sys
if "--help" in sys.argv:
    os.execv({real!r}, [{real!r}, "--help"])
json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open({told!r}, "w"))
os.execv({real!r}, [{real!r}, "--help"])
"""
HANGS = """
rank = subprocess.Popen(["sleep", "300"], start_new_session=True)  # as mpirun's daemon starts its ranks
with open({left!r} + ".new", "w") as file:
    file.write(str(rank.pid))
os.rename({left!r} + ".new", {left!r})
os.execvp("sleep", ["sleep", "300"])
"""


class MainNode:
    """A main node whose nccom-test says how it was started, and ends without a row or `hangs`."""

    def __init__(self, folder: Path, *, hangs: bool = False) -> None:
        self.machine = NeuronMachine(folder / "machine", "trn1.2xlarge")
        self.told, self.left = folder / "told", folder / "left"
        tool = self.machine.root / "bin/nccom-test"
        real = tool.rename(tool.with_name("nccom-test.real"))
        tool.write_text(TOOL.format(python=sys.executable, real=str(real), told=str(self.told)))
        if hangs:
            first, _, last = tool.read_text().rpartition("os.execv(")
            tool.write_text(first + HANGS.format(left=str(self.left)) + "os.execv(" + last)
        tool.chmod(0o755)
        mpirun = tool.with_name("mpirun")  # of which no use is made
        mpirun.write_text("#!/bin/sh\nexit 1\n")
        mpirun.chmod(0o755)
        self.settings = RoundSettings(node="n1", host=self.machine.host, limits={}, lnc=lambda: 1)

    def run(self, asked: CollectiveOrder | None = None, seconds: float = 30.0) -> tuple[Finding, ...]:
        async def main() -> RoundProgress:
            return await NccomRound(asked or order(), self.settings, lambda _: None, seconds=seconds).run()

        return run(main()).findings[CHECK]


def test_main_node_runs_nccom_test_with_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a job's gets into it."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "7")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")  # that of the service; ranks were counted by another
    monkeypatch.setenv("OMPI_MCA_btl", "evil")
    main = MainNode(tmp_path)
    (finding,) = main.run()
    words, environment, folder = json.loads(main.told.read_text())
    assert (words[0], words[-4:]) == ("all_reduce", ["--hosts", "10.77.0.1", "10.77.0.2", "10.77.0.3"])
    assert environment["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.1:29500"
    assert environment["FI_PROVIDER"] == "efa"
    assert environment["NEURON_LOGICAL_NC_CONFIG"] == environment["NEURON_RT_VIRTUAL_CORE_SIZE"] == "1"
    assert environment["HOME"] == environment["TMPDIR"] == folder
    assert not {"NEURON_RT_VISIBLE_CORES", "OMPI_MCA_btl"} & set(environment)
    assert not os.path.exists(folder)
    assert finding.status is Status.FAIL  # it ended well, and gave no row


def test_main_node_without_the_tool_knows_nothing(tmp_path: Path) -> None:
    main = MainNode(tmp_path)
    (main.machine.root / "bin/nccom-test").unlink()
    (finding,) = main.run()
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")


def test_main_node_without_open_mpi_knows_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = MainNode(tmp_path)
    (main.machine.root / "bin/mpirun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (finding,) = main.run()
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")
    assert "needs mpirun" in finding.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"size": 6, "main": "a b"}, "CheckError"), ({}, "Timeout")],
)
def test_round_that_cannot_be_planned_or_has_no_time_knows_nothing(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    (finding,) = MainNode(tmp_path).run(order(**changes), seconds=0.5 if not changes else 30.0)
    assert (finding.status, finding.reason) == (Status.UNKNOWN, reason)


def test_hanging_nccom_test_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    main = MainNode(tmp_path, hangs=True)
    began = time.monotonic()
    (finding,) = main.run(order(join_seconds=1.0 * PATIENCE, timeout_seconds=1.0))
    assert (finding.status, finding.reason) == (Status.FAIL, "Timeout")
    assert time.monotonic() - began < 15 * PATIENCE
    assert not alive(int(main.left.read_text()))


SRUN = """#!/bin/sh
echo "$@" > {folder}/srun.said
cat "$SLURM_HOSTFILE" > {folder}/srun.nodes
echo "$SLURM_DISTRIBUTION" >> {folder}/srun.nodes
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -N ] && {{ n=$2; shift; }}; shift; done
i=0; while [ $i -lt $n ]; do SLURM_PROCID=$i "$@" & i=$((i+1)); done; wait
"""


def test_slurm_mode_is_a_step_of_the_job_on_the_nodes_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(SRUN.format(folder=tmp_path))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    nccom = NccomGroup(mode="slurm", hosts=("slurm-a", "slurm-b"), nodes=("n1", "n2"))
    one = order(size=4, nccom=nccom, main="127.0.0.1", workload="slurm:7")

    settings = RoundSettings(node="n1", host=machine.host, limits={})

    async def main() -> RoundProgress:
        return await NccomRound(one, settings, lambda _: None, seconds=30.0).run()

    findings = run(main()).findings[CHECK]
    assert {one.status for one in findings} == {Status.PASS}, findings
    assert "--jobid=7 -N 2" in (tmp_path / "srun.said").read_text()
    assert (tmp_path / "srun.nodes").read_text().split() == ["slurm-a", "slurm-b", "arbitrary"]


# --- the orders of a node --------------------------------------------------------------------------------------------


class Member(Site):
    """A node of the group; `settings` are those of its rounds."""

    def __init__(self, folder: Path, rounds: RoundSettings | None = None) -> None:
        super().__init__(folder)
        self.collectives = Collectives(
            self.book,
            self.scheduler,
            self.script.open,
            interface="lo",
            clock=self.time.clock,
            tasks=self.tasks,
            rounds=rounds or RoundSettings(node="n2", host=Host(folder), limits={}),
        )
        self.orders = Orders(
            self.book,
            self.scheduler,
            self.ledger,
            self.settings,
            clock=self.time.clock,
            tasks=self.tasks,
            collectives=self.collectives,
        )


def group_order(first_rank: int = 2) -> Order:
    return Order(id="C1", kind="collective", deadline_seconds=60.0, collective=order(first_rank))


@pytest.mark.parametrize("how", ["called off", "deadline", "lease", "stop"])
def test_end_of_the_round_leaves_no_process_on_the_main_node(tmp_path: Path, how: str) -> None:
    main_node = MainNode(tmp_path, hangs=True)

    async def main() -> None:
        async with Member(tmp_path, main_node.settings) as site:
            await quiet()
            await site.take(group_order(0))
            await eventually(main_node.left.exists)
            assert site.script.events == ["open", "look"]
            if how == "called off":
                await site.take()
            elif how == "deadline":
                site.time.move(61.0)
                site.orders.tick()
            elif how == "lease":
                await site.scheduler.stop_active("job train gets the node")
            if how != "stop":
                await eventually(lambda: site.status("C1") == "cancelled")

    run(main())
    assert not alive(int(main_node.left.read_text()))


def test_other_nodes_hold_their_devices_until_the_order_is_withdrawn(tmp_path: Path) -> None:
    async def main() -> None:
        async with Member(tmp_path) as site:
            await quiet()
            await site.take(group_order())
            await eventually(lambda: site.script.events == ["open", "look"])
            assert site.status("C1") == "running"
            await site.take()
            await eventually(lambda: site.status("C1") == "cancelled")

    run(main())


def test_devices_that_are_taken_refuse_the_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with Member(tmp_path) as site:
            await quiet()
            site.script.refusal = "the devices are taken: pid 7"
            await site.take(group_order())
            await eventually(lambda: site.status("C1") == "refused")

    run(main())


def test_order_for_another_node_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Member(tmp_path) as site:
            await quiet()
            await site.take(group_order(4))
            await eventually(lambda: site.status("C1") == "refused")
            assert "is for n3" in site.orders.reports()["C1"].message

    run(main())
