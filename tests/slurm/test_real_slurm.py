"""Our hooks in a real Slurm, with real daemons and a real aggregator. Verified against Slurm 22.05.8."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from healthd.slurm import MARK
from tests.fleet.cluster import Cluster, ask, release
from tests.fleet.service import Service
from tests.slurm.slurm_kit import SlurmCluster, missing, until

NODES = ("n1", "n2", "n3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there"),
    pytest.mark.xdist_group("slurm"),
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
            time.sleep(2.5)  # one that is under way

    def leased(self) -> int:
        with httpx.Client(trust_env=False) as client:
            return int(client.get(f"{self.aggregator.url}/v1/fleet").json()["leased"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder) as fleet:
        extra = "[node.allocations]\nread = false\n"  # other tests of this machine may run a Slurm, too
        aggregator = fleet.fleet(*NODES, extra=extra)
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
    time.sleep(5)  # two health checks
    node = site.slurm.node("n3")
    assert (node.drained, node.reason) == (True, "fan is loud")
    site.slurm.said("scontrol", "update", "nodename=n3", "state=resume")


def test_prolog_refuses_the_job_and_its_drain_is_undone_after_the_repair(site: Site) -> None:
    site.still(True)
    site.fault("n2", "set", "proof=fail")
    # The gate of the aggregator would find it, too: here it is the node alone that knows.
    site.slurm.said("scontrol", "update", "nodename=n2", "comment=x")
    until(lambda: site.fleet.services["n2"].get("/readyz").status_code == 503, 10, lambda: "n2 is ready")
    with_override = site.fleet.healthd(
        "override", "slurm-" + str(int(site.slurm.submit("-N1", "--hold", "-w", "n2"))), "--reason", "drill",
        "--until", "1h", "--aggregator", site.aggregator.url,
    )
    assert with_override.code == 0, with_override.err


def test_two_nodes_are_held_until_the_gate_admits_and_given_back_at_the_end(site: Site) -> None:
    other = ask(site.aggregator.url, "other", ["n2"], wait=10)
    assert other["decision"] == "admit"
    number = site.slurm.submit("-N2", "-w", "n[1-2]", script="sleep 1")
    site.slurm.job_is(number, "CONFIGURING")
    time.sleep(2)
    assert site.slurm.job(number)["JobState"] == "CONFIGURING"
    release(site.aggregator.url, other["id"])
    site.slurm.job_is(number, "RUNNING", "COMPLETED")
    assert site.leased() == 2
    site.slurm.job_is(number, "COMPLETED")
    until(lambda: site.leased() == 0, 10, lambda: "the nodes are not given back")


def test_rejected_job_goes_back_and_lands_elsewhere(site: Site) -> None:
    site.still(True)
    url = f"{site.aggregator.url}/v1/nodes/n1/quarantine"
    with httpx.Client(trust_env=False) as client:
        assert client.put(url, json={"reason": "drill"}).status_code == 200
        number = site.slurm.submit("-N1")
        drained = site.slurm.node_is("n1", lambda node: node.drained)
        assert drained.reason.startswith(MARK), drained
        site.slurm.job_is(number, "PENDING")
        assert "AdminComment" in site.slurm.job(number)
        job = site.slurm.job_is(number, "COMPLETED")
        assert (job["NodeList"], job["Restarts"]) == ("n2", "1")
        assert client.delete(url).status_code == 200
