"""
The chart as administrators use it: install, upgrade from the one before, roll back, uninstall, install again; where
namespaces enforce Pod Security; and what it says.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.kubernetes.chart_kit import rolled_out
from tests.kubernetes.kit import CHART, KEY, SYSTEM, Cluster, secrets, traces, until, values

pytestmark = pytest.mark.kubernetes


def described(cluster: Cluster) -> str:
    return cluster.kubectl("describe", "pods", "-n", SYSTEM)[-4000:] + cluster.kubectl("get", "events", "-A")[-2000:]


def ready(cluster: Cluster) -> None:
    """All pods run in the newest version, and every node's condition is good."""
    rolled_out(cluster)
    want = set(cluster.nodes())
    until(
        "every node is fit",
        lambda: set(cluster.conditions()) == want and set(cluster.conditions().values()) == {"True"},
    )


def left_of_release(cluster: Cluster) -> set[str]:
    """Objects that the chart made and that are still there."""
    kinds = (
        "all,configmaps,persistentvolumeclaims,serviceaccounts,networkpolicies,roles,rolebindings,poddisruptionbudgets"
    )
    chart = ("-l", "helm.sh/chart")
    items = [*cluster.items(kinds, "-n", SYSTEM, *chart), *cluster.items("clusterroles,clusterrolebindings", *chart)]
    return {f"{item['kind']} {item['metadata']['name']}" for item in items}


def chart_before(folder: Path) -> Path:
    """The chart as it was before its newest change."""
    log = ["git", "log", "--format=%H", "-n", "2", "--", "deploy/helm/healthd"]
    done = subprocess.run(log, capture_output=True, text=True, cwd=ROOT, check=False)
    commits = done.stdout.split()
    if done.returncode or len(commits) < 2:
        pytest.skip("needs git and the commit before the chart's newest change")
    archive = subprocess.run(["git", "archive", commits[1], "deploy"], capture_output=True, cwd=ROOT, check=True)
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "deploy/helm/healthd"


@pytest.mark.nightly
def test_release_lives_and_leaves_nothing_but_its_volume(
    cluster: Cluster, image: str, system: Path, tmp_path: Path
) -> None:
    """From the chart before, with other values then, back, and away; after that the next one starts at once."""
    cluster.helm("install", "healthd", chart_before(tmp_path / "before"), "-n", SYSTEM, *values(image))
    ready(cluster)

    changed = {
        "aggregator.settings.HEALTHD_ACTUATOR_MODE": "act",
        "aggregator.settings.HEALTHD_POLICY_MODE": "enforce",
        "actuator.enabled": "true",
        "node.podLabels.team": "platform",
        "node.updateStrategy.rollingUpdate.maxUnavailable": "100%",
    }
    cluster.helm("upgrade", "healthd", CHART, "-n", SYSTEM, *values(image, **changed))
    ready(cluster)
    assert cluster.pods(SYSTEM, "team=platform")
    bad = cluster.nodes()[0]
    cluster.fleet(system, "quarantine", bad, "--reason", "smells of smoke", "--unseen")
    until("the node is tainted", lambda: f"{bad}: taint {KEY}" in traces(cluster), told=lambda: described(cluster))
    until("its condition is False", lambda: cluster.conditions()[bad] == "False")

    cluster.helm("rollback", "healthd", "1", "-n", SYSTEM)
    rolled_out(cluster)
    assert not cluster.pods(SYSTEM, "team=platform")
    cluster.helm("rollback", "healthd", "2", "-n", SYSTEM)

    cluster.helm("uninstall", "healthd", "-n", SYSTEM)
    assert traces(cluster) == []
    assert left_of_release(cluster) == {"PersistentVolumeClaim healthd-aggregator"}

    cluster.helm("install", "healthd", CHART, "-n", SYSTEM, *values(image))
    rolled_out(cluster)
    until("the volume knows that it is quarantined", lambda: cluster.conditions().get(bad) == "False")
    cluster.fleet(system, "release", bad, "--reason", "was a candle")
    ready(cluster)

    cluster.helm("uninstall", "healthd", "-n", SYSTEM)
    cluster.kubectl("delete", "pvc", "healthd-aggregator", "-n", SYSTEM)
    cluster.free_volumes()
    cluster.helm("install", "healthd", CHART, "-n", SYSTEM, *values(image))
    ready(cluster)
    told = cluster.fleet(system, "status", "--json")
    assert re.search(r'"recovering": ?null', told), "a new volume on nodes that knew another one holds nobody"


