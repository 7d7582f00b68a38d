"""A lease ends with its pods, on real kubelets: the next job gets the nodes, whoever was away meanwhile."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.chart_kit import gating, rolled_out
from tests.kubernetes.kit import SYSTEM, Cluster, gated_job, until

pytestmark = pytest.mark.kubernetes

JOBS = "tests-leases"
WITHIN_SECONDS = 10.0
"""From the end of a pod until its node's daemon has ended the lease; a machine that is busy has more."""


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The chart on every node, its gates in earnest, and a namespace of jobs with what hooks need."""
    if not cluster.ours:
        pytest.skip("asks the daemons at the addresses of their nodes: KUBEBUILDER_ASSETS instead of KUBECONFIG")
    with gating(cluster, image, JOBS, tmp_path_factory.mktemp("leases")):
        yield cluster


def gated(name: str, image: str, *command: str) -> dict[str, Any]:
    """A Job of two pods that start their container again when it fails, as the kubelet does."""
    cheap = ("--tier=passive", "--no-collective", "--wait=2m")
    job = gated_job(JOBS, name, 2, image, *cheap, command=command)
    for key in ("backoffLimit", "podFailurePolicy", "podReplacementPolicy"):  # of pods that are never started again
        del job["spec"][key]
    job["spec"]["template"]["spec"] |= {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 1}
    return job


FOR_EVER = ("sleep", "infinity")


def address(cluster: Cluster, node: str) -> str:
    found = cluster.get("node", node)["status"]["addresses"]
    return str(next(one["address"] for one in found if one["type"] == "InternalIP"))


def leases(cluster: Cluster) -> dict[str, str]:
    """The pod of the lease on each node that has one, in the words of its daemon; "?" for a daemon that is away."""
    held = {}
    for node in cluster.nodes():
        try:
            with urllib.request.urlopen(f"http://{address(cluster, node)}:8080/v1/node", timeout=5) as answer:
                state = json.load(answer)
        except OSError:
            held[node] = "?"
            continue
        for lease in state["leases"]:
            held[node] = lease["workload"]
    return held


def pods(cluster: Cluster, job: str) -> dict[str, dict[str, Any]]:
    """The pods of a job by their nodes."""
    items = cluster.items("pods", "-n", JOBS, "-l", f"job-name={job}")
    return {item["spec"].get("nodeName", ""): item for item in items if "deletionTimestamp" not in item["metadata"]}


def workload(pod: dict[str, Any]) -> str:
    of = pod["metadata"]
    return f"pod:{of['namespace']}/{of['name']}/{of['uid']}"


def told(cluster: Cluster) -> str:
    """What to read when something did not come about."""
    logs = cluster.kubectl("logs", "-n", SYSTEM, "-l", "app.kubernetes.io/name=healthd-node", "--tail=20", "--prefix")
    return f"{leases(cluster)}\n{cluster.kubectl('get', 'pods', '-A', '-o', 'wide')}\n{logs}"


def running(cluster: Cluster, image: str, job: str, *command: str) -> dict[str, dict[str, Any]]:
    """Start a job; its pods by node once they are admitted and run, each with the lease of its node."""
    cluster.apply(gated(job, image, *(command or FOR_EVER)))

    def admitted() -> dict[str, dict[str, Any]]:
        found = pods(cluster, job)
        ready = len(found) == 2 and all(one["status"]["phase"] == "Running" for one in found.values())
        return found if ready and leases(cluster) == {node: workload(one) for node, one in found.items()} else {}

    return until(f"job {job} runs with its leases", admitted, 90.0, told=lambda: told(cluster))


def ends(cluster: Cluster, left: dict[str, str], within_seconds: float = WITHIN_SECONDS) -> None:
    """The leases come down to these in time."""
    began = time.monotonic()
    until(f"leases are {left}", lambda: leases(cluster) == left, within_seconds, told=lambda: told(cluster))
    print(f"leases ended after {time.monotonic() - began:.1f} s")


def delete(cluster: Cluster, job: str) -> None:
    cluster.kubectl("delete", "job", job, "-n", JOBS, "--wait=true", "--timeout=60s")
    ends(cluster, {})


def test_the_next_job_starts_on_the_nodes_of_one_that_has_completed(fleet: Cluster, image: str) -> None:
    fleet.apply(gated("train", image, "sleep", "5"))
    fleet.kubectl("wait", "--for=condition=complete", "job/train", "-n", JOBS, "--timeout=120s")
    ends(fleet, {})
    fleet.kubectl("delete", "job", "train", "-n", JOBS)
    running(fleet, image, "next")
    delete(fleet, "next")


@pytest.mark.nightly
def test_a_node_is_free_with_its_own_pod_and_a_container_that_starts_again_keeps_its(
    fleet: Cluster, image: str
) -> None:
    found = running(
        fleet, image, "two", "sh", "-c", "test -e /tmp/again || { touch /tmp/again; sleep 20; exit 1; }; sleep 1d"
    )
    held = leases(fleet)

    def restarted() -> bool:
        each = [one["status"]["containerStatuses"][0] for one in pods(fleet, "two").values()]
        return len(each) == 2 and all(one["restartCount"] >= 1 for one in each)

    until("both containers were started again", restarted, 90.0, told=lambda: told(fleet))
    time.sleep(WITHIN_SECONDS)  # longer than an end takes to be seen
    assert leases(fleet) == held
    first, second = sorted(found)
    # The Job would make it anew, elsewhere or there: not before this one is gone.
    fleet.kubectl("patch", "job", "two", "-n", JOBS, "-p", '{"spec":{"parallelism":1}}')
    left = until("one pod is left", lambda: pods(fleet, "two") if len(pods(fleet, "two")) == 1 else {})
    assert set(left) < {first, second}
    ends(fleet, {node: workload(pod) for node, pod in left.items()})
    delete(fleet, "two")


@pytest.mark.nightly
@pytest.mark.parametrize("away", ["daemons", "aggregator"])
def test_an_end_while_one_is_away_is_seen_once_it_is_back(fleet: Cluster, image: str, away: str) -> None:
    running(fleet, image, away)
    if away == "daemons":
        unfit = '{"spec":{"template":{"spec":{"nodeSelector":{"tests":"nowhere"}}}}}'
        fleet.kubectl("patch", "daemonset", "healthd-node", "-n", SYSTEM, "-p", unfit)
        until("no daemon is left", lambda: not fleet.pods(SYSTEM, "app.kubernetes.io/name=healthd-node"))
    else:
        fleet.kubectl("scale", "deployment", "healthd-aggregator", "-n", SYSTEM, "--replicas=0")
        until("no aggregator is left", lambda: not fleet.pods(SYSTEM, "app.kubernetes.io/name=healthd-aggregator"))
    fleet.kubectl("delete", "job", away, "-n", JOBS, "--wait=true", "--timeout=60s")
    if away == "daemons":
        fit = '[{"op":"remove","path":"/spec/template/spec/nodeSelector/tests"}]'
        fleet.kubectl("patch", "daemonset", "healthd-node", "-n", SYSTEM, "--type=json", "-p", fit)
    else:
        fleet.kubectl("scale", "deployment", "healthd-aggregator", "-n", SYSTEM, "--replicas=1")
    rolled_out(fleet)
    ends(fleet, {})
    running(fleet, image, "after")
    delete(fleet, "after")


@pytest.mark.nightly
def test_without_the_right_to_watch_pods_the_kubelet_tells_the_end(fleet: Cluster, image: str) -> None:
    rules = fleet.get("clusterrole", "healthd-node")["rules"]
    less = [rule for rule in rules if rule["resources"] != ["pods"]]
    assert len(less) == len(rules) - 1
    fleet.kubectl("patch", "clusterrole", "healthd-node", "--type=merge", "-p", json.dumps({"rules": less}))
    try:
        running(fleet, image, "blind")
        delete(fleet, "blind")
    finally:
        fleet.kubectl("patch", "clusterrole", "healthd-node", "--type=merge", "-p", json.dumps({"rules": rules}))
