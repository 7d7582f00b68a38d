"""
A lease ends with the pods of its job, over a whole fleet: hooks, aggregator and daemons as processes, an API server's
stand-in. And where nobody can see the end, how long it lasts is said at admission.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import prepared
from tests.aggregator.cluster import HEALTHD, Cluster, ask
from tests.aggregator.service import ROOT, Command, Said, until
from tests.clients import api_server_kit

NODES = ("n1", "n2")
WITHIN_SECONDS = 10.0
"""From the end of a pod until its node is free for the next job, where the machine is not busy with something else."""


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[api_server_kit.Cluster]:
    with api_server_kit.cluster(tmp_path / "account") as made:
        yield made


@pytest.fixture
def fleet(tmp_path: Path, kube: api_server_kit.Cluster) -> Iterator[Cluster]:
    watched = f'[node.kubernetes]\napi_server = "{kube.url}"\nservice_account = "{kube.folder}"\n'
    with Cluster(tmp_path / "fleet", checks=("memory_free",)) as made:
        made.folder.mkdir()
        made.fleet(*NODES, extra=watched)
        yield made


def gang(fleet: Cluster, job: str, *, wait: str = "60s") -> list[Command]:
    """A hook in each pod of a job of two, which all ask at once."""
    started = []
    for rank, node in enumerate(NODES):
        pod = {"POD_NAMESPACE": "ml", "POD_NAME": f"{job}-{rank}", "POD_UID": uid(job, rank)}
        asked = ("--job", job, "--join", job, "--size", "2", "--rank", str(rank), "--node", node)
        terms = ("--tier", "passive", "--no-collective", "--wait", wait, "--json")
        process = prepared.Popen(
            [*HEALTHD, "gate", "--aggregator", fleet.services["aggregator"].url, *asked, *terms],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**fleet.env, **pod},
        )
        fleet.others.append(process)
        started.append(Command(process))
    return started


def uid(job: str, rank: int) -> str:
    return f"{rank:08d}-0000-4000-8000-{job.encode().hex():0>12}"


def admitted(fleet: Cluster, kube: api_server_kit.Cluster, job: str) -> list[Said]:
    """A job whose pods run, and whose hooks have been told that it may start."""
    for rank in range(len(NODES)):
        kube.job_pod(f"{job}-{rank}", uid=uid(job, rank))
    said = [hook.said(90.0) for hook in gang(fleet, job)]
    assert [one.code for one in said] == [0, 0], [one.err for one in said]
    return said


def rows(fleet: Cluster) -> list[dict[str, Any]]:
    """The leases of all nodes, as the aggregator has them."""
    http = fleet.services["aggregator"]
    return [row for node in NODES for row in http.get(f"/v1/nodes/{node}").json()["grants"]]


def leases(fleet: Cluster) -> dict[str, str]:
    """The job of the lease on each node."""
    return {row["node"]: row["lease"]["job"] for row in rows(fleet)}


def seen(kube: api_server_kit.Cluster) -> None:
    """Returns once each node watches its pod."""
    until(lambda: kube.watches == len(NODES))


def test_the_next_job_starts_when_the_pods_of_the_one_before_have_ended(
    fleet: Cluster, kube: api_server_kit.Cluster
) -> None:
    admitted(fleet, kube, "train")
    seen(kube)
    assert leases(fleet) == {"n1": "train", "n2": "train"}
    for rank in range(len(NODES)):
        kube.job_pod(f"train-{rank}", uid=uid("train", rank), phase="Succeeded")
        kube.delete_pod(f"train-{rank}")
    began = time.monotonic()
    until(lambda: leases(fleet) == {})
    assert time.monotonic() - began < WITHIN_SECONDS
    admitted(fleet, kube, "next")
    assert leases(fleet) == {"n1": "next", "n2": "next"}


@pytest.mark.thorough
def test_each_node_is_given_back_with_its_own_pod(fleet: Cluster, kube: api_server_kit.Cluster) -> None:
    admitted(fleet, kube, "train")
    seen(kube)
    kube.delete_pod("train-0")
    until(lambda: leases(fleet) == {"n2": "train"})
    url = fleet.services["aggregator"].url
    assert ask(url, "one", ["n1"], wait=10, tier="passive")["decision"] == "admit"
    assert ask(url, "two", ["n2"], wait=0.5, tier="passive")["decision"] == "hold"


@pytest.mark.parametrize("away", ["daemon", "aggregator"])
def test_an_end_while_one_is_away_is_seen_when_it_is_back(
    fleet: Cluster, kube: api_server_kit.Cluster, away: str
) -> None:
    admitted(fleet, kube, "train")
    seen(kube)
    gone = fleet.services["n1" if away == "daemon" else "aggregator"]
    gone.signal(signal.SIGKILL)
    assert gone.process is not None
    gone.process.wait()
    kube.delete_pod("train-0")
    gone.start(ready=False)
    began = time.monotonic()
    until(lambda: _answers(fleet) and leases(fleet) == {"n2": "train"})
    assert time.monotonic() - began < 2 * WITHIN_SECONDS  # with the start of a process


def _answers(fleet: Cluster) -> bool:
    with contextlib.suppress(Exception):
        return fleet.services["aggregator"].get("/livez").status_code == 200
    return False


# --- where nobody can see the end -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_how_long_a_lease_lasts_unseen_is_said_at_admission(fleet: Cluster) -> None:
    url, terms = fleet.services["aggregator"].url, ("--tier", "passive", "--node", "n1", "--wait", "60s")
    said = fleet.healthd("gate", "--aggregator", url, "--job", "unseen", *terms)
    assert said.code == 0
    assert "leased until the job ends, or for 24 h if its end cannot be observed (set with --lease)" in said.out
    asked = fleet.gate(url, "asked", "--node", "n2", "--tier", "passive", "--lease", "12h")
    assert (asked.code, asked.json["policy"]["lease_seconds"]) == (0, 43200.0)
    (row,) = [one for one in rows(fleet) if one["node"] == "n2"]
    assert row["lease"]["max_seconds"] == 43200.0
    never = fleet.gate(url, "never", "--node", "n2", "--tier", "passive", "--lease", "300d")
    assert (never.code, "at most 2592000" in never.line) == (2, True)
    wrong = fleet.gate(url, "wrong", "--node", "n2", "--tier", "passive", "--workload", "pod:train-0/")
    assert (wrong.code, "pod:NAMESPACE/NAME/UID" in wrong.line) == (2, True)