@pytest.mark.nightly
def test_two_releases_where_the_namespaces_enforce_pod_security(cluster: Cluster, image: str, tmp_path: Path) -> None:
    """The aggregator under `restricted`, the node daemon under `privileged`, as the guide says; not the other way."""
    level = "pod-security.kubernetes.io/enforce"
    with (
        cluster.namespace("tests-restricted", {level: "restricted"}),
        cluster.namespace("tests-privileged", {level: "privileged"}),
    ):
        folder = secrets(cluster, tmp_path / "secrets", "tests-restricted")
        secrets_of_nodes(cluster, folder, "tests-privileged")
        given = values(image, **{"node.enabled": "false", "callers.nodes[0]": "tests-privileged/healthd-node"})
        cluster.helm("install", "healthd", CHART, "-n", "tests-restricted", *given)
        url = "https://healthd-aggregator.tests-restricted.svc:8090"
        given = values(image, **{"aggregator.enabled": "false", "node.aggregator": url})
        cluster.helm("install", "healthd", CHART, "-n", "tests-privileged", *given)
        cluster.kubectl(
            "rollout", "status", "deployment/healthd-aggregator", "-n", "tests-restricted", "--timeout=180s"
        )
        cluster.kubectl("rollout", "status", "daemonset/healthd-node", "-n", "tests-privileged", "--timeout=180s")
        until("all are fit", lambda: set(cluster.conditions()) == set(cluster.nodes()))
        cluster.helm("uninstall", "healthd", "-n", "tests-privileged")
        cluster.helm("uninstall", "healthd", "-n", "tests-restricted")
        assert traces(cluster) == []
        cluster.helm(
            "install", "wrong", CHART, "-n", "tests-restricted", *values(image, **{"aggregator.enabled": "false"})
        )
        until(
            "the node daemon is refused there",
            lambda: "violates PodSecurity" in cluster.kubectl("get", "events", "-n", "tests-restricted"),
        )
        cluster.helm("uninstall", "wrong", "-n", "tests-restricted")


def secrets_of_nodes(cluster: Cluster, folder: Path, namespace: str) -> None:
    """What the node daemons need in a namespace of their own: the same CA."""
    words = ("create", "secret", "generic", "healthd-aggregator-tls", f"--from-file=ca.crt={folder / 'ca.pem'}")
    cluster.kubectl(*words, "-n", namespace)


def test_notes_name_what_the_pods_wait_for_and_the_image_of_the_profile(cluster: Cluster) -> None:
    def notes(**more: str) -> str:
        words = (
            "install",
            "x",
            CHART,
            "--dry-run=client",
            "-n",
            "ns",
            *values("registry.example.com/healthd:0.1.0", **more),
        )
        return cluster.helm(*words).partition("\nNOTES:\n")[2]

    alone = notes(**{"platform": "eks-neuron", "profile": "active", "aggregator.enabled": "false"})
    assert "healthd-aggregator-tls:" in alone.split()
    assert "healthd-tokens" not in alone
    assert "callers.nodes" in alone
    assert "registry.example.com/healthd-torch:0.1.0" in alone
    assert "set node.aggregator" in alone
    whole = notes()
    assert "healthd-tokens" not in whole
    assert "healthd-tokens" in notes(**{"secrets.tokens": "healthd-tokens"})
    assert "create token healthd-admin --audience healthd" in whole
    assert "healthd-torch" not in whole
    assert "pod-security" not in notes(**{"node.enabled": "false"})
    enforced = {"aggregator.settings.HEALTHD_POLICY_MODE": "enforce"}
    reads = {
        "aggregator.settings.HEALTHD_POLICY_TIER": "passive",
        "aggregator.settings.HEALTHD_POLICY_COLLECTIVE": "off",
    }
    assert "WARNING" not in whole
    assert "Use the profile active" in notes(**enforced)
    assert "WARNING" not in notes(**enforced, **reads)
    assert "WARNING" not in notes(**enforced, profile="active")
