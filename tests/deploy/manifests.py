"""Manifests as kustomize builds them, and the strict schemas of several versions of Kubernetes."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy/kubernetes"
VERSIONS = ("1.30", "1.33", "1.35", "1.37")
NEWEST = VERSIONS[-1:]
# Kinds that older versions do not have.
SINCE = {"MutatingAdmissionPolicy": NEWEST, "MutatingAdmissionPolicyBinding": NEWEST}
# Kinds that a server with their definitions takes in other tests: test_kueue.py, test_operators.py.
KUEUE = ("ResourceFlavor", "AdmissionCheck", "ClusterQueue", "LocalQueue")
TAKEN = {**dict.fromkeys(KUEUE, "kueue.x-k8s.io/v1beta2"), "TrainJob": "trainer.kubeflow.org/v1alpha1"}
# Where jobs of other operators have their pods: each is held against the schema of a pod.
JOBS = {"PyTorchJob", "MPIJob", "RayCluster", "JobSet", "TrainingRuntime"}
OTHERS = {"PodMonitor", "PrometheusRule", "NodeReadinessRule", "Certificate", "Cluster", *JOBS, *TAKEN}


@functools.cache
def kustomize(folder: Path) -> tuple[dict[str, Any], ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def built(overlay: str) -> tuple[dict[str, Any], ...]:
    return kustomize(KUBERNETES / "overlays" / overlay)


def the(items: tuple[dict[str, Any], ...], kind: str, name: str) -> dict[str, Any]:
    found = [
        item
        for item in items
        if item["kind"] == kind and re.fullmatch(f"{name}(-[a-z0-9]{{10}})?", item["metadata"]["name"])
    ]
    assert len(found) == 1, f"{kind} {name}: {[(i['kind'], i['metadata']['name']) for i in items]}"
    return found[0]


def pods(items: Any) -> Iterator[dict[str, Any]]:
    for item in items:
        if item["kind"] in ("DaemonSet", "Deployment", "StatefulSet", "Job"):
            yield item["spec"]["template"]["spec"]


def strictly(item: dict[str, Any]) -> None:
    if item["kind"] in OTHERS:
        other_kind(item)
    else:
        strictly_once(json.dumps(item))


@functools.cache
def strictly_once(text: str) -> None:
    """Most of it is the same in every overlay, and each look costs."""
    item = json.loads(text)
    for version in SINCE.get(item["kind"], VERSIONS):
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(
                f"{item['kind']} {item['metadata']['name']} in {version}: {error.message} at {list(error.path)}"
            )


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates inside of something."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "template":
                yield from list(templates(inner)) or [inner]  # that of a Job has that of its pods inside
            else:
                yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def other_kind(item: dict[str, Any]) -> None:
    """What operators of others would refuse or, worse, ignore: keys that do not exist, members that must."""
    spec = item["spec"]
    if item["kind"] in JOBS:
        found = list(templates(spec))
        assert found
        for number, template in enumerate(found):
            metadata = {"name": f"{item['metadata']['name']}-{number}", **template.get("metadata", {})}
            strictly({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    elif item["kind"] in TAKEN:
        assert item["apiVersion"] == TAKEN[item["kind"]]
    elif item["kind"] == "Certificate":
        assert item["apiVersion"] == "cert-manager.io/v1"
        assert set(spec) == {"secretName", "duration", "dnsNames", "issuerRef"}
        assert set(spec["issuerRef"]) == {"name", "kind", "group"}
    elif item["kind"] == "Cluster":
        assert item["apiVersion"] == "postgresql.cnpg.io/v1"
        assert set(spec) <= {"instances", "bootstrap", "postgresql", "affinity", "storage"}
    elif item["kind"] == "PodMonitor":
        assert set(spec) <= {"selector", "jobLabel", "podMetricsEndpoints", "attachMetadata", "podTargetLabels"}
        for endpoint in spec["podMetricsEndpoints"]:
            known = {"port", "path", "scheme", "interval", "honorLabels", "relabelings", "authorization", "tlsConfig"}
            assert set(endpoint) <= known
            for rule in endpoint.get("relabelings", ()):
                assert set(rule) <= {"sourceLabels", "targetLabel", "regex", "replacement", "action"}
    elif item["kind"] == "PrometheusRule":
        assert set(spec) == {"groups"}
        names = [group["name"] for group in spec["groups"]]
        assert names
        assert len(names) == len(set(names))
        for group in spec["groups"]:
            assert set(group) <= {"name", "interval", "rules"}
            for rule in group["rules"]:
                assert ("alert" in rule) != ("record" in rule)
                assert set(rule) <= {"alert", "record", "expr", "for", "keep_firing_for", "labels", "annotations"}
    else:
        assert item["apiVersion"] == "readiness.node.x-k8s.io/v1alpha1"
        assert set(spec) <= {
            "nodeSelector",
            "conditions",
            "conditionPolicy",
            "taint",
            "enforcementMode",
            "dryRun",
        }
        assert spec["nodeSelector"]["matchLabels"]
        assert spec["taint"]["key"].startswith("readiness.k8s.io/")
        assert all(one["requiredStatus"] in ("True", "False", "Unknown") for one in spec["conditions"])
