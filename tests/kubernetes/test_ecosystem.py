"""Recipes for programs of others, as far as a real API server can try them: their expressions over our condition."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES
from tests.kubernetes.kit import CONDITION, Cluster, until

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

NAME = "tests-predicate"


def node(name: str, *conditions: tuple[str, str]) -> dict[str, Any]:
    told = [{"type": kind, "status": status, "reason": "Test", "message": ""} for kind, status in conditions]
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": told}}


def policy(expression: str) -> list[dict[str, Any]]:
    """The API server's own CEL refuses the nodes of which the expression is true."""
    group = "admissionregistration.k8s.io"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nodes"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": f"!({expression})", "message": "the predicate is true"}],
    }
    kind = "ValidatingAdmissionPolicy"
    binding = {"policyName": NAME, "validationActions": ["Deny"]}
    return [
        {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": NAME}, "spec": spec},
        {"apiVersion": f"{group}/v1", "kind": f"{kind}Binding", "metadata": {"name": NAME}, "spec": binding},
    ]


def test_predicate_for_nvsentinel_is_true_of_nodes_that_are_not_fit_and_of_no_others(oldest: Cluster) -> None:
    values = yaml.safe_load((KUBERNETES / "nvsentinel-values.yaml").read_text(encoding="utf-8"))
    (one,) = values["kubernetes-object-monitor"]["policies"]
    assert one["healthEvent"]["processingStrategy"] == "STORE_ONLY", "0 and no word are taken for 'remediate'"
    expression = re.sub(r"\bresource\.", "object.", one["predicate"]["expression"]).strip()
    items = policy(expression)
    oldest.apply(*items)
    nodes = [
        node("not-fit", ("Ready", "True"), (CONDITION, "False")),
        node("fit", ("Ready", "True"), (CONDITION, "True")),
        node("unknown", (CONDITION, "Unknown")),
        node("without", ("Ready", "False")),
        node("other", ("healthd.internal/Other", "False")),
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})

    def refused() -> set[str]:
        told = oldest.kubectl("create", "--dry-run=server", "-f", "-", text=text, wrong=None)
        lines = [line for line in told.splitlines() if "the predicate is true" in line]
        return {found[1] for line in lines if (found := re.search(r'nodes "([a-z-]+)" is', line))}

    try:
        until("the policy is in force", refused)
        assert refused() == {"not-fit"}
    finally:
        oldest.kubectl("delete", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
