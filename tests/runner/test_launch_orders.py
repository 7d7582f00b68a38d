"""
What may be started on a node for nccom-test over several nodes: the planned words, and nothing else. Here the judgement
that three places share, and two of them: the main node's daemon and the node; that of the aggregator is in
`tests/aggregator/test_launch_groups.py`. Programs are stand-ins that say how they were started; the same with Open MPI,
over real networks, is `tests/netns/test_nccom_launch.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.collective.nccom.vector import Accepted
from checks.contract import Finding, Status
from checks.host.machine import Host
from healthd.core.model import CollectiveOrder, Launch, LaunchOrder, NccomGroup, Order
from healthd.core.model.launch_permission import checks_over_nodes, judge, own_node, round_of
from healthd.node.nccom import round as nccom_round
from healthd.node.nccom.main_node import MainNode as Main
from healthd.node.nccom.round import RoundSettings
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.orders import Orders
from tests.checks.test_nccom_launch import vector
from tests.fakes.neuron import NeuronMachine
from tests.node.node_kit import eventually, quiet, run
from tests.node.test_node_collectives import Site
from tests.patience import PATIENCE
from tests.runner.launch_kit import (
    ADDRESSES,
    CHECK,
    HOSTILE,
    NODES,
    alive,
    hostile,
    launch,
    order,
    refusal,
)

# --- the judgement that all three share -------------------------------------------------------------------------------


@hostile
def test_only_the_planned_launch_is_accepted(asked: Launch, why: str) -> None:
    assert isinstance(judge(order(), launch(), ()), Accepted)
    assert why in refusal(judge(order(), asked, ()))


def test_a_second_launch_of_a_node_is_refused_and_the_first_said_again_is_not() -> None:
    other = launch(routed='"radix"')
    assert isinstance(judge(order(), launch(), [launch()]), Accepted)
    assert "already" in refusal(judge(order(), other, [launch()]))


def test_launches_of_one_check_are_of_one_job_and_each_is_another_daemon() -> None:
    assert isinstance(judge(order(), launch("n3"), [launch()]), Accepted)
    uri = '"7.0;tcp://10.77.0.1:47301"'
    assert "is not job" in refusal(judge(order(), launch("n3", ess_base_jobid='"7"', orte_hnp_uri=uri), [launch()]))
    assert "another node's" in refusal(judge(order(), launch("n3", ess_base_vpid="1"), [launch()]))


def test_each_check_of_a_group_has_a_job_of_its_own() -> None:
    second = checks_over_nodes(("all_gather",))[0]
    both = order(checks=(CHECK, second))
    uri = '"7.0;tcp://10.77.0.1:47301"'
    other = launch("n2", second, ess_base_jobid='"7"', orte_hnp_uri=uri)
    assert isinstance(judge(both, other, [launch()]), Accepted)
    assert round_of(both, CHECK) != round_of(both, second)


@pytest.mark.parametrize("mode", ["ssh", "slurm"])
def test_nothing_is_carried_in_other_modes(mode: str) -> None:
    nccom = NccomGroup(mode=mode, hosts=ADDRESSES, nodes=NODES)
    assert "by an agent" in refusal(judge(order(nccom=nccom), launch(), ()))
    assert "not run by nccom-test" in refusal(judge(order(nccom=None), launch(), ()))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_words_changed_anywhere_never_start_anything_else(data: st.DataObject) -> None:
    words = list(launch().argv)
    place = data.draw(st.integers(0, len(words) - 1))
    words[place] = data.draw(st.one_of(st.text(max_size=12), st.sampled_from(["-x", ";", "`id`", "$(id)", "sh"])))
    found = judge(order(), Launch(check=CHECK, node="n2", argv=tuple(words)), ())
    if isinstance(found, Accepted):
        assert (found.host, found.argv[0]) == (ADDRESSES[1], "orted")
        assert not any(set(word) & set("$`|&<>\"' \n") for word in found.argv)


def test_order_that_does_not_add_up_is_for_nobody() -> None:
    def owner(**changes: Any) -> str | None:
        one = order(**changes)
        assert one.nccom is not None
        return own_node(one, one.nccom)

    assert (owner(), owner(first_rank=2), owner(first_rank=4)) == ("n1", "n2", "n3")
    assert owner(first_rank=1) is owner(first_rank=6) is owner(size=8) is owner(ranks=0) is None


# --- the main node's daemon -------------------------------------------------------------------------------------------

TOOL = """#!{python}
import json, os, subprocess, sys
if "--help" in sys.argv:
    os.execv({real!r}, [{real!r}, "--help"])
