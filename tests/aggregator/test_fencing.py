"""Two aggregators and one database: whoever did not take it over last changes nothing and admits nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.leadership import LEASE_SECONDS, FencedError, NotVacantError
from healthd.aggregator.store.rows import Kind, PutMeta, PutRecord
from healthd.aggregator.store.store import Store
from healthd.aggregator.store.watch import Watch
from healthd.core.errors import StoreError
from healthd.core.model import GateRequest, Verdict
from tests.aggregator.engine_kit import running
from tests.aggregator.postgres import connected, end_sessions
from tests.aggregator.store_kit import QUARANTINE
from tests.aggregator.world import World
from tests.patience import PATIENCE

HOLDS = """
import sys, time
from healthd.aggregator.store.store import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
time.sleep(600)
"""


def taken_over(url: str) -> None:
    """As another aggregator does it, past every lock."""
    with connected(url) as connection:
        connection.exec_driver_sql("UPDATE leadership SET term = term + 1, holder = 'b:7'")


def metas(url: str) -> set[str]:
    with connected(url) as connection:
        return set(connection.execute(sa.text("SELECT key FROM meta")).scalars())


async def test_transaction_of_an_earlier_term_is_refused_and_changes_nothing(url: str) -> None:

    store = Store.open(url)
    await store.write([PutMeta(key="before", value="x")])
    taken_over(url)
    with pytest.raises(FencedError, match=r"was taken over by b:7 \(term 2\), so this aggregator \(term 1\)"):
        await store.write([PutMeta(key="after", value="x")])
    for late in (store.confirm(), store.enrol("n1", "key", now=1.0), store.write([])):
        with pytest.raises(FencedError):
            await late
    assert "taken over by b:7" in (store.trouble() or "")
    store.close()
    assert metas(url) == {"store_id", "lease_key", "schema_readable_by", "before"}


def test_each_opening_has_a_higher_term(url: str) -> None:
    terms = []
    for _ in range(3):
        store = Store.open(url)
        terms.append(store.term)
        store.close()
    assert terms == [1, 2, 3]


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_aggregator_that_lost_its_connection_admits_nothing_on_what_it_remembers(url: str) -> None:
    async def takes_over() -> None:
        async with running(World("n1", "n2"), url) as run:
            gate, decision = await run.admit(nodes=("n2",))
            assert decision.decision is Verdict.ADMIT
            end_sessions(url)
            other = Store.open(url)
            await other.write([PutRecord(kind=Kind.QUARANTINE, key="n1", record=QUARANTINE)])
            other.close()
            with pytest.raises(FencedError):
                await run.engine.ask(GateRequest(job="other", nodes=("n1",)))
            with pytest.raises(FencedError):
                await run.engine.wait(gate.id, 0)

    with pytest.raises(FencedError):  # the engine ends with it
        await takes_over()
    again = Store.open(url)
    loaded = again.load()
    again.close()
    assert (loaded.gates, set(loaded.keys), set(loaded.quarantines)) == ((), {("train", 0)}, {"n1"})


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_aggregator_that_another_replaced_is_fenced_while_that_one_lives(url: str) -> None:

    store = Store.open(url)
    end_sessions(url)
    other = Store.open(url)
    with pytest.raises(FencedError):
        await store.write([PutMeta(key="a", value="b")])
    await other.write([PutMeta(key="c", value="d")])
    store.close()
    other.close()
    assert metas(url) == {"store_id", "lease_key", "schema_readable_by", "c"}


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_aggregator_that_lost_its_connection_to_nobody_goes_on(url: str) -> None:

    async with running(World("n1"), url) as run:
        end_sessions(url)
        await run.store.write([PutMeta(key="a", value="b")])
        _, decision = await run.admit(nodes=("n1",))
        assert decision.decision is Verdict.ADMIT


async def test_aggregator_that_is_at_rest_ends_when_another_took_over(tmp_path: Path) -> None:
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
    async with aggregator(settings, Policy()) as (_, tasks):
        taken_over(settings.database_url)
        with pytest.raises(FencedError, match="stops writing and exits"):
            await asyncio.wait_for(tasks.failure(), 10 * PATIENCE)


# --- one file, several names ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_elsewhere(url: str, code: str = HOLDS) -> Iterator[subprocess.Popen[bytes]]:
    """Another process has the database, for as long as the block."""
    process = subprocess.Popen([sys.executable, "-c", code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_file_in_use_is_refused_under_each_of_its_names(tmp_path: Path) -> None:
    path, link, twin = (tmp_path / name for name in ("a.db", "link.db", "twin.db"))
    with opened_elsewhere(f"sqlite:///{path}"):
        link.symlink_to(path)
        os.link(path, twin)
        for beside in tmp_path.glob("*lock*"):
            beside.unlink()
        for name in (path, link, twin):
            with pytest.raises(StoreError, match="in use by another aggregator"):
                Store.open(f"sqlite:///{name}")
    # It was killed, and its last commits are still in the journal beside the first name.
    with pytest.raises(StoreError, match="under several names"):
        Store.open(f"sqlite:///{twin}")
    twin.unlink()
    store = Store.open(f"sqlite:///{link}")
    assert store.term == 2
    store.close()


def test_file_in_use_by_this_process_is_refused_without_touching_it(tmp_path: Path) -> None:
    """Closing a second descriptor of a file would drop the POSIX locks that SQLite has on it in this process."""
    path = tmp_path / "a.db"
    store = Store.open(f"sqlite:///{path}")
    with pytest.raises(StoreError, match="in use by another aggregator"):
        Store.open(f"sqlite:///{path}")
    locks = Path("/proc/locks").read_text()
    inode = path.stat().st_ino
    held = [line for line in locks.splitlines() if f":{inode} " in line]
    assert any(" POSIX " in line for line in held), held
    assert any(" OFDLCK " in line for line in held), held
    store.close()


# --- one server, several aggregators ----------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_database_is_taken_over_only_from_the_leader_that_was_seen_to_be_gone(url: str) -> None:
    Store.prepare(url)
    watch = Watch(url)
    vacant, over = watch.look()
    assert (vacant.holder, over) == ("", True)
    first = Store.open(url, seen=vacant, advertised="https://first:8090")
    with pytest.raises(NotVacantError):  # two have seen the same
        Store.open(url, seen=vacant)
    seen, over = watch.look()
    assert (seen.term, seen.url, over) == (1, "https://first:8090", False)
    held = threading.Event()
    busy = asyncio.create_task(first.run(lambda _: held.wait(20)))
    await asyncio.sleep(0.2)
    with pytest.raises(NotVacantError):  # it works, though for long
        await asyncio.to_thread(Store.open, url, seen=seen)
    held.set()
    await busy
    first.close()
    given_up, over = watch.look()
    assert (given_up.term, given_up.holder, over) == (1, "", True)
    second = Store.open(url, seen=given_up)
    assert second.term == 2
    second.close()
    watch.close()


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_leader_that_froze_in_the_middle_of_a_transaction_is_followed(url: str) -> None:
    """In a pipeline of statements, which the server's time-out for idle transactions does not end."""
    code = """
import sys
from healthd.aggregator.store.store import Store
connection = Store.open(sys.argv[1])._session.connect()
driver = connection.connection.driver_connection
with driver.pipeline() as pipeline:
    driver.execute("SELECT term FROM leadership FOR UPDATE").fetchall()
    driver.pgconn.send_flush_request()
    driver.pgconn.flush()
    print("open", flush=True)
    sys.stdin.read()
"""
    with opened_elsewhere(url, code):
        watch = Watch(url)
        seen, _ = watch.look()
        end = time.monotonic() + 2 * LEASE_SECONDS * PATIENCE
        while True:
            try:
                store = Store.open(url, seen=seen)
                break
            except NotVacantError:
                assert time.monotonic() < end, "nobody takes over"
                time.sleep(0.2)
        assert store.term == 2
        store.close()
        watch.close()


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_same_term_of_another_holder_is_refused(url: str) -> None:
    """As after a failover to a server that had not yet heard of the takeover, and gives its term once more."""
    store = Store.open(url)
    with connected(url) as connection:
        connection.exec_driver_sql("UPDATE leadership SET holder = 'b:7'")
    with pytest.raises(FencedError, match="taken over by b:7"):
        await store.write([PutMeta(key="late", value="x")])
    store.close()
    assert "late" not in metas(url)


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_read_only_server_is_one_that_is_away_and_the_leader_goes_on_after_it(url: str) -> None:
    """A standby of the database was reached: after a failover, or by an address that names any of its servers."""
    name = url.rpartition("/")[2]
    async with running(World("n1"), url) as run:
        with connected(url) as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        end_sessions(url)
        with pytest.raises(StoreError, match=r"read-only.*target_session_attrs=read-write"):
            await run.store.write([PutMeta(key="a", value="b")])
        assert "read-only" in (run.store.trouble() or "")
        with pytest.raises(StoreError, match="read-only"):
            Store.open(url)
        with connected(url) as connection:
            connection.exec_driver_sql("SET transaction_read_only = off; SET default_transaction_read_only = off")
            connection.exec_driver_sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        _, decision = await run.admit(nodes=("n1",))
        assert (decision.decision, run.store.term) == (Verdict.ADMIT, 1)


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_lease_that_is_not_renewed_is_over_by_our_own_clock(url: str) -> None:
    store = Store.open(url)
    assert store.leads()
    store._session.renewed_at -= LEASE_SECONDS
    assert not store.leads()
    await store.write([])
    assert store.leads(), "whatever is written renews it"
    store.close()
