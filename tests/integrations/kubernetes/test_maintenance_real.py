"""A node's own object is watched on a real API server, with the rights of the base: in maintenance or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from healthd.clients.kubernetes import ApiServer
from healthd.integrations.kubernetes.maintenance import MaintenanceWatch
from healthd.integrations.kubernetes.settings import MAINTENANCE
from healthd.node.state.store import NodeStore
from tests.deploy.manifests import KUBERNETES
from tests.kubernetes import kit
from tests.kubernetes.kit import Cluster, account
from tests.node.node_kit import BOOT, MovedClock, settings, specs
from tests.patience import PATIENCE

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

NAMESPACE, NODE, OTHER = "tests-maintenance", "maintenance-1", "maintenance-2"


def rights() -> list[dict[str, Any]]:
    text = (KUBERNETES / "base/node/rbac.yaml").read_text()
    return [rule for one in yaml.safe_load_all(text) for rule in one.get("rules", ())]


@pytest.fixture
def server(oldest: Cluster, tmp_path: Path) -> Iterator[ApiServer]:
    """A server whose nodes have no machine."""
    with account(oldest, tmp_path, NAMESPACE, rights()) as made:
        oldest.apply(*({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in (NODE, OTHER)))
        yield made
        oldest.kubectl("delete", "nodes", NODE, OTHER)


def condition(cluster: Cluster, node: str, status: str) -> None:
    told = {"type": "MaintenanceInProgress", "status": status, "reason": "Firmware"}
    body = json.dumps({"status": {"conditions": [told]}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", body)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0 * PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_daemon_knows_that_its_node_is_in_maintenance_from_the_start_and_when_that_ends(
    oldest: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    store = NodeStore(settings(tmp_path / "node"), specs(), clock=MovedClock().clock, boot_id=BOOT)
    watch = MaintenanceWatch(store, server, node=NODE, signs=MAINTENANCE, first_pause_seconds=0.1)
    kubectl = oldest.kubectl
    await asyncio.to_thread(kubectl, "taint", "node", NODE, "medik8s.io/drain=:NoSchedule")
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: store.snapshot().maintenance == "taint medik8s.io/drain")
        await asyncio.to_thread(condition, oldest, NODE, "True")
        await until(lambda: store.snapshot().maintenance == "condition MaintenanceInProgress: Firmware")

        # The API server is away meanwhile: what was known stands, and what has changed is seen when it is back.
        def away() -> None:
            with oldest.down("kube-apiserver"):
                assert store.snapshot().maintenance is not None
            kit.until("the API server answers", lambda: kit.answers(oldest))

        await asyncio.to_thread(away)
        await asyncio.to_thread(condition, oldest, OTHER, "True")
        await asyncio.to_thread(condition, oldest, NODE, "False")
        await until(lambda: store.snapshot().maintenance == "taint medik8s.io/drain")
        await asyncio.to_thread(kubectl, "taint", "node", NODE, "medik8s.io/drain-")
        await until(lambda: store.snapshot().maintenance is None)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
