"""
Whether the node is in maintenance, by taints, conditions, labels or annotations of its Kubernetes node that
operators set. `maintenance_of` is pure; `MaintenanceWatch` follows the node's own object.

A failure on a node in maintenance is not a fault of the node: the rules of quarantine do not count it, and gates
exclude the node with that reason. Without information the node is not in maintenance; the last known state stays until
the server reports a change.
"""

from __future__ import annotations

import contextlib
import logging

from checks.printable import printable_line
from healthd.clients.kubernetes import (
    FIRST_PAUSE_SECONDS,
    ApiServer,
    KubernetesError,
    keep_following,
    members,
    records,
    watch_seconds,
)
from healthd.core.tasks import LogOnce
from healthd.integrations.kubernetes.settings import MaintenanceSign, parse_maintenance_sign
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

NEEDS = "list and watch on nodes"


def maintenance_of(node: object, signs: tuple[MaintenanceSign, ...]) -> str | None:
    """The first of these signs that a Kubernetes node bears, in words; None for none."""
    taints = {one.get("key"): one for one in records(node, "spec", "taints")}
    conditions = {one.get("type"): one for one in records(node, "status", "conditions")}
    for sign in signs:
        if sign.kind == "taint" and sign.name in taints:
            return _line(f"taint {sign.name}", members(taints[sign.name], "value"))
        if sign.kind == "condition" and members(conditions.get(sign.name), "status") == "True":
            condition = conditions[sign.name]
            return _line(f"condition {sign.name}", condition.get("message") or condition.get("reason"))
        if sign.kind in ("label", "annotation"):
            value = members(members(node, "metadata", f"{sign.kind}s"), sign.name)
            if isinstance(value, str) and sign.value in (None, value):
                return _line(f"{sign.kind} {sign.name}", value)
    return None


def _line(what: str, detail: object) -> str:
    return printable_line(f"{what}: {detail}" if isinstance(detail, str) and detail else what)


class MaintenanceWatch:
    """Tells the store whether the node is in maintenance; `run` is a supervised task. `node` is its Kubernetes name."""

    def __init__(
        self,
        store: NodeStore,
        server: ApiServer,
        *,
        node: str,
        signs: tuple[str, ...],
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._store = store
        self._server = server
        self._node = node
        self._signs = tuple(parse_maintenance_sign(one) for one in signs)
        self._first_pause_seconds = first_pause_seconds
        self._trouble = LogOnce(log)

    async def run(self) -> None:
        """Follow the node for ever: list it, watch it from there, and begin anew when that ends."""
        await keep_following(
            self._follow,
            lambda error: self._trouble.say(f"maintenance of node {self._node}: {error}"),
            first_pause_seconds=self._first_pause_seconds,
        )

    async def _follow(self) -> None:
        """Note the node as it is and as it changes, until the server ends that."""
        query = {"fieldSelector": f"metadata.name={self._node}"}
        told = self._server.follow("/api/v1/nodes", query, seconds=watch_seconds(), needs=NEEDS)
        async with contextlib.aclosing(told) as answers:
            async for answer in answers:
                found = members(answer, "object")
                if isinstance(found, dict):
                    if answer.get("type") in ("ADDED", "MODIFIED"):
                        self._note(found)
                elif members(answer, "kind") == "NodeList":
                    self._trouble.clear()
                    for node in records(answer, "items"):
                        self._note(node)
                else:
                    raise KubernetesError(f"API server {self._server.url}: its answer is not a list of nodes")

    def _note(self, node: object) -> None:
        found = maintenance_of(node, self._signs)
        if found != self._store.maintenance:
            log.info("node %s: %s", self._node, f"in maintenance: {found}" if found else "no longer in maintenance")
            self._store.set_maintenance(found)
