"""What the tests of kubernetes, and those beside them, are made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthd.cli.settings.tree import Settings
from healthd.core.config import load
from tests.deploy.manifests import built, the

OVERLAYS = [f"{kind}/{profile}" for kind in ("eks-neuron", "eks-gpu", "cpu") for profile in ("observe", "active")]


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