said = [subprocess.run([*os.environ["OMPI_MCA_plm_rsh_agent"].split(), *words], capture_output=True, text=True)
        for words in json.load(open({asked!r}))]
socket = os.stat(os.environ["HEALTHD_RSH_SOCKET"])
told = [[one.returncode, one.stderr] for one in said] + [oct(socket.st_mode & 0o777), sorted(os.environ)]
json.dump(told, open({told!r}, "w"))
os.execv({real!r}, [{real!r}, "--help"])
"""


class MainNode:
    """A main node whose nccom-test calls the agent with such words, and ends without a row."""

    def __init__(self, folder: Path, *asked: Sequence[str]) -> None:
        self.machine = NeuronMachine(folder / "machine", "trn1.2xlarge")
        self.told = folder / "told"
        self.launches: list[tuple[Launch, ...]] = []
        (folder / "asked").write_text(json.dumps(asked))
        tool = self.machine.root / "bin/nccom-test"
        real = tool.rename(tool.with_name("nccom-test.real"))
        tool.write_text(
            TOOL.format(python=sys.executable, real=str(real), asked=str(folder / "asked"), told=str(self.told))
        )
        tool.chmod(0o755)
        mpirun = tool.with_name("mpirun")  # of which no use is made
        mpirun.write_text("#!/bin/sh\nexit 1\n")
        mpirun.chmod(0o755)

    def run(self, asked: CollectiveOrder | None = None, seconds: float = 30.0) -> dict[str, tuple[Finding, ...]]:
        one = asked or order()
        assert one.nccom is not None
        nccom = one.nccom

        async def main() -> dict[str, tuple[Finding, ...]]:
            work = Main(one, nccom, self.machine.host, {}, self._heard, deadline=time.monotonic() + seconds)
            return await work.run()

        return run(main())

    def _heard(self, launches: tuple[Launch, ...], findings: object, now: str) -> None:
        self.launches.append(launches)


def test_main_node_hands_on_the_planned_words_alone(tmp_path: Path) -> None:
    """All but the first are refused to mpirun, and nobody else hears of them."""
    bad = [one.argv for one, _ in HOSTILE.values() if one.argv and one.check == CHECK and one.node == "n2"]
    bad += [tuple(vector(ADDRESSES[0])), tuple(vector("10.77.0.9")), launch(routed='"radix"').argv]
    main = MainNode(tmp_path, launch().argv, *bad)
    findings = main.run()
    *said, mode, names = json.loads(main.told.read_text())
    assert [code for code, _ in said] == [0] + [1] * len(bad)
    assert all(text.startswith("healthd-rsh: ") for _, text in said[1:])
    assert max(main.launches, key=len) == (launch(),)
    assert mode == "0o600"
    assert {"HEALTHD_RSH_ROUND", "NEURON_RT_ROOT_COMM_ID", "FI_PROVIDER"} <= set(names)
    (finding,) = findings[CHECK]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "LaunchRefused")


def test_launch_of_a_round_that_is_over_or_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = MainNode(tmp_path, launch().argv)
    tool = main.machine.root / "bin/nccom-test"
    tool.write_text(tool.read_text().replace("said =", 'os.environ["HEALTHD_RSH_ROUND"] = "other"\nsaid ='))
    main.run()
    (code, text), *_ = json.loads(main.told.read_text())
    assert (code, "'other' is not under way" in text) == (1, True)
    assert max(main.launches, key=len) == ()


def test_jobs_environment_does_not_reach_nccom_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "7")
    monkeypatch.setenv("OMPI_MCA_btl", "evil")
    main = MainNode(tmp_path)
    main.run()
    names = set(json.loads(main.told.read_text())[-1])
    assert not names & {"NEURON_RT_VISIBLE_CORES", "OMPI_MCA_btl"}


def test_main_node_without_the_tool_knows_nothing(tmp_path: Path) -> None:
    main = MainNode(tmp_path)
    (main.machine.root / "bin/nccom-test").unlink()
    (finding,) = main.run()[CHECK]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")


def test_main_node_without_open_mpi_knows_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = MainNode(tmp_path)
    (main.machine.root / "bin/mpirun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (finding,) = main.run()[CHECK]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")
    assert "needs mpirun" in finding.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"size": 7}, "CheckError"), ({"main": "a b"}, "CheckError"), ({}, "Timeout")],
)
def test_round_that_cannot_be_planned_or_has_no_time_knows_nothing(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    (finding,) = MainNode(tmp_path).run(order(**changes), seconds=0.5 if not changes else 30.0)[CHECK]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, reason)


def test_hanging_nccom_test_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    main = MainNode(tmp_path)
    tool = main.machine.root / "bin/nccom-test"
    left = tmp_path / "left"
    tool.write_text(
        tool.read_text().replace(
            "said =",
            f"one = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
            f"open({str(left)!r}, 'w').write(str(one.pid))\nimport time; time.sleep(300)\nsaid =",
        )
    )
    began = time.monotonic()
    (finding,) = main.run(order(join_seconds=1.0, timeout_seconds=1.0))[CHECK]
    assert (finding.status, finding.reason) == (Status.FAIL, "Timeout")
    assert time.monotonic() - began < 15 * PATIENCE
    assert not alive(int(left.read_text()))


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

    async def main() -> dict[str, tuple[Finding, ...]]:
        work = Main(one, nccom, machine.host, {}, lambda *_: None, deadline=time.monotonic() + 30)
        return await work.run()

    findings = run(main())[CHECK]
    assert {one.status for one in findings} == {Status.PASS}, findings
    assert "--jobid=7 -N 2" in (tmp_path / "srun.said").read_text()
    assert (tmp_path / "srun.nodes").read_text().split() == ["slurm-a", "slurm-b", "arbitrary"]


# --- the node ---------------------------------------------------------------------------------------------------------

ORTED = """#!{python}
import json, os, subprocess, sys, time
rank = subprocess.Popen(["sleep", "300"], start_new_session=True)  # as the real one starts its ranks
draft = {said!r} + ".new"
told = [sys.argv[1:], dict(os.environ), os.getpid(), rank.pid, os.getcwd()]
with open(draft, "w") as file:
    json.dump(told, file)
