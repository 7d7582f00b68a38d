"""
The real Kueue in the tests' cluster, with the chart beside it: queues, Jobs, faults, and what became of them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.kueue import player
from tests.kubernetes.chart_kit import gating
from tests.kubernetes.jobs_kit import JOBS
from tests.kubernetes.kit import SYSTEM, Cluster, until
from tests.kubernetes.site_kit import STORY_SECONDS, Site, installed, operators

KUEUE = "kueue.x-k8s.io/v1beta2"
GATE = "healthd.internal/gate"
PLAIN, PLACED = "plain", "placed"
"""The queues: without, and with topology-aware scheduling."""
SETTINGS = {
    "kueue.enabled": "true",
    "actuator.enabled": "true",
    "aggregator.settings.HEALTHD_ACTUATOR_MODE": "act",
    "aggregator.settings.HEALTHD_POLICY_TIER": "passive",
    "aggregator.settings.HEALTHD_POLICY_COLLECTIVE": "off",
}


def queue(name: str, flavor: str, pods: int) -> list[dict[str, Any]]:
    """A ClusterQueue and its LocalQueue for as many pods as there are nodes."""
    resources = [{"name": "cpu", "nominalQuota": str(pods)}]
    spec = {
        "namespaceSelector": {},
        "admissionChecksStrategy": {"admissionChecks": [{"name": "healthd"}]},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [{"name": flavor, "resources": resources}]}],
    }
    return [
        {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec},
        {
            "apiVersion": KUEUE,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": JOBS},
            "spec": {"clusterQueue": name},
        },
    ]


def queues(nodes: int) -> list[dict[str, Any]]:
    """Two flavors of the same nodes, of which a test uses one at a time, and what they need."""
    pool = {"healthd.internal/pool": "cpu"}
    terms = {"healthd.internal/after-admission": "retry", "healthd.internal/wait": "2m"}
    return [
        {
            "apiVersion": KUEUE,
            "kind": "Topology",
            "metadata": {"name": "nodes"},
            "spec": {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]},
        },
        {
            "apiVersion": KUEUE,
            "kind": "ResourceFlavor",
            "metadata": {"name": PLAIN, "annotations": pool},
            "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}},
        },
        {
            "apiVersion": KUEUE,
            "kind": "ResourceFlavor",
            "metadata": {"name": PLACED, "annotations": pool},
            "spec": {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "nodes"},
        },
        {
            "apiVersion": KUEUE,
            "kind": "AdmissionCheck",
            "metadata": {"name": "healthd", "annotations": terms},
            "spec": {"controllerName": GATE},
        },
        {
            "apiVersion": KUEUE,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
            "description": "first",
        },
        *queue(PLAIN, PLAIN, nodes),
        *queue(PLACED, PLACED, nodes),
    ]


def kueue_job(
    name: str,
    pods: int,
    image: str,
    *,
    command: Sequence[str] = ("sleep", "1"),
    local_queue: str = PLAIN,
    urgent: bool = False,
    grace_seconds: int = 2,
) -> dict[str, Any]:
    """A Job of pods that each want more than half of a node, in a queue of Kueue."""
    labels = {"kueue.x-k8s.io/queue-name": local_queue}
    if urgent:
        labels["kueue.x-k8s.io/priority-class"] = "urgent"
    placed = {"kueue.x-k8s.io/podset-preferred-topology": "kubernetes.io/hostname"} if local_queue == PLACED else {}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "train",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": list(command),
                "resources": {"requests": {"cpu": "1"}},
            }
        ],
    }
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": name}}}
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    spec = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 20,
        "template": {"metadata": {"annotations": placed}, "spec": pod},
    }
    metadata = {"name": name, "namespace": JOBS, "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def slow_to_end(seconds: int) -> tuple[str, ...]:
    """A command that saves for so long when it is told to end."""
    return ("sh", "-c", f"trap 'sleep {seconds}; exit 143' TERM; sleep infinity & wait")


@dataclass(frozen=True)
class KueueSite(Site):
    """The chart with `healthd kueue`, the real Kueue, and its queues."""

    def submit(self, name: str, pods: int, **more: Any) -> None:
        self.cluster.apply(kueue_job(name, pods, self.image, **more))

    def workload(self, name: str) -> dict[str, Any]:
        """The Workload of a Job; empty before Kueue has made it."""
        found = self.cluster.items("workloads.kueue.x-k8s.io", "-n", JOBS)
        owned = (one for one in found if any(of["name"] == name for of in one["metadata"].get("ownerReferences", ())))
        return next(owned, {})

    def holds(self, name: str, condition: str) -> bool:
        return player.holds(self.workload(name), condition)

    def state(self, name: str) -> dict[str, Any]:
        """The state of the check; empty where there is none."""
        return player.check_of(self.workload(name))

    def admitted(self, name: str, seconds: float = STORY_SECONDS) -> None:
        until(f"{name} is admitted", lambda: self.holds(name, "Admitted"), seconds, told=self.told)

    def says(self, name: str, *texts: str) -> str:
        """The message of the check once it has all of these texts."""

        def message() -> str:
            text = str(self.state(name).get("message", ""))
            return text if all(one in text for one in texts) else ""

        return until(f"{name} says {texts}", message, STORY_SECONDS, told=self.told)

    def empty(self) -> None:
        """No Job is left, and nothing is held."""
        self.cluster.kubectl("delete", "jobs", "--all", "-n", JOBS, "--wait=true", "--timeout=120s")
        until("no pod is left", lambda: not self.cluster.items("pods", "-n", JOBS), STORY_SECONDS, told=self.told)
        until("every node is free", lambda: not self.leases(), STORY_SECONDS, told=self.told)

    def told(self) -> str:
        objects = "workloads.kueue.x-k8s.io,pods,jobs"
        words = self.cluster.kubectl("get", objects, "-n", JOBS, "-o", "wide")
        words += self.cluster.kubectl("get", "clusterqueues,admissionchecks", "-o", "yaml")
        for one in self.cluster.items("workloads.kueue.x-k8s.io", "-n", JOBS):
            words += json.dumps(one.get("status", {}))[:3000] + "\n"
        words += self.cluster.kubectl("logs", "-n", SYSTEM, "deployment/healthd-kueue", "--tail=40")
        return words + json.dumps({"leases": self.leases(), "bad": self.bad_nodes()})


def moment(found: dict[str, Any], condition: str) -> float:
    """When a condition of an object changed last, in seconds since the epoch."""
    return player.seconds(player.condition(found, condition)["lastTransitionTime"])


def created(found: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(found["metadata"]["creationTimestamp"]).timestamp()


@contextmanager
def site(cluster: Cluster, image: str, keys: Path, **more: str) -> Iterator[KueueSite]:
    """See `KueueSite`; `more` are further values of the chart."""
    operators()
    with installed(cluster, "kueue"), gating(cluster, image, JOBS, keys, **{**SETTINGS, **more}):
        made = KueueSite(cluster, image, keys)
        objects = queues(len(cluster.nodes()))

        def applied() -> bool:  # its webhooks answer a moment after its Deployment is ready
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
            return "rror" not in cluster.kubectl("apply", "-f", "-", text=text, wrong=None)

        until("the queues are made", applied)
        until("every node has reported", lambda: len(made.ask("/v1/nodes")["nodes"]) == len(cluster.nodes()))
        until("the check is active", lambda: player.holds(cluster.get("admissionchecks", "healthd"), "Active"))
        try:
            yield made
        finally:
            made.cluster.kubectl("delete", "jobs", "--all", "-n", JOBS, "--wait=true", "--timeout=120s")
            for item in reversed(objects):
                where = ("-n", JOBS) if "namespace" in item["metadata"] else ()
                kind = f"{item['kind'].lower()}.kueue.x-k8s.io"
                cluster.kubectl("delete", kind, item["metadata"]["name"], *where, "--ignore-not-found", "--wait=false")
