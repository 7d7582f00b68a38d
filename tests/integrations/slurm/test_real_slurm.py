"""Our hooks in a real Slurm, with real daemons and a real aggregator. Verified against Slurm 22.05.8."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from healthd.aggregator.drain.plan import ActuatorError, Done, Removal, Why
from healthd.core.errors import ConfigError
from healthd.integrations.slurm.actuator import SlurmActuator
from healthd.integrations.slurm.jobs import read_job
from healthd.integrations.slurm.scontrol import MARK, Scontrol, SlurmError
from tests.aggregator.cluster import Cluster, ask, release
from tests.aggregator.service import Service
from tests.integrations.slurm.slurm_kit import SlurmCluster, until

NODES = ("n1", "n2", "n3")
pytestmark = [
    pytest.mark.system("slurmd", "slurmctld", "sbatch", "sinfo", "scontrol", "curl", root=True),
]


@dataclass
class Site:
    """A fleet and its Slurm."""

    fleet: Cluster
    aggregator: Service
    slurm: SlurmCluster

    def fault(self, node: str, *words: str) -> None:
        done = self.fleet.healthd("fault", *words, "--run-dir", str(self.fleet.run_dir(node)))
        assert done.code == 0, done.err

    def still(self, on: bool) -> None:
        """Whether the health check does nothing, so that the other hooks show what they do alone."""
        file = self.slurm.folder / "still"
        file.touch() if on else file.unlink(missing_ok=True)
        if on:
            until(lambda: not self.checking(), 15, lambda: "a health check goes on and on")

    def checking(self) -> bool:
        """Whether a health check is under way on any node."""
        program = str(self.slurm.folder / "healthd/health-check.sh").encode()
        for pid in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may have ended
                if program in (pid / "cmdline").read_bytes():
                    return True
        return False

    def leased(self) -> int:
        with httpx.Client(trust_env=False, verify=False) as client:
            return int(client.get(f"{self.aggregator.url}/v1/fleet").json()["leased"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder) as fleet:
        aggregator = fleet.fleet(*NODES)
        (folder / "slurm").mkdir()
        urls = {name: fleet.services[name].url for name in NODES}
        slurm = SlurmCluster(folder / "slurm", urls, aggregator.url)
        try:
            slurm.ready()
            yield Site(fleet, aggregator, slurm)
        finally:
            slurm.stop()


@pytest.fixture(autouse=True)
def clean(site: Site) -> Iterator[None]:
    yield
    site.still(False)
    for name in NODES:
        site.slurm.node_is(name, lambda node: not node.out)


def test_fault_drains_the_node_the_job_goes_elsewhere_and_repair_resumes_it(site: Site) -> None:
    site.fault("n1", "set", "proof=fail")
    drained = site.slurm.node_is("n1", lambda node: node.drained)
    assert drained.reason.startswith(MARK + "proof"), drained
    job = site.slurm.job_is(site.slurm.submit("-N1"), "COMPLETED", "FAILED")
    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n2")
    site.fault("n1", "clear")
    assert site.slurm.node_is("n1", lambda node: not node.out).reason == ""


def test_drain_of_an_operator_survives_on_a_node_that_was_ours_before(site: Site) -> None:
    site.fault("n3", "set", "proof=fail")
    site.slurm.node_is("n3", lambda node: node.bears(MARK))
    site.slurm.said("scontrol", "update", "nodename=n3", "state=drain", "reason=fan is loud")
    site.fault("n3", "clear")
    until(lambda: site.fleet.services["n3"].health() == 200, 10, lambda: "n3 is not healthy again")
    time.sleep(4.5)  # two health checks
    node = site.slurm.node("n3")
    assert (node.drained, node.reason) == (True, "fan is loud")
    site.slurm.said("scontrol", "update", "nodename=n3", "state=resume")


def test_prolog_refuses_the_job_and_its_drain_is_undone_after_the_repair(site: Site) -> None:
    site.still(True)
    ungated = site.slurm.folder / "ungated"  # here the node alone knows
    ungated.touch()
    try:
        site.fault("n2", "set", "proof=fail")
        until(lambda: site.fleet.services["n2"].get("/readyz").status_code == 503, 10, lambda: "n2 is ready")
        number = site.slurm.submit("-N1", "-w", "n2")
        refused = site.slurm.node_is("n2", lambda node: node.drained)
        assert refused.reason == "Prolog error"
        assert site.slurm.job_is(number, "PENDING")["Priority"] != "0"  # not held
        site.still(False)
        site.slurm.node_is("n2", lambda node: node.reason.startswith(MARK + "proof"))
        site.fault("n2", "clear")
        site.slurm.node_is("n2", lambda node: not node.out)
        assert site.slurm.job_is(number, "COMPLETED")["NodeList"] == "n2"
    finally:
        ungated.unlink()


def test_two_nodes_are_held_until_the_gate_admits_and_given_back_at_the_end(site: Site) -> None:
    other = ask(site.aggregator.url, "other", ["n2"], wait=10)
    assert other["decision"] == "admit", other
    over = site.slurm.folder / "over"
    number = site.slurm.submit("-N2", "-w", "n[1-2]", script=f"until [ -e {over} ]; do sleep 0.1; done")
    site.slurm.job_is(number, "CONFIGURING")
    time.sleep(1)
    assert site.slurm.job(number)["JobState"] == "CONFIGURING"
    release(site.aggregator.url, other["id"])
    try:
        site.slurm.job_is(number, "RUNNING")
        assert site.leased() == 2
    finally:
        over.touch()
    site.slurm.job_is(number, "COMPLETED")
    until(lambda: site.leased() == 0, 10, lambda: "the nodes are not given back")


def test_rejected_job_goes_back_and_lands_elsewhere(site: Site) -> None:
    site.still(True)
    url = f"{site.aggregator.url}/v1/nodes/n1/quarantine"
    assert httpx.put(url, json={"reason": "drill"}, trust_env=False, verify=False).status_code == 200
    try:
        number = site.slurm.submit("-N1")
        drained = site.slurm.node_is("n1", lambda node: node.drained)
        assert drained.reason.startswith(MARK + "Quarantined: n1 is quarantined"), drained
        site.slurm.job_is(number, "PENDING")
        shown = site.slurm.said("scontrol", "show", "job", number)
        assert "AdminComment=healthd: n1 is quarantined" in shown  # its owner can read why
        job = site.slurm.job_is(number, "COMPLETED")
        assert (job["NodeList"], job["Restarts"]) == ("n2", "1")
        assert "AdminComment=healthd" not in site.slurm.said("scontrol", "show", "job", number)
    finally:
        assert httpx.delete(url, trust_env=False, verify=False).status_code == 200
        (site.slurm.folder / "hooks/n1.clear").unlink(missing_ok=True)  # as after five minutes


def removal(node: str, *aliases: str) -> Removal:
    return Removal(
        node=node,
        aliases=aliases,
        instance_id=None,
        why=Why.QUARANTINE,
        reason="two faults in an hour",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
    )


def test_actuator_drains_and_takes_back_only_its_own(site: Site) -> None:
    site.still(True)
    hand = SlurmActuator(site.slurm.scontrol, owner="healthd")
    assert asyncio.run(hand.remove(removal("n1"))).done is Done.OUT
    assert asyncio.run(hand.remove(removal("n1"))).done is Done.OUT  # again, at the next look
    assert asyncio.run(hand.remove(removal("i-0abc", "n2"))).done is Done.OUT
    assert asyncio.run(hand.remove(removal("elsewhere"))).done is Done.LEFT
    marked = asyncio.run(hand.marked())
    assert marked == {
        "n1": "healthd-fleet: two faults in an hour",
        "i-0abc": "healthd-fleet: as i-0abc: two faults in an hour",
    }
    other = SlurmActuator(site.slurm.scontrol, owner="other")
    assert asyncio.run(other.marked()) == {}
    assert asyncio.run(other.remove(removal("n1"))).done is Done.LEFT
    assert asyncio.run(other.restore("n1")).done is Done.LEFT
    assert asyncio.run(hand.restore("i-0abc")).done is Done.BACK
    site.slurm.said("scontrol", "update", "nodename=n1", "state=drain", "reason=fan is loud")
    assert asyncio.run(hand.restore("n1")).done is Done.LEFT
    assert asyncio.run(hand.remove(removal("n1"))).done is Done.LEFT
    assert site.slurm.node("n1").reason == "fan is loud"
    site.slurm.said("scontrol", "update", "nodename=n1", "state=resume")


def test_word_for_all_nodes_never_reaches_slurm(site: Site) -> None:
    hand = SlurmActuator(site.slurm.scontrol, owner="healthd")
    assert asyncio.run(hand.remove(removal("ALL", "n[1-3]", "n1,n2"))).done is Done.LEFT
    with pytest.raises(SlurmError, match="is not a single node"):
        site.slurm.scontrol.drain("ALL", "healthd: x")
    assert not any(node.out for node in site.slurm.scontrol.nodes())


def test_controller_that_is_away_is_an_error_and_no_answer(site: Site) -> None:
    nowhere = {**site.slurm.environment, "SLURM_CONF": "/nowhere/slurm.conf"}
    with pytest.raises(ActuatorError, match="scontrol"):
        asyncio.run(SlurmActuator(Scontrol(environ=nowhere, timeout_seconds=0.5), owner="healthd").marked())


def test_names_are_expanded_by_slurm_and_counted(site: Site) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3],m07", "SLURM_JOB_NUM_NODES": "4"}
    assert read_job(environ, site.slurm.scontrol).nodes == ("n1", "n2", "n3", "m07")
    with pytest.raises(ConfigError, match="lists 4"):
        read_job({**environ, "SLURM_JOB_NUM_NODES": "5"}, site.slurm.scontrol)
    with pytest.raises(ConfigError, match=r"n\[1-"):  # scontrol itself answers this with exit code 0
        read_job({**environ, "SLURM_JOB_NODELIST": "n[1-"}, site.slurm.scontrol)