os.rename(draft, {said!r})
time.sleep({seconds})
"""


class Guest(Site):
    """Node n2, with a stand-in for Open MPI's daemon that says how it was started."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 300, carried: bool = True
    ) -> None:
        super().__init__(folder)
        self.said = folder / "said"
        bin_ = folder / "bin"
        bin_.mkdir()
        (bin_ / "orted").write_text(ORTED.format(python=sys.executable, said=str(self.said), seconds=seconds))
        (bin_ / "orted").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
        self.collectives = Collectives(
            self.book,
            self.scheduler,
            self.script.open,
            interface="lo",
            clock=self.time.clock,
            tasks=self.tasks,
            rounds=RoundSettings(node="n2", host=Host(folder), limits={}, carried=carried, lnc=lambda: 1),
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

    async def started(self) -> Any:
        await eventually(self.said.exists)
        return json.loads(self.said.read_text())


def group_order(**changes: Any) -> Order:
    return Order(id="C1", kind="collective", deadline_seconds=60.0, collective=order(2, **changes))


def launch_order(asked: Launch | None = None, name: str = "L1", **changes: str) -> Order:
    one = asked or launch()
    values = {"validation": "g-1:c0", "group": "g-1:c0.0", "check": one.check, **changes}
    return Order(id=name, kind="launch", deadline_seconds=60.0, launch=LaunchOrder(argv=one.argv, **values))


def test_planned_launch_is_started_with_the_planned_environment_and_ends_with_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")  # that of the service, by which the cores were counted
    monkeypatch.setenv("OMPI_MCA_plm", "evil")

    async def main() -> str:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            await site.take(group_order())
            assert site.status("C1") == "running"
            await site.take(group_order(), launch_order())
            argv, environment, pid, rank, folder = await site.started()
            assert isinstance(folder, str)
            assert site.status("L1") == "running"
            judged = judge(order(), launch(), ())
            assert isinstance(judged, Accepted)
            assert tuple(argv) == judged.argv[1:]
            assert environment["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.1:29500"
            assert environment["FI_PROVIDER"] == "efa"
            assert environment["NEURON_LOGICAL_NC_CONFIG"] == environment["NEURON_RT_VIRTUAL_CORE_SIZE"] == "1"
            assert not {"NEURON_RT_VISIBLE_CORES", "OMPI_MCA_plm"} & set(environment)
            assert environment["HOME"] == environment["TMPDIR"] == folder
            assert os.getpgid(pid) != os.getpgid(0)
            assert site.script.events == ["open", "look"]
            await site.take(group_order())  # the launch is not listed any more
            await eventually(lambda: site.status("L1") == "cancelled")
            assert not alive(pid)
            assert not alive(rank)
            await eventually(lambda: site.status("C1") == "done")  # it was the only one of the group
            return folder

    assert not os.path.exists(run(main()))


@pytest.mark.parametrize("how", ["called off", "deadline", "lease", "stop"])
def test_end_of_the_round_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def main() -> tuple[int, int]:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            await site.take(group_order(), launch_order())
            _, _, pid, rank, _ = await site.started()
            if how == "called off":
                await site.take()
            elif how == "deadline":
                site.time.move(61.0)
                site.orders.tick()
            elif how == "lease":
                await site.scheduler.stop_active("job train gets the node")
            if how != "stop":
                await eventually(lambda: site.status("C1") == "cancelled")
                await eventually(lambda: site.status("L1") in ("cancelled", None))
            return pid, rank

    pid, rank = run(main())
    assert not alive(pid)
    assert not alive(rank)


def test_a_launch_ends_with_its_round_while_it_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = asyncio.Event()

    async def start_slowly(*_: object) -> None:
        starting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(nccom_round, "start_tree", start_slowly)

    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            await site.take(group_order(), launch_order())
            await eventually(starting.is_set)
            await site.take(launch_order())  # the group is not listed any more
            await eventually(lambda: site.status("C1") == "cancelled")
            assert site.status("L1") == "cancelled"

    run(main())


def test_round_is_done_when_each_check_had_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch, seconds=0) as site:
            await quiet()
            await site.take(group_order(), launch_order())
            await eventually(lambda: site.status("C1") == "done")
            assert (site.status("L1"), site.orders.reports()["L1"].message) == ("done", "ended with 0")
            _, _, _, rank, _ = await site.started()
            assert not alive(rank)

    run(main())


BAD_HERE = {name: one for name, one in HOSTILE.items() if name != "another node's host"}


@pytest.mark.parametrize(("asked", "why"), BAD_HERE.values(), ids=list(BAD_HERE))
def test_node_starts_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Launch, why: str) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            await site.take(group_order(), launch_order(asked))
            assert site.status("L1") == "refused"
            assert site.orders.reports()["L1"].message.startswith("will not start that: ")
            await asyncio.sleep(0.1)
            assert not site.said.exists()

    run(main())


