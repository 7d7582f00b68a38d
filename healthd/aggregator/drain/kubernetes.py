"""
A taint on the Kubernetes node: `healthd.internal/removed=OWNER:NoSchedule`. Pods that run are left alone.

The taint's value is the owner, and key, value and effect together are ours: a taint of the same key with another value
is somebody else's, and so is a cordon. A label of the same key and owner lets our nodes be found again after a restart;
annotations say which node of the fleet it is and why. The list of taints can only be written whole, so each write names
the version of the node that it was read from, and a conflict reads anew.

Where single devices are all that is wrong with a node, and DRA can leave these out, they are tainted instead
(`device_taints`), before a taint of ours on the node goes. Where they cannot be, the node is tainted as ever.

`clean` is for the end of an installation: it takes away what healthd has written to nodes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from healthd.aggregator.drain.device_taints import Applied, DeviceTaintRules, plugin_resource
from healthd.aggregator.drain.plan import ActuatorError, Done, Outcome, Removal
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.core.platforms.kubernetes import (
    MERGE,
    STRATEGIC,
    ApiServer,
    KubernetesError,
    api_server,
    members,
    node_path,
    records,
)

EFFECT = "NoSchedule"
READ, WRITE, LIST = "get on nodes", "patch on nodes", "list on nodes"
CONFLICTS = 4
# A node with many images is 50 KB; a page of these stays a few MB.
PAGE = 50
MOST_PAGES = 100
REASON_CHARACTERS = 512
WRITE_STATUS, LIST_PODS = "patch on nodes/status", "list on pods"
DAEMONS = "app.kubernetes.io/name=healthd-node"
AT_ONCE = 16
LOOK_SECONDS = 1.0


class KubernetesActuator:
    """See the module."""

    def __init__(self, server: ApiServer, *, key: str, owner: str, rules: DeviceTaintRules | None = None) -> None:
        self.name = "kubernetes"
        self._rules = rules
        self._server = server
        self._key = key
        self._owner = owner
        self._names: dict[str, str] = {}  # node of the fleet -> node of the cluster

    async def marked(self) -> Mapping[str, str]:
        """By their label; one whose taint is not there any more has nothing to be undone but the label."""
        found: dict[str, str] = {}
        selector = f"{self._key}={self._owner}"
        async for item in _listed(self._server, "/api/v1/nodes", selector, LIST):
            name = members(item, "metadata", "name")
            if isinstance(name, str):
                fleet_name = self._annotation(item, "node") or name
                self._names[fleet_name] = name
                found[fleet_name] = self._annotation(item, "reason") or "no reason is noted"
        for fleet_name, (name, why) in (await self._rules.marked() if self._rules is not None else {}).items():
            self._names.setdefault(fleet_name, name)
            found.setdefault(fleet_name, why or "no reason is noted")
        return found

    async def remove(self, removal: Removal) -> Outcome:
        """
        OUT with our taint on the node or its devices. LEFT where a taint of that key is somebody else's, where the
        driver has tainted the devices, or where no node of these names is there.
        """
        if self._rules is None:
            return await self._taint(removal)
        if not removal.devices:
            outcome = await self._taint(removal)
            await self._rules.remove(removal.node)
            return outcome
        devices = await self._taint_devices(self._rules, removal)
        if devices is not None and devices.out and not removal.whole:
            await self._untaint(removal.node)
            return Outcome(done=Done.OUT if devices.ours else Done.LEFT, note=devices.note)
        outcome = await self._taint(removal)
        return outcome if devices is None else replace(outcome, note=f"{outcome.note}; {devices.note}")

    async def _taint_devices(self, rules: DeviceTaintRules, removal: Removal) -> Applied | None:
        """The devices of a node, by rules; None for a node that is not there."""
        found = await self._find(removal.names)
        if found is None:
            return None
        name, node = found
        self._names[removal.node] = name
        if (resource := plugin_resource(node)) is not None:
            await rules.remove(removal.node)
            return Applied(out=False, note=f"no rule for its device: a device plugin allocates them ({resource})")
        return await rules.apply(removal.node, name, removal.devices, _line(removal.reason))

    async def _taint(self, removal: Removal) -> Outcome:
        """As `remove`, of the node."""
        for _ in range(CONFLICTS):
            found = await self._find(removal.names)
            if found is None:
                names = ", ".join(removal.names)
                return Outcome(done=Done.LEFT, note=f"the cluster has no node named {names}, so nothing was tainted")
            name, node = found
            taints = records(node, "spec", "taints")
            if any(self._ours(taint) for taint in taints) and self._label(node) == self._owner:
                self._names[removal.node] = name
                return Outcome(done=Done.OUT, note=f"node {name} is tainted")
            other = next((t for t in taints if self._same_place(t) and not self._ours(t)), None)
            if other is not None:
                told = f"{self._key}={other.get('value') or ''}:{EFFECT}"
                return Outcome(done=Done.LEFT, note=f"node {name} has {told} already, which does not belong to healthd")
            kept = [taint for taint in taints if not self._ours(taint)]
            ours = {"key": self._key, "value": self._owner, "effect": EFFECT}
            notes = {f"{self._key}-node": removal.node, f"{self._key}-reason": _line(removal.reason)}
            metadata = {"labels": {self._key: self._owner}, "annotations": notes}
            if await self._write(name, node, metadata, [*kept, ours]):
                self._names[removal.node] = name
                return Outcome(done=Done.OUT, note=f"node {name} is tainted {self._key}={self._owner}:{EFFECT}")
        raise ActuatorError(f"kubernetes: node {name} changed {CONFLICTS} times while it was being tainted")

    async def restore(self, node: str) -> Outcome:
        """Our taint, label and annotations go, and our rules for its devices; nothing else is touched."""
        gone = await self._rules.remove(node) if self._rules is not None else ()
        outcome = await self._untaint(node)
        self._names.pop(node, None)
        if not gone:
            return outcome
        notes = (*gone, outcome.note) if outcome.done is Done.BACK else gone
        return Outcome(done=Done.BACK, note="; ".join(notes))

    async def _untaint(self, node: str) -> Outcome:
        """As `restore`, of the node's own taint."""
        name = self._names.get(node, node)
        for _ in range(CONFLICTS):
            found = await self._find((name,))
            if found is None:
                return Outcome(done=Done.LEFT, note=f"node {name} no longer exists")
            current = found[1]
            taints = records(current, "spec", "taints")
            kept = [taint for taint in taints if not self._ours(taint)]
            labelled = self._label(current) == self._owner
            if len(kept) == len(taints) and not labelled:
                return Outcome(done=Done.LEFT, note=f"node {name} has no taint of healthd")
            nothing = {f"{self._key}-node": None, f"{self._key}-reason": None}
            metadata = {"labels": {self._key: None}, "annotations": nothing} if labelled else {}
            if await self._write(name, current, metadata, kept):
                gone = len(kept) < len(taints)
                note = f"the taint of node {name} is removed" if gone else f"node {name} had already lost the taint"
                return Outcome(done=Done.BACK, note=note)
        raise ActuatorError(f"kubernetes: node {name} changed {CONFLICTS} times while its taint was being removed")

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _find(self, names: tuple[str, ...]) -> tuple[str, dict[str, object]] | None:
        """The first of these names that the cluster knows, and the node."""
        for name in names:
            try:
                return name, await self._server.get(node_path(name), needs=READ)
            except KubernetesError as error:
                if error.status != 404:
                    raise _told(error) from None
        return None

    async def _write(
        self, name: str, node: object, metadata: Mapping[str, object], taints: list[dict[str, object]] | list[object]
    ) -> bool:
        """False: the node has changed since it was read."""
        version = members(node, "metadata", "resourceVersion")
        if not isinstance(version, str) or not version:
            raise ActuatorError(f"kubernetes: node {name} has no resourceVersion, so nothing is written")
        body = {"metadata": {**metadata, "resourceVersion": version}, "spec": {"taints": taints or None}}
        try:
            await self._server.patch(node_path(name), body, kind=MERGE, needs=WRITE)
        except KubernetesError as error:
            if error.status == 409:
                return False
            raise _told(error) from None
        return True

    # --- what is ours -------------------------------------------------------------------------------------------------

    def _same_place(self, taint: Mapping[str, object]) -> bool:
        """Kubernetes allows one taint of a key and effect."""
        return taint.get("key") == self._key and taint.get("effect") == EFFECT

    def _ours(self, taint: Mapping[str, object]) -> bool:
        return self._same_place(taint) and taint.get("value") == self._owner

    def _label(self, node: object) -> object:
        return members(members(node, "metadata", "labels"), self._key)

    def _annotation(self, node: object, what: str) -> str:
        text = members(members(node, "metadata", "annotations"), f"{self._key}-{what}")
        return text if isinstance(text, str) else ""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """
    What an installation has written to nodes: conditions by their type, marks by their key and owner (None: it had no
    actuator), and further labels by their keys. `pods` are selectors of its pods in `namespace`, which end first.
    """

    conditions: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    key: str
    owner: str | None
    namespace: str
    pods: tuple[str, ...] = ()


