"""Stories with the real Kueue: what it does with the states that are written, and what becomes of the nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.integrations.kueue.kueue_random import random_minutes
from tests.integrations.kueue.site_kit import PLACED, PLAIN, KueueSite, created, moment, site, slow_to_end
from tests.kubernetes.jobs_kit import FOR_EVER, JOBS, node_of
from tests.kubernetes.kit import SYSTEM, Cluster, until
from tests.kubernetes.site_kit import STORY_SECONDS

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

NODES = 3


@pytest.fixture(scope="module", name="kueue")
def _kueue(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueSite]:
    with site(cluster, image, tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest.fixture(autouse=True)
def empty_again(kueue: KueueSite) -> Iterator[None]:
    yield
    kueue.empty()
    kueue.healthy()


def note(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s")


def test_a_job_is_admitted_and_its_nodes_are_free_once_it_has_ended(kueue: KueueSite) -> None:
    kueue.submit("train", NODES)
    kueue.admitted("train")
    workload = kueue.workload("train")
    note("admission", moment(workload, "Admitted") - created(workload))
    nodes = set(kueue.runs("train", NODES).values()) if not kueue.ended("train") else set()
    assert not nodes or set(kueue.leases()) == nodes
    kueue.completes("train")
    began = time.time()
    kueue.free()
    note("release", time.time() - began)
    marked = kueue.cluster.items("nodes", "-l", "healthd.internal/gate")
    assert not marked


def pods_apart(kueue: KueueSite, *jobs: str) -> None:
    """No node has pods of two jobs that have not ended."""
    on: dict[str, set[str]] = {}
    for pod in kueue.cluster.items("pods", "-n", JOBS):
        if pod["status"]["phase"] in ("Pending", "Running") and (node := node_of(pod)):
            on.setdefault(node, set()).add(pod["metadata"]["labels"]["job-name"])
    assert all(len(names) == 1 for names in on.values()), on
    assert jobs


def test_preempted_pods_keep_their_nodes_until_they_have_ended(kueue: KueueSite) -> None:
    kueue.submit("low", NODES, command=slow_to_end(10), grace_seconds=60)
    kueue.runs("low", NODES)
    kueue.submit("high", NODES, command=FOR_EVER, urgent=True)
    began = time.time()
    until("it is preempted", lambda: not kueue.holds("low", "Admitted"), STORY_SECONDS, told=kueue.told)
    note("preemption", time.time() - began)
    kueue.says("high", "node-1: pods of job", "low", "are still ending")
    assert kueue.pods("low", gone=True)
    while not kueue.holds("high", "Admitted"):
        pods_apart(kueue, "low", "high")
        assert time.time() - began < STORY_SECONDS, kueue.told()
    note("admission after the preemption", time.time() - began)
    running = [one for one in kueue.pods("low", gone=True) if one["status"]["phase"] not in ("Failed", "Succeeded")]
    assert not running
    kueue.runs("high", NODES)


def test_a_bad_node_rejects_a_job_and_it_starts_once_the_node_is_healthy(kueue: KueueSite) -> None:
    kueue.fault("node-2")
    kueue.submit("train", NODES)
    until("it is rejected", lambda: kueue.state("train").get("state") == "Retry", STORY_SECONDS, told=kueue.told)
    kueue.says("train", "node-2")
    assert not kueue.holds("train", "Admitted")
    cleared = kueue.fault("node-2", clear=True)
    kueue.admitted("train")
    note("admission after the fault was cleared", time.time() - cleared)
    kueue.completes("train")


@pytest.mark.nightly
@pytest.mark.parametrize("local_queue", [PLAIN, PLACED])
def test_a_job_whose_node_turns_bad_goes_on_elsewhere(kueue: KueueSite, local_queue: str) -> None:
    kueue.submit("train", NODES - 1, command=FOR_EVER, local_queue=local_queue)
    before = kueue.runs("train", NODES - 1)
    bad = min(before.values())
    began = kueue.fault(bad)
    good = set(kueue.cluster.nodes()) - {bad}

    def moved() -> bool:
        found = [one for one in kueue.pods("train") if one["metadata"]["name"] not in before]
        return len(found) == NODES - 1 and {node_of(one) for one in found} == good

    until("new pods are on the other nodes", moved, STORY_SECONDS, told=kueue.told)
    note(f"from the fault to the new pods ({local_queue})", time.time() - began)
    kueue.runs("train", NODES - 1)


@pytest.mark.nightly
def test_a_job_that_is_evicted_when_all_its_pods_have_succeeded_completes(kueue: KueueSite) -> None:
    """The Job controller is down meanwhile, so that the Job does not complete before Kueue evicts it."""
    cluster = kueue.cluster
    kueue.submit("done", 2, command=("sleep", "8"))
    kueue.runs("done", 2)
    name = kueue.workload("done")["metadata"]["name"]
    with cluster.down("kube-controller-manager"):
        until(
            "its pods have succeeded",
            lambda: [one["status"]["phase"] for one in kueue.pods("done")] == ["Succeeded"] * 2,
            STORY_SECONDS,
        )
        status = '{"status": {"succeeded": 2, "active": 0, "ready": 0, "completedIndexes": "0,1"}}'
        cluster.kubectl("patch", "job", "done", "-n", JOBS, "--subresource=status", "--type=merge", "-p", status)
        until("Kueue counts them", lambda: kueue.workload("done")["status"].get("reclaimablePods"), STORY_SECONDS)
        active = ("patch", "workloads.kueue.x-k8s.io", name, "-n", JOBS, "--type=merge", "-p")
        cluster.kubectl(*active, '{"spec": {"active": false}}')
        until("it has lost its quota", lambda: not kueue.holds("done", "QuotaReserved"), STORY_SECONDS, told=kueue.told)
        cluster.kubectl(*active, '{"spec": {"active": true}}')
        kueue.admitted("done")
        assert "nothing to check" in kueue.state("done")["message"]
    kueue.completes("done")


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["healthd-kueue", "healthd-aggregator", "kueue"])
def test_whoever_is_killed_no_job_is_lost(kueue: KueueSite, killed: str) -> None:
    kueue.submit("first", 2, command=("sleep", "15"))
    kueue.runs("first", 2)
    kueue.submit("second", 2)
    namespace = "kueue-system" if killed == "kueue" else SYSTEM
    kueue.cluster.kubectl(
        *("delete", "pod", "-n", namespace, "-l", f"app.kubernetes.io/name={killed}", "--grace-period=0", "--force")
    )
    kueue.completes("first")
    kueue.completes("second")
    until("every node is free", lambda: not kueue.leases(), STORY_SECONDS, told=kueue.told)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("local_queue", [PLAIN, PLACED])
def test_minutes_of_random_jobs_faults_and_kills(kueue: KueueSite, local_queue: str) -> None:
    """TESTS_RANDOM_MINUTES and TESTS_RANDOM_SEED choose others."""
    minutes = float(os.environ.get("TESTS_RANDOM_MINUTES", "5"))
    seed = int(os.environ.get("TESTS_RANDOM_SEED", "1"))
    assert random_minutes(kueue, seed, 60.0 * minutes, local_queue).wrong == []
