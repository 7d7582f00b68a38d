"""
Screening of three real daemons: faults appear while nobody looks, and a job that comes does not wait.

Three weeks are some seconds here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster, ask
from tests.aggregator.service import until
from tests.patience import PATIENCE

NODES = ("n1", "n2", "n3")
YIELD_SECONDS = 5.0
"""From the request of a gate to free devices."""
# Nothing is planned while the aggregator is not sure that its database is whole.
CONFIG = f"""
{AGGREGATOR.replace('recovery = "30s"', 'recovery = "1s"')}
[screening]
tier = "deep"
"""
LONG = """
[checks.digest]
repeats = 100000000
timeout = "10m"
"""


def program(folder: Path, node: str) -> str:
    """A deep check that fails while a file of its node is there."""
    return f"""
[programs.heat]
command = ["sh", "-c", "sleep 0.2; if test -e {folder}/{node}.hot; then echo too hot; exit 2; fi; echo cool"]
tier = "deep"
"""


def history(url: str, node: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/v1/nodes/{node}/history", params={"limit": 200}, trust_env=False)
    if answer.status_code == 404:
        return []  # it has not reported yet
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["events"]
    return found


def kinds(url: str, node: str) -> list[str]:
    return [one["kind"] for one in history(url, node)]


def figure(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.search(rf'^healthd_screening_{name}{{pool="a"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.timeout(120)
def test_faults_that_appear_over_the_weeks_are_found_one_node_at_a_time(tmp_path: Path) -> None:
    with Cluster(tmp_path, checks=("memory_free", "heat")) as cluster:
        aggregator = cluster.aggregator(config=f'{CONFIG}every = "8s"\n').start()
        url = aggregator.url
        for name in NODES:
            cluster.node(name, aggregator=url, extra=program(tmp_path, name)).start(ready=False)
        cluster.healthy(*NODES)
        at_once = 0.0

        def screened(times: int) -> bool:
            nonlocal at_once
            at_once = max(at_once, figure(url, "running_nodes"))
            return all(kinds(url, name).count("screened") >= times for name in NODES)

        until(lambda: screened(2), 60)
        assert at_once <= 1, "a twentieth of three nodes is one"
        assert figure(url, "due_nodes") == 0
        (tmp_path / "n2.hot").touch()
        until(lambda: "screening failed" in kinds(url, "n2"), 30)
        node = httpx.get(f"{url}/v1/nodes/n2", trust_env=False).json()
        assert node["health"] == "unhealthy"
        assert "screening failed" not in kinds(url, "n1")


def has_device(cluster: Cluster, node: str) -> bool:
    """Whether a process of the node has its device open."""
    device = str(cluster.run_dir(node) / "devices" / "cpu0")
    for pid in cluster.alive():
        with contextlib.suppress(OSError):
            if any(os.readlink(one) == device for one in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return False


@pytest.mark.timeout(120)
def test_a_job_has_the_devices_within_five_seconds_of_its_question(tmp_path: Path) -> None:
    with Cluster(tmp_path, checks=("memory_free", "digest")) as cluster:
        aggregator = cluster.aggregator(config=f'{CONFIG}every = "2m"\n').start()
        url = aggregator.url
        for name in NODES:
            cluster.node(name, "--unprompted", "off", aggregator=url, extra=LONG).start(ready=False)
        screened = lambda: [name for name in NODES if has_device(cluster, name)]  # noqa: E731
        until(lambda: bool(screened()), 60)
        (node,) = screened()
        began = time.monotonic()
        decision = ask(url, "train", [node], wait=20.0, tier="passive", collective=False)
        took = time.monotonic() - began
        assert decision["decision"] == "admit", decision
        assert not has_device(cluster, node)
        assert took < YIELD_SECONDS * PATIENCE
        assert "screening yields" in kinds(url, node)
        until(lambda: bool(screened()), 30)
        assert node not in screened(), "another node is free"


@pytest.mark.timeout(120)
def test_pairs_of_free_nodes_run_collectives(tmp_path: Path) -> None:
    with Cluster(tmp_path, checks=("memory_free", "heat", "all_reduce")) as cluster:
        config = (
            CONFIG.replace("[policy]", '[policy]\ncollective_checks = ["all_reduce"]') + 'every = "2m"\nshare = 1.0\n'
        )
        aggregator = cluster.aggregator(config=config).start()
        url = aggregator.url
        for name in NODES:
            cluster.node(name, "--unprompted", "off", aggregator=url, extra=program(tmp_path, name)).start(ready=False)

        def told(node: str) -> list[str]:
            return [f"{one['kind']}: {one['message']}" for one in history(url, node)]

        until(
            lambda: sum(any("screened: collectives" in one for one in told(name)) for name in NODES) >= 2,
            60,
            lambda: str([told(name) for name in NODES]),
        )
