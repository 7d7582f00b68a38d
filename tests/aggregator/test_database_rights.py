"""The database's user has the rights of docs/high_availability.md and no more, whether it owns the database or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from healthd.aggregator.store import LEASE_SECONDS, NotVacantError, Store, Watch
from healthd.aggregator.store.rows import PutEvent, PutMeta
from tests.aggregator.cluster import Cluster
from tests.aggregator.postgres import connected
from tests.aggregator.service import readiness, until
from tests.patience import PATIENCE

pytestmark = pytest.mark.system


@pytest.fixture
def owned(postgres: str) -> Iterator[str]:
    """The URL of a database by its owner, made as the document says."""
    with connected(postgres) as connection:
        for statement in (
            "CREATE ROLE owner LOGIN PASSWORD 'secret'",
            "CREATE DATABASE owned OWNER owner",
            "REVOKE ALL ON DATABASE owned FROM PUBLIC",
        ):
            connection.exec_driver_sql(statement)
        yield sa.make_url(postgres).set(username="owner", database="owned").render_as_string()
        connection.exec_driver_sql("DROP DATABASE owned WITH (FORCE)")
        connection.exec_driver_sql("DROP ROLE owner")


def test_owner_of_the_database_has_all_rights_that_two_aggregators_need(owned: str, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        first, second = (cluster.aggregator("--database", owned, name=name).start() for name in ("first", "second"))
        cluster.node("n1", "--aggregator", second.url, aggregator=first.url).start()
        cluster.healthy("n1")
        admitted = cluster.gate(second.url, "j", "--node", "n1")
        assert admitted.code == 0, admitted.err + first.said() + second.said()
        told = cluster.healthd("aggregator", "--database", owned, "--step-down")
        assert told.code == 0, told.err
        until(lambda: readiness(second).startswith("leader"), 10, second.said)


def test_owner_of_the_database_may_end_the_session_of_a_leader_that_froze(owned: str) -> None:
    Store.open(owned).close()
    with pytest.raises(psycopg.OperationalError):
        be_followed_while_frozen(owned)


def be_followed_while_frozen(url: str) -> None:
    """Lead, freeze within a transaction until another one leads, and go on."""
    watch = Watch(url)
    driver = sa.make_url(url).set(drivername="postgresql").render_as_string()
    with psycopg.connect(driver) as frozen, frozen.pipeline():
        frozen.execute("UPDATE leadership SET holder = 'frozen:1' RETURNING term").fetchall()
        frozen.pgconn.send_flush_request()
        frozen.pgconn.flush()
        end = time.monotonic() + 2 * LEASE_SECONDS * PATIENCE
        while True:
            try:
                Store.open(url, seen=watch.look()[0]).close()
                break
            except NotVacantError:
                assert time.monotonic() < end, "nobody takes over"
                time.sleep(0.2)
        watch.close()
        frozen.execute("SELECT 1").fetchall()


@pytest.fixture
def writer(postgres: str, owned: str) -> Iterator[str]:
    """The same database by a user who owns nothing there, with the rights that the document names."""
    Store.open(owned).close()
    there = sa.make_url(postgres).set(database="owned")
    with connected(there.render_as_string()) as connection:
        for statement in (
            "CREATE ROLE writer LOGIN",
            "GRANT CONNECT ON DATABASE owned TO writer",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO writer",
            "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO writer",
        ):
            connection.exec_driver_sql(statement)
        yield there.set(username="writer").render_as_string()
        connection.exec_driver_sql("DROP OWNED BY writer")
        connection.exec_driver_sql("DROP ROLE writer")


async def test_user_with_rights_on_the_tables_alone_leads(writer: str) -> None:
    Store.prepare(writer, "https://agg-1.example:8090")
    store, watch = Store.open(writer), Watch(writer, "https://agg-1.example:8090")
    assert watch.look()[0].holder == store.holder
    event = PutEvent(at=1.0, subject="n1", kind="heard", message="")
    await store.write([PutMeta(key="a", value="b"), event])
    assert await store.enrol("n1", "key", now=1.0) == "key"
    assert store.load().meta["a"] == "b"
    watch.leave()
    with connected(writer) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM aggregators").scalar_one() == 0
    for opened in (watch, store):
        opened.close()
