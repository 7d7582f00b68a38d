"""
Kueue's objects at the API server: follows them by watches, and writes states of checks and labels of nodes.

States are applied by server-side apply with the version that was judged, so that a Workload which has changed meanwhile
is left as it is, and states of other checks are never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import urllib.parse
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Generic, TypeVar

from healthd.clients.kubernetes import (
    APPLY,
    MERGE,
    ApiServer,
    KubernetesError,
    keep_following,
    members,
    node_path,
    records,
    watch_seconds,
)
from healthd.core.tasks import LogOnce
from healthd.integrations.kueue.controller import Queues
from healthd.integrations.kueue.judge import Write
from healthd.integrations.kueue.workloads import (
    API_VERSION,
    ATTEMPT,
    GATE,
    AdmissionCheck,
    Condition,
    Flavor,
    GatedPod,
    Workload,
    is_ours,
    parse_admission_check,
    parse_flavor,
    parse_pod,
    parse_workload,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

BASE = f"/apis/{API_VERSION}"
FOLLOWED = ("admissionchecks", "resourceflavors", "workloads")
MANAGER = "healthd-kueue"
# A Workload of many pod sets is some 100 KB; a page stays below 10 MB.
PAGE = 100
NODE_PAGE = 50
POD_PAGE = 500
GATES_AT_ONCE = 50
"""Gates whose pods are listed by one call: its URL stays below 2 KB."""


class Followed(Generic[T]):
    """All objects of one kind, as they are now; `whole` once the first list is complete."""

    def __init__(
        self,
        server: ApiServer,
        resource: str,
        parse: Callable[[Mapping[str, object]], T | None],
        changed: Callable[[], None],
    ) -> None:
        self._server = server
        self.resource = resource
        self._parse = parse
        self._changed = changed
        self._trouble = LogOnce(log)
        self.objects: dict[str, T] = {}
        self.whole = False

    async def run(self) -> None:
        """Follow for ever: list, watch from there, and begin anew when that ends."""
        await keep_following(self._follow, lambda error: self._trouble.say(f"{self.resource} of Kueue: {error}"))

    async def _follow(self) -> None:
        seconds = watch_seconds()
        needs = f"list and watch on {self.resource}.kueue.x-k8s.io"
        listed: dict[str, T] = {}
        told = self._server.follow(f"{BASE}/{self.resource}", {"limit": str(PAGE)}, seconds=seconds, needs=needs)
        async with contextlib.aclosing(told) as answers:
            async for answer in answers:
                found = members(answer, "object")
                if isinstance(found, dict):
                    self._take(answer.get("type") == "DELETED", found)
                    continue
                for item in records(answer, "items"):
                    if (one := self._parse(item)) is not None:
                        listed[_key(item)] = one
                if not members(answer, "metadata", "continue"):
                    self.objects, self.whole = listed, True
                    self._trouble.clear()
                    self._changed()

    def _take(self, deleted: bool, found: Mapping[str, object]) -> None:
        one = None if deleted else self._parse(found)
        if one is None:
            self.objects.pop(_key(found), None)
        else:
            self.objects[_key(found)] = one
        self._changed()


class KueueCluster:
    """See the module. `changed` is set after each change; `run` methods of `followed` are supervised tasks."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._cluster = ""
        self.changed = asyncio.Event()
        self.checks: Followed[AdmissionCheck] = Followed(
            server,
            "admissionchecks",
            lambda item: parse_admission_check(item) if is_ours(item) else None,
            self.changed.set,
        )
        self.flavors: Followed[Flavor] = Followed(server, FOLLOWED[1], parse_flavor, self.changed.set)
        self.workloads: Followed[Workload] = Followed(server, FOLLOWED[2], parse_workload, self.changed.set)

    async def queues(self) -> Queues | None:
        """What is there now; None before all of it is known. KubernetesError."""
        if not (self.checks.whole and self.flavors.whole and self.workloads.whole):
            return None
        if not self._cluster:
            found = await self._server.get("/api/v1/namespaces/kube-system", needs="get on namespace kube-system")
            uid = members(found, "metadata", "uid")
            if not isinstance(uid, str) or not uid:
                raise KubernetesError("API server: namespace kube-system has no uid")
            self._cluster = uid
        return Queues(
            cluster=self._cluster,
            checks=dict(self.checks.objects),
            flavors=dict(self.flavors.objects),
            workloads=dict(self.workloads.objects),
        )

    async def write_state(self, workload: Workload, check: str, write: Write) -> bool:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        path = f"{BASE}/namespaces/{_quoted(workload.namespace)}/workloads/{_quoted(workload.name)}/status"
        body = {
            "apiVersion": API_VERSION,
            "kind": "Workload",
            "metadata": {
                "namespace": workload.namespace,
                "name": workload.name,
                "uid": workload.uid,
                "resourceVersion": workload.version,
            },
            "status": {"admissionChecks": [state_object(check, write)]},
        }
        try:
            await self._apply(path, body, "patch on workloads/status.kueue.x-k8s.io")
        except KubernetesError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def write_condition(self, check: AdmissionCheck, condition: Condition) -> None:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        changed = check.condition is None or check.condition.active != condition.active
        entry = {
            "type": "Active",
            "status": "True" if condition.active else "False",
            "reason": condition.reason,
            "message": condition.message,
            "observedGeneration": check.generation,
            "lastTransitionTime": moment(datetime.datetime.now(datetime.UTC).timestamp()) if changed else check.since,
        }
        body = {
            "apiVersion": API_VERSION,
            "kind": "AdmissionCheck",
            "metadata": {"name": check.name},
            "status": {"conditions": [entry]},
        }
        try:
            path = f"{BASE}/admissionchecks/{_quoted(check.name)}/status"
            await self._apply(path, body, "patch on admissionchecks/status.kueue.x-k8s.io")
        except KubernetesError as error:
            if error.status != 404:  # it was deleted
                raise

    async def labels(self, node: str) -> Mapping[str, str] | None:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        try:
            found = await self._server.get(node_path(node), needs="get on nodes")
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise
        labels = members(found, "metadata", "labels")
        return (
            {key: value for key, value in labels.items() if isinstance(value, str)} if isinstance(labels, dict) else {}
        )

    async def bind(self, node: str, gate: str) -> None:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        await self._label(node, gate)

    async def bound(self) -> Mapping[str, str]:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        found: dict[str, str] = {}
        async for item in self._listed("nodes", GATE, NODE_PAGE):
            name, labels = members(item, "metadata", "name"), members(item, "metadata", "labels")
            if isinstance(name, str) and isinstance(labels, dict):
                found[name] = str(labels.get(GATE))
        return found

    async def pods(self, gates: Collection[str]) -> tuple[GatedPod, ...]:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        found: list[GatedPod] = []
        names = sorted(gates)
        for first in range(0, len(names), GATES_AT_ONCE):
            some = ",".join(names[first : first + GATES_AT_ONCE])
            listed = self._listed("pods", f"{GATE} in ({some})", POD_PAGE)
            found += [pod async for item in listed if (pod := parse_pod(item)) is not None]
        return tuple(found)

    def _listed(self, resource: str, selector: str, page: int) -> AsyncIterator[Mapping[str, object]]:
        """All objects of a resource of Kubernetes itself that a label selector takes, as they are now."""
        return self._server.items(
            f"/api/v1/{resource}", {"labelSelector": selector}, page=page, needs=f"list on {resource}"
        )

    async def unbind(self, node: str, gate: str) -> None:
        """See `healthd.integrations.kueue.controller.Cluster`."""
        try:
            found = await self._server.get(node_path(node), needs="get on nodes")
            labels = members(found, "metadata", "labels")
            if isinstance(labels, dict) and labels.get(GATE) == gate:
                await self._label(node, None, str(members(found, "metadata", "resourceVersion")))
        except KubernetesError as error:
            if error.status not in (404, 409):  # it is gone, or somebody has written it: the next pass looks again
                raise

    async def _label(self, node: str, value: str | None, version: str | None = None) -> None:
        metadata: dict[str, object] = {"labels": {GATE: value}}
        if version is not None:
            metadata["resourceVersion"] = version
        await self._server.patch(node_path(node), {"metadata": metadata}, kind=MERGE, needs="patch on nodes")

    async def _apply(self, path: str, body: object, needs: str) -> None:
        # Kueue applies these lists too, and each takes over what it writes last.
        query = {"fieldManager": MANAGER, "force": "true"}
        await self._server.patch(path, body, kind=APPLY, needs=needs, query=query)


def state_object(check: str, write: Write) -> dict[str, object]:
    """The entry of a check in the status of a Workload."""
    entry: dict[str, object] = {
        "name": check,
        "state": write.state,
        "message": write.message,
        "lastTransitionTime": moment(write.since),
    }
    if write.requeue_after_seconds is not None:
        entry["requeueAfterSeconds"] = write.requeue_after_seconds
    if write.gate is not None:
        annotations = {GATE: write.gate, ATTEMPT: str(write.attempt)}
        more: dict[str, object] = {"labels": {GATE: write.gate}} if write.leased else {}
        if write.bind:
            more["nodeSelector"] = {GATE: write.gate}
        entry["podSetUpdates"] = [{"name": name, "annotations": annotations, **more} for name in write.pod_sets]
    return entry


def moment(at: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.datetime.fromtimestamp(int(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _key(item: Mapping[str, object]) -> str:
    name, namespace = members(item, "metadata", "name"), members(item, "metadata", "namespace")
    return f"{namespace}/{name}" if namespace else str(name)


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
