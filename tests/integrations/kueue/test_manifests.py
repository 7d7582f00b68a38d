"""`healthd kueue` in deploy/kubernetes: its rights, its account, and settings that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.cli.settings.tree import Settings
from healthd.core.config import load
from healthd.integrations.kueue.cluster import FOLLOWED
from healthd.integrations.kueue.settings import KueueSettings
from tests.deploy.kubernetes_kit import assert_bound, projected, rights, with_all_components
from tests.deploy.manifests import the

pytestmark = pytest.mark.system("kubectl")

NAME = "healthd-kueue"


def test_component_gives_the_rights_that_the_code_uses_and_the_settings_that_it_reads(tmp_path: Path) -> None:
    built = with_all_components(tmp_path)
    listed = {f"{verb} on {kind}.kueue.x-k8s.io" for kind in FOLLOWED for verb in ("list", "watch")}
    written = {f"patch on {kind}/status.kueue.x-k8s.io" for kind in ("admissionchecks", "workloads")}
    nodes = {f"{verb} on nodes" for verb in ("get", "list", "patch")}
    assert rights(built, NAME) == {*nodes, "list on pods", "get on namespaces", *listed, *written}
    assert_bound(built, NAME, NAME)
    controller = the(built, "Deployment", NAME)["spec"]["template"]["spec"]
    aggregator = the(built, "ConfigMap", "healthd-aggregator")["data"]
    named = aggregator["HEALTHD_AGGREGATOR_KUBERNETES_CONTROLLERS"]
    assert named == f"healthd-system/{controller['serviceAccountName']}"
    assert projected(controller)["audience"] == aggregator["HEALTHD_AGGREGATOR_KUBERNETES_AUDIENCE"]
    (container,) = controller["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    defaults = {"node.name": "x", "node.state_dir": Path("/x"), "node.run_dir": Path("/x")}
    settings = load(Settings, file=None, environ=environ, arguments={}, sections=("kueue",), defaults=defaults)
    asks = settings.of("kueue", KueueSettings)
    assert asks.aggregator == "https://healthd-aggregator.healthd-system.svc:8090"
    assert {str(asks.token_file), str(asks.ca_file)} == {"/etc/healthd/token/token", "/etc/healthd/ca/ca.crt"}
