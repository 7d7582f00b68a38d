"""`healthd kueue` on a real API server with Kueue's own definitions, and a real aggregator with real node daemons."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aggregator.cluster import AGGREGATOR, HEALTHD
from tests.aggregator.cluster import Cluster as Fleet
from tests.aggregator.service import Service
from tests.kubernetes.kit import Cluster, until
from tests.kubernetes.kueue_kit import BASE, Kueue, kueue
from tests.kueue import player

pytestmark = pytest.mark.kubernetes

NODES = ("n1", "n2")
GATE = "healthd.internal/gate"
# One processor for all ranks of a test: the nodes are daemons of this machine, without torch.
CONFIG = AGGREGATOR.replace("[policy]", '[policy]\ncollective = false\nmode = "enforce"')


@pytest.fixture
def queues(oldest: Cluster, tmp_path: Path) -> Iterator[Kueue]:
    with kueue(oldest, tmp_path, NODES) as found:
        yield found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    folder = tmp_path / "fleet"
    folder.mkdir()
    with Fleet(folder) as made:
        made.fleet(*NODES, config=CONFIG)
        yield made


def controller(fleet: Fleet, queues: Kueue) -> Service:
    """The description of `healthd kueue`; `start` it."""
    command = [*HEALTHD, "kueue", "--aggregator", fleet.services["aggregator"].url, "--api-server", queues.url]
    env = {**fleet.env, "HEALTHD_KUEUE_SERVICE_ACCOUNT": str(queues.account)}
    pattern = r"Workloads of Kueue are gated by aggregator (\S+)"
    service = Service("kueue", command, folder=fleet.folder, env=env, pattern=pattern)
    fleet.services["kueue"] = service
    assert sys.executable in command
    return service


def make_check(queues: Kueue, **annotations: str) -> None:
    named = {f"healthd.internal/{key}": text for key, text in annotations.items()}
    metadata = {"name": "healthd", "annotations": named}
    queues.create(
        f"{BASE}/admissionchecks", {"kind": "AdmissionCheck", "metadata": metadata, "spec": {"controllerName": GATE}}
    )


def active(queues: Kueue) -> dict[str, Any]:
    """The condition Active of the AdmissionCheck; empty where it has none."""
    return player.condition(queues.get(f"{BASE}/admissionchecks/healthd"), "Active")


def labelled(queues: Kueue) -> dict[str, str]:
    nodes = queues.get("/api/v1/nodes")["items"]
    return {
        one["metadata"]["name"]: one["metadata"]["labels"][GATE] for one in nodes if GATE in one["metadata"]["labels"]
    }


def leased(fleet: Fleet) -> list[str]:
    found = fleet.services["aggregator"].get("/v1/claims", params={"workload": "kueue:"}).json()
    return sorted(node for claim in found["claims"] for node in claim["nodes"])


def test_a_workload_with_quota_is_admitted_with_the_nodes_that_were_checked(queues: Kueue, fleet: Fleet) -> None:
    make_check(queues)
    controller(fleet, queues).start()
    until("the check is active", lambda: active(queues).get("status") == "True", told=fleet.services["kueue"].said)
    queues.submit("train", count=2)
    found = queues.admitted("train")
    state = player.check_of(found)
    gate = state["podSetUpdates"][0]["nodeSelector"][GATE]
    assert state["state"] == "Ready"
    assert gate in state["message"]
    assert labelled(queues) == dict.fromkeys(NODES, gate)
    assert leased(fleet) == list(NODES)
    assert not player.conflict(found)

    queues.submit("next", count=1)
    queues.quota = 2
    queues.wait("next", "says what it waits for", lambda _: "taken by other jobs" in queues.state("next")["message"])
    queues.change("train", lambda after: player.finished(after, 0))
    queues.admitted("next")
    queues.delete("next")
    until("nothing is held", lambda: not leased(fleet) and not labelled(queues), told=fleet.services["kueue"].said)
