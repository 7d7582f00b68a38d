"""The overlays as the guide applies them: taken by the server without a difference, and away without a trace."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT
from tests.kubernetes.kit import IMAGE, SYSTEM, Cluster, traces, until
from tests.kubernetes.operators_kit import DEFINITIONS
from tests.kubernetes.overlays_kit import own

pytestmark = pytest.mark.kubernetes

PLATFORMS = ("cpu", "eks-gpu", "eks-neuron")
COMPONENTS = ("actuator", "device-taints", "accelerated-hardware-ready")


VERSIONS = ["cluster", pytest.param("oldest", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_overlay_is_taken_and_compares_without_a_difference(
    request: pytest.FixtureRequest, version: str, platform: str, tmp_path: Path
) -> None:
    """One profile over the other, too, with the components that are off by default."""
    cluster: Cluster = request.getfixturevalue(version)
    lasting = f"deploy/kubernetes/overlays/{platform}/lasting"
    try:
        cluster.kubectl("apply", "--server-side", "-k", lasting)
        active = own(tmp_path / "active", IMAGE, f"overlays/{platform}/active", *COMPONENTS)
        for folder in (f"deploy/kubernetes/overlays/{platform}/observe", active):
            cluster.kubectl("apply", "--server-side", "-k", folder)
            assert cluster.kubectl("diff", "--server-side", "-k", folder) == ""
        cluster.kubectl("delete", "-k", active)
        assert cluster.kubectl("diff", "--server-side", "-k", lasting) == ""
        assert cluster.get("pvc", "healthd-aggregator", "-n", SYSTEM)
    finally:
        cluster.kubectl("delete", "configmaps,serviceaccounts", "-n", SYSTEM, "-l", "!none", "--ignore-not-found")
        cluster.kubectl("delete", "-k", lasting, "--ignore-not-found", "--timeout=120s")
        cluster.free_volumes()


@pytest.mark.nightly
def test_overlay_runs_and_its_deletion_leaves_secrets_and_history(
    cluster: Cluster, image: str, system: Path, tmp_path: Path
) -> None:
    cluster.kubectl("apply", "--server-side", "-k", "deploy/kubernetes/overlays/cpu/lasting", "--force-conflicts")
    folder = own(tmp_path / "own", image, "overlays/cpu/observe")
    cluster.kubectl("apply", "--server-side", "-k", folder)
    for kind in ("deployment/healthd-aggregator", "daemonset/healthd-node"):
        cluster.kubectl("rollout", "status", kind, "-n", SYSTEM, "--timeout=300s")
    until("every node has its condition", lambda: set(cluster.conditions()) == set(cluster.nodes()))

    cluster.kubectl("delete", "-k", folder)
    uninstall = own(tmp_path / "uninstall", image, "uninstall")
    cluster.kubectl("apply", "-k", uninstall)
    words = ("wait", "--for=condition=complete", "--timeout=4m", "job/healthd-uninstall", "-n", SYSTEM)
    cluster.kubectl(*words)
    cluster.kubectl("delete", "-k", uninstall)
    assert traces(cluster) == []
    assert cluster.get("secret", "healthd-aggregator-tls", "-n", SYSTEM)
    assert cluster.get("pvc", "healthd-aggregator", "-n", SYSTEM)["status"]["phase"] == "Bound"
    left = {f"{item['kind']} {item['metadata']['name']}" for item in cluster.items("all,networkpolicies", "-n", SYSTEM)}
    assert left <= {"ReplicaSet", "Pod"} or not left, left


@pytest.mark.parametrize("version", VERSIONS)
def test_examples_are_taken_by_the_server(request: pytest.FixtureRequest, version: str) -> None:
    server: Cluster = request.getfixturevalue(version)
    with server.namespace(SYSTEM):
        dry = ("apply", "--server-side", "--dry-run=server")
        server.kubectl(*dry, "-k", "deploy/kubernetes/examples/second-pool")
        for name in ("gated-job", "preflight-job"):
            server.kubectl(*dry, "-f", ROOT / f"deploy/kubernetes/examples/{name}.yaml")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_example_of_another_operator_is_taken_and_a_slip_in_it_is_not(oldest: Cluster, name: str) -> None:
    """By what the operator's kind has; no operator runs it."""
    definition = DEFINITIONS[name]
    kind = f"crd/{definition['metadata']['name']}"
    oldest.apply(definition)
    try:
        oldest.kubectl("wait", "--for=condition=Established", "--timeout=60s", kind)
        plural = definition["spec"]["names"]["plural"]
        until("the kind is served", lambda: plural in oldest.kubectl("api-resources"))
        text = (ROOT / f"deploy/kubernetes/examples/{name}.yaml").read_text(encoding="utf-8")
        dry = ("apply", "--server-side", "--dry-run=server", "-f", "-")
        assert plural.removesuffix("s") in oldest.kubectl(*dry, text=text)
        wrong = re.sub(r"\breplicas: ", "replica: ", text, count=1)
        assert wrong != text
        assert "replica" in oldest.kubectl(*dry, text=wrong, wrong=True)
    finally:
        oldest.kubectl("delete", kind)


def test_rule_of_the_readiness_controller_is_taken_by_its_definition(oldest: Cluster) -> None:
    """TESTS_CRDS names a folder with the definitions that projects publish, by their kubebuilder names."""
    folder = os.environ.get("TESTS_CRDS")
    if not folder:
        pytest.skip("TESTS_CRDS names no folder with readiness.node.x-k8s.io_nodereadinessrules.yaml")
    definition = Path(folder) / "readiness.node.x-k8s.io_nodereadinessrules.yaml"
    oldest.kubectl("apply", "--server-side", "-f", definition)
    name = "crd/nodereadinessrules.readiness.node.x-k8s.io"
    oldest.kubectl("wait", "--for=condition=Established", "--timeout=60s", name)
    rule = ROOT / "deploy/kubernetes/readiness-rule.yaml"
    until("the kind is served", lambda: "nodereadinessrules" in oldest.kubectl("api-resources"))
    oldest.kubectl("apply", "--server-side", "-f", rule)
    assert oldest.kubectl("diff", "--server-side", "-f", rule) == ""
    wrong = rule.read_text().replace("requiredStatus", "wantedStatus")
    assert "wantedStatus" in oldest.kubectl("apply", "--server-side", "-f", "-", text=wrong, wrong=True)