async def clean(server: ApiServer, traces: Traces, *, wait_seconds: float) -> tuple[str, ...]:
    """
    Take away what an installation has written to nodes, once its pods have ended; what was done, a line for each node.

    A condition is left where another installation's daemon still runs on the node. ActuatorError, also for pods that
    have not ended within `wait_seconds`: what they are not in the way of has been done by then.
    """
    left = await _wait_for_end(server, traces, wait_seconds)
    done: list[str] = []
    if traces.owner is not None:
        rules = DeviceTaintRules(server, key=traces.key, owner=traces.owner, effect="NoSchedule")
        actuator = KubernetesActuator(server, key=traces.key, owner=traces.owner, rules=rules)
        done += [(await actuator.restore(node)).note for node in await actuator.marked()]
    for label in traces.labels:
        labelled = [members(node, "metadata", "name") async for node in _listed(server, "/api/v1/nodes", label, LIST)]
        done += [await _remove_label(server, str(name), label) for name in labelled]
    if traces.conditions:
        kept = {members(pod, "spec", "nodeName") async for pod in _listed(server, "/api/v1/pods", DAEMONS, LIST_PODS)}
        nodes = [node async for node in _listed(server, "/api/v1/nodes", "", LIST)]
        written = {
            name: types
            for node in nodes
            if isinstance(name := members(node, "metadata", "name"), str)
            and name not in kept
            and (types := _written(node, traces.conditions))
        }
        names = sorted(written)
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            await asyncio.gather(*(_remove_conditions(server, name, written[name]) for name in some))
        done += [f"node {name}: condition {', '.join(written[name])} is removed" for name in names]
    if left:
        raise ActuatorError(
            f"kubernetes: after {wait_seconds:.0f} s these pods have not ended, so their nodes are left unchanged: "
            f"{', '.join(sorted(left)[:5])}; run it again when they have ended"
        )
    return tuple(done)


