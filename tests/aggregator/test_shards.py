"""Several aggregators that share the shards of a fleet on one PostgreSQL, as processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster, release
from tests.aggregator.service import Service, until

pytestmark = [pytest.mark.system, pytest.mark.parametrize("url", ["postgresql"], indirect=True)]

SHARDED = f'{AGGREGATOR}\n[aggregator]\nshard_label = "part"\n'
TAKEOVER_SECONDS = 10.0


class Fleet:
    """Aggregators on one database, made one after another, and what they say of the shards."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster, self._url = cluster, url
        self.aggregators: list[Service] = []

    def add(self) -> Service:
        name = f"agg{len(self.aggregators) + 1}"
        service = self.cluster.aggregator("--database", self._url, config=SHARDED, name=name).start()
        self.aggregators.append(service)
        return service

    def node(self, name: str, part: str | None) -> None:
        label = () if part is None else ("--label", f"part={part}")
        urls = [argument for one in self.aggregators for argument in ("--aggregator", one.url)]
        self.cluster.node(name, *urls, *label).start()

    def led(self, asked: Service) -> dict[str, str | None]:
        """Who leads each shard, as one of them knows it."""
        with contextlib.suppress(httpx.TransportError):
            found: Any = asked.get("/v1/shards").json()
            return {row["shard"]: row["leader"] for row in found["shards"]}
        return {}

    def counts(self, asked: Service) -> list[int]:
        leaders = list(self.led(asked).values())
        return sorted(leaders.count(leader) for leader in {*leaders})

    def wait_for_shares(self, asked: Service, shares: list[int], seconds: float = 20.0) -> None:
        until(lambda: self.counts(asked) == shares and None not in self.led(asked).values(), seconds, self.said)

    def said(self) -> str:
        return "\n".join(one.said() for one in self.aggregators)


@pytest.fixture
def fleet(tmp_path: Path, url: str) -> Iterator[Fleet]:
    with Cluster(tmp_path) as cluster:
        yield Fleet(cluster, url)


def test_two_aggregators_lead_a_shard_each_and_gate_in_it(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    fleet.node("n1", None)
    fleet.node("n2", "b")
    fleet.wait_for_shares(first, [1, 1])
    fleet.cluster.healthy("n1")
    fleet.cluster.healthy("n2")
    for asked in (first, second):
        for node in ("n1", "n2"):
            admitted = fleet.cluster.gate(asked.url, f"{node}-by-{asked.name}", "--node", node, "--wait", "60s")
            assert admitted.code == 0, admitted.err + fleet.said()
            release(asked.url, admitted.json["id"])
    refused = fleet.cluster.gate(first.url, "both", "--node", "n1", "--node", "n2")
    assert refused.code == 2, refused
    assert "n2 is of b, n1 of default" in refused.err