def test_launch_for_another_host_or_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            two = order(2, checks=(CHECK, "nccom_nodes_all_gather"))
            both = Order(id="C1", kind="collective", deadline_seconds=60.0, collective=two)
            await site.take(both, launch_order(launch("n3")))
            assert "meant for" in site.orders.reports()["L1"].message
            assert not site.said.exists()
            await site.take(both, launch_order(name="L2"))
            await site.started()
            await site.take(both, launch_order(name="L2"), launch_order(launch(routed='"radix"'), name="L3"))
            assert "already" in site.orders.reports()["L3"].message
            assert site.status("L2") == "running"

    run(main())


def test_nothing_starts_without_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No session at all, one of another validation, and one of another group."""

    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            await site.take(launch_order())
            assert "not held" in site.orders.reports()["L1"].message
            await site.take(group_order(), launch_order(name="L2", validation="g-2:c0"))
            assert "not held" in site.orders.reports()["L2"].message
            await site.take(group_order(), launch_order(name="L3", group="g-1:c0.7"))
            assert "in no group" in site.orders.reports()["L3"].message
            assert not site.said.exists()

    run(main())


def test_devices_that_are_taken_refuse_the_group_and_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            site.script.refusal = "the devices are taken: pid 7"
            await site.take(group_order(), launch_order())
            await eventually(lambda: site.status("C1") == "refused")
            assert site.status("L1") in ("refused", "cancelled")
            assert not site.said.exists()

    run(main())


def test_node_may_be_told_never_to_start_anything_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch, carried=False) as site:
            await quiet()
            await site.take(group_order(), launch_order())
            await eventually(lambda: site.status("C1") == "refused")
            assert "nccom_carried" in site.orders.reports()["C1"].message
            assert site.status("L1") in ("refused", "cancelled")
            assert not site.said.exists()

    run(main())


def test_order_for_another_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            await quiet()
            other = Order(id="C1", kind="collective", deadline_seconds=60.0, collective=order(4))
            await site.take(other)
            await eventually(lambda: site.status("C1") == "refused")
            assert "is for n3" in site.orders.reports()["C1"].message

    run(main())


def test_node_without_open_mpi_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Guest(tmp_path, monkeypatch) as site:
            monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
            await quiet()
            await site.take(group_order(), launch_order())
            await eventually(lambda: site.status("L1") == "refused")
            assert "install Open MPI" in site.orders.reports()["L1"].message

    run(main())
