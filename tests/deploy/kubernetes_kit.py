"""What the tests of kubernetes, and those beside them, are made with."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from healthd.cli.settings.tree import Settings
from healthd.core.config import load
from tests.deploy.manifests import KUBERNETES, built, kustomize, the

OVERLAYS = [f"{kind}/{profile}" for kind in ("eks-neuron", "eks-gpu", "cpu") for profile in ("observe", "active")]


COMPONENTS = (
    *("monitoring", "actuator", "device-taints", "accelerated-hardware-ready"),
    *("ungated-jobs-deny", "gate-injection", "kueue"),
)


def with_all_components(folder: Path) -> tuple[dict[str, Any], ...]:
    """An overlay of a user's own with all components, written to `folder` and built."""
    path = functools.partial(os.path.relpath, start=folder.resolve())
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "healthd-system",
        "resources": [path(KUBERNETES / "overlays/eks-neuron/active")],
        "components": [path(KUBERNETES / "components" / name) for name in COMPONENTS],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return kustomize(folder.resolve())


def rights(items: tuple[dict[str, Any], ...], name: str) -> set[str]:
    """What a ClusterRole allows, as `verb on resource`."""
    return {
        f"{verb} on {'.'.join(filter(None, (resource, group)))}"
        for rule in the(items, "ClusterRole", name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def assert_bound(items: tuple[dict[str, Any], ...], name: str, account: str) -> None:
    """A ClusterRole is bound to a service account that exists, and to no other."""
    binding = the(items, "ClusterRoleBinding", name)
    assert binding["roleRef"]["name"] == name
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "healthd-system"}]
    the(items, "ServiceAccount", account)


def projected(pod: dict[str, Any]) -> dict[str, Any]:
    """The token of its service account that a pod has projected into it."""
    sources = [source for volume in pod["volumes"] for source in volume.get("projected", {}).get("sources", ())]
    (found,) = [source["serviceAccountToken"] for source in sources if "serviceAccountToken" in source]
    assert isinstance(found, dict)
    return found


def node_pod(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = the(built(overlay), "DaemonSet", "healthd-node")["spec"]["template"]["spec"]
    return spec


def of_config_map(overlay: str, name: str, items: tuple[dict[str, Any], ...] | None = None) -> Settings:
    """The settings that healthd makes of the variables; an unknown one is an error."""
    data: Mapping[str, str] = the(items or built(overlay), "ConfigMap", name)["data"]
    return load(
        Settings,
        file=None,
        environ=data,
        arguments={},
        sections=("node", "probe"),
        defaults={"node.name": "n1", "node.state_dir": Path("/x"), "node.run_dir": Path("/x")},
    )