async def _wait_for_end(server: ApiServer, traces: Traces, wait_seconds: float) -> set[str]:
    """The pods of the installation that are still there at the end of the wait."""
    path = f"/api/v1/namespaces/{traces.namespace}/pods"
    end = time.monotonic() + wait_seconds
    while True:
        left = {
            f"{traces.namespace}/{members(pod, 'metadata', 'name')}"
            for selector in traces.pods
            async for pod in _listed(server, path, selector, LIST_PODS)
        }
        if not left or time.monotonic() >= end:
            return left
        await asyncio.sleep(LOOK_SECONDS)


def _written(node: object, types: Sequence[str]) -> tuple[str, ...]:
    """Which of these types the node's status has."""
    return tuple(str(one["type"]) for one in records(node, "status", "conditions") if one.get("type") in types)


async def _remove_conditions(server: ApiServer, node: str, types: Sequence[str]) -> None:
    gone = [{"$patch": "delete", "type": one} for one in types]
    try:
        path = node_path(node) + "/status"
        await server.patch(path, {"status": {"conditions": gone}}, kind=STRATEGIC, needs=WRITE_STATUS)
    except KubernetesError as error:
        if error.status != 404:  # the node is gone, and its condition with it
            raise _told(error) from None


async def _remove_label(server: ApiServer, node: str, label: str) -> str:
    try:
        await server.patch(node_path(node), {"metadata": {"labels": {label: None}}}, kind=MERGE, needs=WRITE)
    except KubernetesError as error:
        if error.status != 404:
            raise _told(error) from None
    return f"node {node}: label {label} is removed"


async def _listed(server: ApiServer, path: str, selector: str, needs: str) -> AsyncIterator[dict[str, object]]:
    """All objects of a list that a selector of labels finds, page by page. ActuatorError."""
    query = {"labelSelector": selector, "limit": str(PAGE)}
    for _ in range(MOST_PAGES):
        try:
            page = await server.get(path, query, needs=needs)
        except KubernetesError as error:
            raise _told(error) from None
        for item in records(page, "items"):
            yield item
        more = members(page, "metadata", "continue")
        if not isinstance(more, str) or not more:
            return
        query = {**query, "continue": more}
    raise ActuatorError(f"kubernetes: {path} has more than {PAGE * MOST_PAGES} objects with {selector or 'any label'}")


def make(settings: ActuatorSettings) -> KubernetesActuator:
    """As configured; ConfigError where there is no API server to ask."""
    chosen = settings.kubernetes
    server = api_server(os.environ, chosen.service_account, chosen.api_server)
    key, owner, rules = chosen.taint_key, settings.owner, None
    if chosen.device_taints != "off":
        rules = DeviceTaintRules(server, key=key, owner=owner, effect=chosen.device_taints)
    return KubernetesActuator(server, key=key, owner=owner, rules=rules)


def _told(error: KubernetesError) -> ActuatorError:
    return ActuatorError(f"kubernetes: {error}", retry_after_seconds=error.retry_after_seconds)


def _line(text: str) -> str:
    return " ".join(text.split())[:REASON_CHARACTERS]
