"""
Kubernetes Events of a node: what `kubectl describe node` and `kubectl get events` say befell it. Pure.

Unverified on a cluster: the object is what the API's documentation says, and refers to the node as the kubelet's does.
"""

from __future__ import annotations

NEEDS_EVENTS = "create on events"
PATH = "/api/v1/namespaces/default/events"
"""Of objects without a namespace, such as nodes."""


def event(node: str, *, status: str, reason: str, message: str, now: str) -> dict[str, object]:
    """The Event of a condition whose status or reason is another now; `now` as Kubernetes writes times."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        # The kubelet gives its events the node's name as uid, and `kubectl describe node` looks for that.
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "type": "Normal" if status == "True" else "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "healthd", "host": node},
        "reportingComponent": "healthd",
        "reportingInstance": node,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
