"""A fleet of several shards for tests: aggregators on one PostgreSQL, and nodes with the label of the shards."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx

from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.service import Service, free_port, until

SHARDED = f'{AGGREGATOR}\n[aggregator]\nshard_label = "part"\n'


class Fleet:
    """Aggregators on one database, made one after another, and what they say of the shards."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster, self._url = cluster, url
        self.aggregators: list[Service] = []
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]

    def add(self) -> Service:
        number = len(self.aggregators)
        asked = ("--database", self._url, "--listen", self._addresses[number])
        service = self.cluster.aggregator(*asked, config=SHARDED, name=f"agg{number + 1}").start()
        self.aggregators.append(service)
        return service

    def node(self, name: str, part: str | None) -> None:
        label = () if part is None else ("--label", f"part={part}")
        urls = [argument for one in self._addresses for argument in ("--aggregator", f"http://{one}")]
        self.cluster.node(name, *urls, *label).start()

    def begin(self) -> tuple[Service, Service]:
        """Two aggregators that lead a shard each, `default` with node n1 and `b` with n2, which are healthy."""
        first, second = self.add(), self.add()
        self.node("n1", None)
        self.node("n2", "b")
        self.wait_for_shares(first, [1, 1])
        self.cluster.healthy("n1")
        self.cluster.healthy("n2")
        return first, second

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
