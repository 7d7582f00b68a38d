"""
A taint on the Kubernetes node: `healthd.internal/removed=OWNER:NoSchedule`. Pods that run are left alone.

The taint's value is the owner, and key, value and effect together are ours: a taint of the same key with another value
is somebody else's, and so is a cordon. A label of the same key and owner lets our nodes be found again after a restart;
annotations say which node of the fleet it is and why. The list of taints can only be written whole, so each write names
the version of the node that it was read from, and a conflict reads anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from healthd.aggregator.drain.plan import ActuatorError, Done, Outcome, Removal
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.clients.kubernetes import (
    MERGE,
    NODES,
    ApiServer,
    KubernetesError,
    api_server,
    members,
    node_path,
    note_text,
    records,
)
from healthd.integrations.kubernetes.settings import KubernetesActuatorSettings

EFFECT = "NoSchedule"
READ, WRITE, LIST = "get on nodes", "patch on nodes", "list on nodes"
CONFLICTS = 4
# A node with many images is 50 KB; a page of these stays a few MB.
PAGE = 50


class KubernetesActuator:
    """
    A `healthd.aggregator.drain.plan.Actuator`, and `healthd.clients.kubernetes.MarkedNodes`: others may take out
    devices before it takes out their node.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        key: str,
        owner: str,
        device_settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.name = "kubernetes"
        self.server = server
        self.key = key
        self.owner = owner
        self.device_settings = device_settings
        self._names: dict[str, str] = {}  # node of the fleet -> node of the cluster

    async def marked(self) -> Mapping[str, str]:
        """By their label; one whose taint is not there any more has nothing to be undone but the label."""
        found: dict[str, str] = {}
        query = {"labelSelector": f"{self.key}={self.owner}"}
        try:
            async for item in self.server.items(NODES, query, page=PAGE, needs=LIST):
                name = members(item, "metadata", "name")
                if isinstance(name, str):
                    fleet_name = self._annotation(item, "node") or name
                    self._names[fleet_name] = name
                    found[fleet_name] = self._annotation(item, "reason") or "no reason is noted"
        except KubernetesError as error:
            raise actuator_error(error) from None
        return found

    async def find(self, node: str, names: Sequence[str]) -> tuple[str, dict[str, object]] | None:
        """As in `MarkedNodes`. ActuatorError."""
        for name in names:
            try:
                found = await self.server.get(node_path(name), needs=READ)
            except KubernetesError as error:
                if error.status != 404:
                    raise actuator_error(error) from None
                continue
            self._names[node] = name
            return name, found
        return None

    async def remove(self, removal: Removal) -> Outcome:
        """
        OUT with our taint on the node. LEFT where a taint of that key is somebody else's, or where no node of these
        names is there.
        """
        for _ in range(CONFLICTS):
            found = await self.find(removal.node, removal.names)
            if found is None:
                names = ", ".join(removal.names)
                return Outcome(done=Done.LEFT, note=f"the cluster has no node named {names}, so nothing was tainted")
            name, node = found
            taints = records(node, "spec", "taints")
            if any(self._ours(taint) for taint in taints) and self._label(node) == self.owner:
                return Outcome(done=Done.OUT, note=f"node {name} is tainted")
            other = next((t for t in taints if self._same_place(t) and not self._ours(t)), None)
            if other is not None:
                told = f"{self.key}={other.get('value') or ''}:{EFFECT}"
                return Outcome(done=Done.LEFT, note=f"node {name} has {told} already, which does not belong to healthd")
            kept = [taint for taint in taints if not self._ours(taint)]
            ours = {"key": self.key, "value": self.owner, "effect": EFFECT}
            notes = {f"{self.key}-node": removal.node, f"{self.key}-reason": note_text(removal.reason)}
            metadata = {"labels": {self.key: self.owner}, "annotations": notes}
            if await self._write(name, node, metadata, [*kept, ours]):
                return Outcome(done=Done.OUT, note=f"node {name} is tainted {self.key}={self.owner}:{EFFECT}")
        raise ActuatorError(f"kubernetes: node {name} changed {CONFLICTS} times while it was being tainted")

    async def restore(self, node: str) -> Outcome:
        """Our taint, label and annotations go; nothing else is touched."""
        name = self._names.get(node, node)
        for _ in range(CONFLICTS):
            found = await self.find(node, (name,))
            if found is None:
                return Outcome(done=Done.LEFT, note=f"node {name} no longer exists")
            current = found[1]
            taints = records(current, "spec", "taints")
            kept = [taint for taint in taints if not self._ours(taint)]
            labelled = self._label(current) == self.owner
            if len(kept) == len(taints) and not labelled:
                return Outcome(done=Done.LEFT, note=f"node {name} has no taint of healthd")
            nothing = {f"{self.key}-node": None, f"{self.key}-reason": None}
            metadata = {"labels": {self.key: None}, "annotations": nothing} if labelled else {}
            if await self._write(name, current, metadata, kept):
                gone = len(kept) < len(taints)
                note = f"the taint of node {name} is removed" if gone else f"node {name} had already lost the taint"
                return Outcome(done=Done.BACK, note=note)
        raise ActuatorError(f"kubernetes: node {name} changed {CONFLICTS} times while its taint was being removed")

    async def _write(
        self, name: str, node: object, metadata: Mapping[str, object], taints: list[dict[str, object]] | list[object]
    ) -> bool:
        """False: the node has changed since it was read."""
        version = members(node, "metadata", "resourceVersion")
        if not isinstance(version, str) or not version:
            raise ActuatorError(f"kubernetes: node {name} has no resourceVersion, so nothing is written")
        body = {"metadata": {**metadata, "resourceVersion": version}, "spec": {"taints": taints or None}}
        try:
            await self.server.patch(node_path(name), body, kind=MERGE, needs=WRITE)
        except KubernetesError as error:
            if error.status == 409:
                return False
            raise actuator_error(error) from None
        return True

    def _same_place(self, taint: Mapping[str, object]) -> bool:
        """Kubernetes allows one taint of a key and effect."""
        return taint.get("key") == self.key and taint.get("effect") == EFFECT

    def _ours(self, taint: Mapping[str, object]) -> bool:
        return self._same_place(taint) and taint.get("value") == self.owner

    def _label(self, node: object) -> object:
        return members(members(node, "metadata", "labels"), self.key)

    def _annotation(self, node: object, what: str) -> str:
        text = members(members(node, "metadata", "annotations"), f"{self.key}-{what}")
        return text if isinstance(text, str) else ""


def make(settings: ActuatorSettings) -> KubernetesActuator:
    """As configured; ConfigError where there is no API server to ask."""
    chosen = settings.of("kubernetes", KubernetesActuatorSettings)
    return KubernetesActuator(
        api_server(os.environ, chosen.service_account, chosen.api_server),
        key=chosen.taint_key,
        owner=settings.owner,
        device_settings=chosen.devices,
    )


def actuator_error(error: KubernetesError) -> ActuatorError:
    """The error of the server as that of its actuator."""
    return ActuatorError(f"kubernetes: {error}", retry_after_seconds=error.retry_after_seconds)
