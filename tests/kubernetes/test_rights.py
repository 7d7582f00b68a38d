"""What each service account may do: what the code does, and nothing else of a long list."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kubernetes.kit import SYSTEM, Cluster
from tests.kubernetes.overlays_kit import own

pytestmark = pytest.mark.kubernetes

KUEUE = ("admissionchecks", "clusterqueues", "resourceflavors", "workloads")
# Verb and resource, as `group/resource/subresource`; what a thief of the account's token would want is among them.
ASKED = [
    *((verb, "/nodes") for verb in ("get", "list", "watch", "patch", "update", "create", "delete", "deletecollection")),
    *((verb, "/nodes/status") for verb in ("get", "patch", "update")),
    *((verb, "/nodes/proxy") for verb in ("get", "create")),
    *((verb, "/pods") for verb in ("get", "list", "watch", "create", "delete", "patch")),
    *((verb, f"/pods/{part}") for verb, part in (("create", "exec"), ("get", "log"), ("create", "eviction"))),
    *((verb, "/secrets") for verb in ("get", "list", "watch", "create", "delete")),
    *((verb, "/configmaps") for verb in ("get", "list", "create", "patch")),
    *((verb, "/events") for verb in ("get", "list", "create", "patch", "delete")),
    *((verb, "/serviceaccounts") for verb in ("get", "impersonate")),
    *((verb, "/serviceaccounts/token") for verb in ("create",)),
    *((verb, "/persistentvolumes") for verb in ("get", "delete")),
    *((verb, "/namespaces") for verb in ("list", "delete")),
    *((verb, "apps/daemonsets") for verb in ("get", "list", "patch", "delete")),
    *((verb, "apps/deployments") for verb in ("get", "patch")),
    *((verb, "batch/jobs") for verb in ("list", "create", "patch", "delete")),
    *((verb, "coordination.k8s.io/leases") for verb in ("get", "update")),
    *((verb, "rbac.authorization.k8s.io/clusterroles") for verb in ("bind", "escalate", "patch")),
    *((verb, "rbac.authorization.k8s.io/clusterrolebindings") for verb in ("create", "patch")),
    *((verb, "authentication.k8s.io/tokenreviews") for verb in ("create",)),
    *((verb, "resource.k8s.io/resourceslices") for verb in ("list", "create", "patch", "update", "delete")),
    *((verb, "resource.k8s.io/devicetaintrules") for verb in ("list", "create", "patch", "update", "delete")),
    *((verb, "resource.k8s.io/resourceclaims") for verb in ("list", "patch", "delete")),
    *((verb, f"kueue.x-k8s.io/{kind}") for kind in KUEUE for verb in ("list", "watch", "create", "patch", "delete")),
    *((verb, f"kueue.x-k8s.io/{kind}/status") for kind in KUEUE for verb in ("patch", "update")),
]
MAY = {
    "healthd-node": {
        *(("get", "/nodes"), ("patch", "/nodes/status"), ("create", "/events")),
        *(("list", "/pods"), ("watch", "/pods"), ("list", "/nodes"), ("watch", "/nodes")),
    },
    "healthd-aggregator": {
        *(("get", "/nodes"), ("list", "/nodes"), ("patch", "/nodes")),
        ("create", "authentication.k8s.io/tokenreviews"),
        ("list", "resource.k8s.io/resourceslices"),
        *((verb, "resource.k8s.io/devicetaintrules") for verb in ("list", "create", "patch", "delete")),
    },
    "healthd-kueue": {
        *(("get", "/nodes"), ("list", "/nodes"), ("patch", "/nodes"), ("list", "/pods")),
        *((verb, f"kueue.x-k8s.io/{kind}") for kind in KUEUE if kind != "clusterqueues" for verb in ("list", "watch")),
        *(("patch", "kueue.x-k8s.io/admissionchecks/status"), ("patch", "kueue.x-k8s.io/workloads/status")),
    },
    "healthd-admin": set[tuple[str, str]](),
    "healthd-uninstall": {
        *(("get", "/nodes"), ("list", "/nodes"), ("patch", "/nodes")),
        *(("patch", "/nodes/status"), ("list", "/pods")),
        *((verb, "resource.k8s.io/devicetaintrules") for verb in ("list", "delete")),
    },
}


def allowed(cluster: Cluster, account: str, asked: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Which of these the server would allow the account, in a namespace of others."""
    questions = list(asked)
    items = []
    for verb, resource in questions:
        group, _, rest = resource.partition("/")
        name, _, part = rest.partition("/")
        attributes = {"verb": verb, "group": group, "resource": name, "subresource": part, "namespace": "default"}
        user = f"system:serviceaccount:{SYSTEM}:{account}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"]
        items.append(
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
            }
        )
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    words = ("create", "-f", "-", "-o", "jsonpath={.status.allowed}{'\\n'}")
    answers = cluster.kubectl(*words, text=text).split()
    return {asked for asked, answer in zip(questions, answers, strict=True) if answer == "true"}


def test_accounts_may_do_what_the_code_does_and_nothing_else(oldest: Cluster, tmp_path: Path) -> None:
    assert len(ASKED) >= 40
    image = "registry.example.com/healthd:0.1.0"
    components = ("actuator", "device-taints", "kueue")
    folders = [own(tmp_path / "all", image, "overlays/cpu/active", *components), "deploy/kubernetes/uninstall"]
    lasting = "deploy/kubernetes/overlays/cpu/lasting"
    oldest.kubectl("apply", "--server-side", "-k", lasting)
    try:
        for folder in folders:
            oldest.kubectl("apply", "--server-side", "-k", folder)
        for account, may in MAY.items():
            assert allowed(oldest, account, ASKED) == may, account
        assert allowed(oldest, "default", ASKED) == set(), "the accounts of the namespace have no rights besides"
        for folder in folders:
            oldest.kubectl("delete", "-k", folder)
        for account in MAY:
            assert allowed(oldest, account, ASKED) == set(), f"{account}: what was applied is gone"
    finally:
        oldest.kubectl("delete", "-k", lasting, "--ignore-not-found", "--timeout=120s")
