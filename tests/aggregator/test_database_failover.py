"""The database's own failover: a real streaming replica is reached as a read-only standby, and is then promoted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from healthd.aggregator.store import FencedError, Store
from healthd.aggregator.store.rows import PutMeta
from tests.aggregator.cluster import Cluster, release
from tests.aggregator.postgres import Replicated, connected, replicated
from tests.aggregator.service import Service, readiness, until

pytestmark = pytest.mark.system


class Quarantines:
    """Somebody who keeps nodes out, one after the other, by any aggregator that answers; `kept` are those answered."""

    def __init__(self, aggregators: list[Service]) -> None:
        self.kept: list[str] = []
        self._aggregators = itertools.cycle(aggregators)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Quarantines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=20.0) as http:
            for number in itertools.count():
                node, url = f"kept-{number}", next(self._aggregators).url
                if self._over.is_set():
                    return
                try:
                    answer = http.put(f"{url}/v1/nodes/{node}/quarantine?unseen=true", json={"reason": "ticket 4711"})
                except httpx.TransportError:
                    continue
                assert answer.status_code in (200, 503), answer.text
                if answer.status_code == 200:
                    self.kept.append(node)


def test_failover_to_a_synchronous_replica_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    with replicated(synchronous=True) as servers, Cluster(tmp_path) as cluster:
        first = cluster.aggregator("--database", servers.url, name="first").start()
        second = cluster.aggregator("--database", servers.listed, name="second").start()
        cluster.node("n1", "--aggregator", second.url, aggregator=first.url).start()
        cluster.healthy("n1")
        admitted = cluster.gate(second.url, "first", "--node", "n1")
        assert admitted.code == 0, admitted.err
        waits = cluster.start("gate", "--aggregator", second.url, "--job", "next", "--node", "n1", "--wait", "120s")
        until(lambda: bool(first.get("/v1/gates?job=next").json()["gates"]))
        with Quarantines([first, second]) as person:
            until(lambda: len(person.kept) >= 5)
            servers.fail_over()
            for service in (first, second):
                until(lambda service=service: "read-only" in readiness(service), 30, service.said)  # type: ignore[misc]
                assert service.get("/readyz").status_code == 503
            answered = len(person.kept)
            servers.promote()
            until(lambda: any(leads(one) for one in (first, second)), 20, lambda: first.said() + second.said())
            until(lambda: len(person.kept) > answered, 30, lambda: first.said() + second.said())
        with connected(servers.standby.url) as connection:
            written = connection.exec_driver_sql("SELECT key FROM records WHERE kind = 'quarantine'").scalars()
            assert set(person.kept) <= set(written)
        for service in (first, second):
            found = {row["node"] for row in service.get("/v1/nodes?limit=1000").json()["nodes"] if row["quarantine"]}
            assert set(person.kept) <= found
            shown = service.get("/v1/nodes/n1").json()
            assert [lease["lease"]["job"] for lease in shown["grants"]] == ["first"]
        assert waits.process.poll() is None, "the gate waits on"
        release(second.url, admitted.json["id"])
        said = waits.said(90)
        assert said.code == 0, said.err + first.said() + second.said()


def leads(service: Service) -> bool:
    return readiness(service).startswith("leader")


@pytest.fixture
def servers() -> Iterator[Replicated]:
    with replicated(synchronous=False) as both:
        yield both


async def test_leader_of_a_history_that_was_lost_in_a_failover_writes_nothing_more(servers: Replicated) -> None:
    """Without synchronous replication: the replica has not heard of the last takeover, and gives its term once more."""
    first = Store.open(servers.url)
    await first.write([PutMeta(key="before", value="x")])
    servers.wait_until_caught_up()
    servers.stream.switch("tcp://127.0.0.1:9")
    lost = Store.open(servers.url)
    await lost.write([PutMeta(key="lost", value="x")])
    servers.fail_over()
    servers.promote()
    await first.write([PutMeta(key="goes on", value="x")])  # nobody has followed it, in the history that there is
    third = Store.open(servers.url)
    with pytest.raises(
        FencedError, match=r"taken over by .* \(term 2\), so this aggregator \(term 2\) no longer leads"
    ):
        await lost.write([PutMeta(key="late", value="x")])
    await third.write([PutMeta(key="third", value="x")])
    for store in (first, lost, third):
        store.close()
    with connected(servers.standby.url) as connection:
        found = set(connection.exec_driver_sql("SELECT key FROM meta").scalars())
    assert found == {"store_id", "lease_key", "schema_readable_by", "before", "goes on", "third"}
