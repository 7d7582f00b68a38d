"""The end of an installation in a cluster: takes away what healthd has written to nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from healthd.aggregator.drain.plan import ActuatorError
from healthd.aggregator.drain.targets import with_devices
from healthd.clients.kubernetes import (
    MERGE,
    NODES,
    STRATEGIC,
    ApiServer,
    KubernetesError,
    members,
    node_path,
    pods_path,
    records,
)
from healthd.integrations.kubernetes.actuator import LIST, PAGE, WRITE, KubernetesActuator, actuator_error

WRITE_STATUS, LIST_PODS = "patch on nodes/status", "list on pods"
DAEMONS = "app.kubernetes.io/name=healthd-node"
AT_ONCE = 16
LOOK_SECONDS = 1.0


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
    try:
        return await _clean(server, traces, wait_seconds)
    except KubernetesError as error:
        raise actuator_error(error) from None


async def _clean(server: ApiServer, traces: Traces, wait_seconds: float) -> tuple[str, ...]:
    left = await _wait_for_end(server, traces, wait_seconds)
    done: list[str] = []
    if traces.owner is not None:
        actuator = with_devices(KubernetesActuator(server, key=traces.key, owner=traces.owner), undo=True)
        done += [(await actuator.restore(node)).note for node in await actuator.marked()]
    for label in traces.labels:
        labelled = [
            members(node, "metadata", "name")
            async for node in server.items(NODES, {"labelSelector": label}, page=PAGE, needs=LIST)
        ]
        done += [await _remove_label(server, str(name), label) for name in labelled]
    if traces.conditions:
        kept = {
            members(pod, "spec", "nodeName")
            async for pod in server.items("/api/v1/pods", {"labelSelector": DAEMONS}, page=PAGE, needs=LIST_PODS)
        }
        nodes = [node async for node in server.items(NODES, {}, page=PAGE, needs=LIST)]
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
    path = pods_path(traces.namespace)
    end = time.monotonic() + wait_seconds
    while True:
        left = {
            f"{traces.namespace}/{members(pod, 'metadata', 'name')}"
            for selector in traces.pods
            async for pod in server.items(path, {"labelSelector": selector}, page=PAGE, needs=LIST_PODS)
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
            raise


async def _remove_label(server: ApiServer, node: str, label: str) -> str:
    try:
        await server.patch(node_path(node), {"metadata": {"labels": {label: None}}}, kind=MERGE, needs=WRITE)
    except KubernetesError as error:
        if error.status != 404:
            raise
    return f"node {node}: label {label} is removed"
