"""Which signs on a Kubernetes node say that it is in maintenance, and what its daemon says then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from healthd.clients.kubernetes import ApiServer, KubernetesError
from healthd.integrations.kubernetes.maintenance import NEEDS, MaintenanceWatch, maintenance_of
from healthd.integrations.kubernetes.settings import MAINTENANCE, KubernetesSettings, parse_maintenance_sign
from healthd.node.http.health import readiness
from healthd.node.state.store import NodeStore, digest_of
from tests.every import every
from tests.node.node_kit import BOOT, MovedClock, eventually, settings, specs

SIGNS = tuple(parse_maintenance_sign(one) for one in MAINTENANCE)


def node(
    *,
    taints: tuple[dict[str, str], ...] = (),
    conditions: tuple[dict[str, str], ...] = (),
    **metadata: dict[str, str],
) -> dict[str, Any]:
    return {"metadata": metadata, "spec": {"taints": list(taints)}, "status": {"conditions": list(conditions)}}


def test_node_is_in_maintenance_by_the_taint_of_an_operator_or_a_lifecycle_condition() -> None:
    assert maintenance_of(node(), SIGNS) is None
    drain = {"key": "medik8s.io/drain", "effect": "NoSchedule"}
    assert maintenance_of(node(taints=(drain,)), SIGNS) == "taint medik8s.io/drain"
    told = {"type": "MaintenanceInProgress", "status": "True", "reason": "Window", "message": "new firmware"}
    assert maintenance_of(node(conditions=(told,)), SIGNS) == "condition MaintenanceInProgress: new firmware"
    ends = {**told, "status": "False"}
    unknown = {**told, "status": "Unknown"}
    planned = {**told, "type": "MaintenancePlanned"}
    assert maintenance_of(node(conditions=(ends, unknown, planned)), SIGNS) is None


def test_cordon_and_unreachable_node_are_no_maintenance() -> None:
    keys = ("unschedulable", "not-ready", "unreachable", "memory-pressure")
    taints = tuple({"key": f"node.kubernetes.io/{key}", "effect": "NoSchedule"} for key in keys)
    assert maintenance_of(node(taints=taints), SIGNS) is None
    asked = (parse_maintenance_sign("taint:node.kubernetes.io/unschedulable"),)
    assert maintenance_of(node(taints=taints), asked) == "taint node.kubernetes.io/unschedulable"


def test_labels_and_annotations_count_by_their_value_where_one_is_named() -> None:
    texts = ("label:example.com/state=repair", "annotation:example.com/lock")
    signs = tuple(parse_maintenance_sign(text) for text in texts)
    assert maintenance_of(node(labels={"example.com/state": "ready"}), signs) is None
    assert maintenance_of(node(labels={"example.com/state": "repair"}), signs) == "label example.com/state: repair"
    assert maintenance_of(node(annotations={"example.com/lock": ""}), signs) == "annotation example.com/lock"
    assert maintenance_of({"metadata": None, "spec": {"taints": "x"}}, signs) is None


@every("text", ["medik8s.io/drain", "taint:", "taint:a=b", "condition:X=True", "toleration:a", ""])
def test_sign_that_is_none_is_an_error_that_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="must be taint:KEY"):
        KubernetesSettings(maintenance=(text,))


def test_daemon_in_maintenance_is_not_ready_and_tells_the_aggregator_at_once(tmp_path: Path) -> None:
    store = NodeStore(settings(tmp_path), specs(), clock=MovedClock().clock, boot_id=BOOT)
    before = store.snapshot()
    assert "maintenance" not in readiness(before)
    store.set_maintenance("taint medik8s.io/drain")
    after = store.snapshot()
    assert readiness(after)["maintenance"] == "in maintenance: taint medik8s.io/drain"
    assert digest_of(after) != digest_of(before)


@dataclass(frozen=True, kw_only=True)
class StartingServer(ApiServer):
    """Refuses the first three calls, as one does that has yet to read its roles."""

    calls: list[str] = field(default_factory=list)

    async def follow(
        self, path: str, query: Mapping[str, str], *, seconds: float, needs: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        assert (query, needs) == ({"fieldSelector": "metadata.name=n1"}, NEEDS)
        self.calls.append(path)
        if len(self.calls) <= 3:
            raise KubernetesError("forbidden", status=403)
        yield {"kind": "NodeList", "items": [node(taints=({"key": "medik8s.io/drain"},))]}
        await asyncio.sleep(seconds)


async def test_server_that_has_just_started_and_refuses_is_asked_again_soon(tmp_path: Path) -> None:
    store = NodeStore(settings(tmp_path), specs(), clock=MovedClock().clock, boot_id=BOOT)
    server = StartingServer(url="https://127.0.0.1:1", service_account=tmp_path)
    watch = MaintenanceWatch(store, server, node="n1", signs=MAINTENANCE, first_pause_seconds=0.01)
    task = asyncio.create_task(watch.run())
    try:
        await eventually(lambda: store.maintenance == "taint medik8s.io/drain")
    finally:
        task.cancel()
        await asyncio.wait([task])
