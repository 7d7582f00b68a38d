"""
Whether the node is in maintenance, as its Kubernetes node says: by taints, conditions, labels or annotations that
operators set. `maintenance_of` is pure; `MaintenanceWatch` follows the node's own object.

What fails on a node in maintenance is no fault of it: the rules of quarantine do not count it, and gates leave the node
out with that reason. What is not known is no maintenance; what was known last stands until the server says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from checks.printable import printable_line
from healthd.core.platforms.kubernetes import ApiServer, KubernetesError, members, records
from healthd.core.tasks import Backoff, LogOnce
from healthd.node.settings import MaintenanceSign, parse_maintenance_sign
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

NEEDS = "list and watch on nodes"
# As clients of Kubernetes do it: each watch ends by itself, at another time on each node.
WATCH_SECONDS = (300.0, 600.0)
# A watch that ends sooner is followed by longer pauses.
SHORT_SECONDS = 30.0
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 60.0
# A right that is missing does not come by waiting. But a server that has just started refuses until it has read its
# roles, so a refusal is believed only after so many in a row.
HOPELESS, HOPELESS_SECONDS, REFUSALS_BELIEVED = (401, 403), 300.0, 6


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
        backoff, failures = Backoff(self._first_pause_seconds, MOST_PAUSE_SECONDS), 0
        refusals = 0
        loop = asyncio.get_running_loop()
        while True:
            began, least = loop.time(), 0.0
            try:
                await self._follow()
            except KubernetesError as error:
                if error.status != 410:  # there too much has changed since: what is true now is to be listed
                    self._trouble.say(f"maintenance of node {self._node}: {error}")
                    asked = min(error.retry_after_seconds or 0.0, HOPELESS_SECONDS)
                    refusals = refusals + 1 if error.status in HOPELESS else 0
                    least = HOPELESS_SECONDS if refusals >= REFUSALS_BELIEVED else asked
            else:
                refusals = 0
            # Whatever ended it so soon, such as a proxy that holds no answer open, must not be a storm of calls.
            failures = failures + 1 if loop.time() - began < SHORT_SECONDS else 1
            await asyncio.sleep(max(least, backoff.after(failures) * random.uniform(0.75, 1.25)))  # noqa: S311

    async def _follow(self) -> None:
        """Note the node as it is and as it changes, until the server ends that."""
        query = {"fieldSelector": f"metadata.name={self._node}"}
        seconds = random.uniform(*WATCH_SECONDS)  # noqa: S311
        told = self._server.follow("/api/v1/nodes", query, seconds=seconds, needs=NEEDS)
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
                    raise KubernetesError(f"API server {self._server.url}: its answer is no list of nodes")

    def _note(self, node: object) -> None:
        found = maintenance_of(node, self._signs)
        if found != self._store.maintenance:
            log.info("node %s: %s", self._node, f"in maintenance: {found}" if found else "in maintenance no more")
            self._store.set_maintenance(found)
