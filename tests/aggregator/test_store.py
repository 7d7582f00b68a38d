"""The database: what is written is there after a restart, and what cannot be is one clear line."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa

from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.gate.records import LeaseRow, LeaseState, Override
from healthd.aggregator.jobs.outcome_records import Fault, GateEnding, GateFacts
from healthd.aggregator.store import reading
from healthd.aggregator.store.reading import read_history
from healthd.aggregator.store.rows import (
    Change,
    ForgetNode,
    Kind,
    PutEvent,
    PutEvidence,
    PutGate,
    PutKey,
    PutLease,
    PutMeta,
    PutNode,
    PutOutcome,
    PutRecord,
    apply_changes,
)
from healthd.aggregator.store.store import Store
from healthd.core.errors import ConfigError, HealthdError, StoreError
from healthd.core.model import Verdict
from tests.aggregator.store_kit import QUARANTINE, ended, gate
from tests.aggregator.world import NOW, POLICY, lease, state
from tests.every import every
from tests.patience import PATIENCE

T = TypeVar("T")


def wait_until_refused(url: str) -> None:
    """Until the server has read its rules anew."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            return
        time.sleep(0.02)
    pytest.fail("the server lets a wrong password in")


def row(lease_id: str, state: LeaseState, gate_id: str = "g-0") -> LeaseRow:
    return LeaseRow(node="n1", lease=lease(lease_id, gate_id=gate_id), state=state, granted_at=NOW)


OVERRIDE = Override(job="train", reason="deadline", owner="ana", since=NOW, until=NOW + 60)


async def test_all_that_must_survive_does(url: str) -> None:
    store = Store.open(url)
    first = store.store_id, store.term
    written: list[Change] = [
        PutGate(gate=gate(1)),
        PutGate(gate=ended(2)),
        PutEvidence(gate=ended(2).id, states=(state("n1"),)),
        PutLease(row=row("open", LeaseState.ACKNOWLEDGED)),
        PutLease(row=row("shut", LeaseState.CLOSED)),
        PutRecord(kind=Kind.QUARANTINE, key="n1", record=QUARANTINE),
        PutRecord(kind=Kind.OVERRIDE, key="train", record=OVERRIDE),
        PutOutcome(gate=ended(2).id, job="train", attempt=2, status="failed", message="NaN", told_at=NOW),
        PutNode(node="n1", labels={"pool": "a"}, seen_at=NOW),
        PutMeta(key="established", value="yes"),
        PutEvent(at=NOW, subject="n1", kind="quarantined", message="by ana"),
    ]
    await store.write(written)
    assert await store.enrol("n1", "key-one", now=NOW) == "key-one"
    assert await store.enrol("n1", "key-two", now=NOW) == "key-one"
    await store.write(written[:10])
    store.close()
    store = Store.open(url)
    loaded = store.load()
    assert (store.store_id, store.term) == (first[0], first[1] + 1)
    assert loaded.gates == (gate(1),)
    assert loaded.keys == {("train", 1): gate(1).id, ("train", 2): gate(2).id}
    assert loaded.leases == (row("open", LeaseState.ACKNOWLEDGED),)
    assert (loaded.quarantines, loaded.overrides) == ({"n1": QUARANTINE}, {"train": OVERRIDE})
    assert (loaded.nodes[0].key_hash, loaded.nodes[0].labels) == ("key-one", {"pool": "a"})
    assert loaded.meta["established"] == "yes"
    assert await store.run(lambda c: reading.read_gate(c, ended(2).id)) == ended(2)
    (kept,) = await store.run(lambda c: reading.read_evidence(c, ended(2).id))
    assert kept.results == state("n1").results
    outcome = await store.run(lambda c: reading.read_outcome(c, ended(2).id))
    assert outcome == written[7]
    assert [e.kind for e in await store.run(lambda c: read_history(c, "n1", limit=9))] == ["quarantined"]
    newest = await store.run(lambda c: reading.read_gates(c, limit=1, before=None, job="train"))
    assert [g.id for g in newest] == [gate(2).id]
    await store.write([ForgetNode(node="n1"), PutRecord(kind=Kind.OVERRIDE, key="train", record=None)])
    assert (store.load().nodes, store.load().quarantines, store.load().overrides) == ((), {}, {})
    store.close()


async def test_name_that_no_database_can_hold_is_no_gates_and_no_failure(url: str) -> None:
    """PostgreSQL refuses a NUL, and whoever may read could have the connection dropped with it."""
    store = Store.open(url)
    for name in ("a\0b", "\ud800"):
        assert await store.run(lambda c, job=name: reading.read_gates(c, limit=1, before=None, job=job)) == ()
        assert await store.run(lambda c, gate=name: reading.read_gates(c, limit=1, before=gate, job=None)) == ()
    assert (store.failures, store.failing) == (0, False)
    store.close()


async def test_a_transaction_is_all_or_nothing_and_does_not_take_its_neighbours_down(url: str) -> None:
    store = Store.open(url)
    same_key = new_gate("g-ffffffffffff-00", gate(1).request, POLICY, NOW)
    bad = store.write([PutNode(node="n2", labels={}, seen_at=NOW), PutGate(gate=gate(1)), PutGate(gate=same_key)])
    good = [store.write([PutNode(node=f"m{i}", labels={}, seen_at=NOW)]) for i in range(20)]
    results = await asyncio.gather(bad, *good, return_exceptions=True)
    assert isinstance(results[0], StoreError)
    assert results[1:] == [None] * 20
    loaded = store.load()
    assert [n.node for n in loaded.nodes] == sorted(f"m{i}" for i in range(20))
    assert loaded.gates == ()
    store.close()


async def test_pruning_keeps_open_gates_and_those_with_leases_and_bounds_the_rest(url: str) -> None:
    store = Store.open(url)
    await store.write([PutGate(gate=ended(number)) for number in range(1, 9)])
    await store.write([PutGate(gate=gate(100, job="held")), PutEvidence(gate=ended(1).id, states=(state("n1"),))])
    await store.write([PutLease(row=row("open", LeaseState.GRANTED, ended(1).id))])
    await store.write([PutLease(row=row("shut", LeaseState.CLOSED, ended(2).id))])
    await store.write([PutEvent(at=NOW, subject="n1", kind="x", message=str(n)) for n in range(9)])
    dropped = await store.run(lambda c: reading.prune(c, before=NOW + 4, most_gates=3, most_events=5))
    assert dropped == tuple(ended(number).id for number in range(2, 7))
    assert [e.message for e in await store.run(lambda c: read_history(c, "n1", limit=9))] == list("87654")
    store.close()


async def test_nodes_that_come_at_once_are_enrolled_together_and_one_that_leaves_takes_none_with_it(url: str) -> None:
    transactions = 0

    class Counting(Store):
        async def run(self, work: Callable[[sa.Connection], T], *, seconds: float = 5.0) -> T:
            nonlocal transactions
            transactions += 1
            if transactions == 3:  # that of the first of those who waited, on behalf of 500
                asyncio.get_running_loop().call_soon(coming[0].cancel)
            return await super().run(work, seconds=seconds)

    store = Counting.open(url)
    assert await store.enrol("n007", "first", now=NOW) == "first"
    under_way = asyncio.ensure_future(store.enrol("n900", "key-900", now=NOW))
    await asyncio.sleep(0)
    coming = [asyncio.ensure_future(store.enrol(f"n{n:03}", f"key-{n}", now=NOW)) for n in range(900)]
    found = await asyncio.gather(*coming, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [f"key-{n}" if n != 7 else "first" for n in range(1, 900)]
    assert await under_way == "key-900"
    assert transactions == 5
    store.close()


async def test_history_of_jobs_goes_with_their_gates_where_there_are_more_than_are_kept(url: str) -> None:
    """Each job has a name of its own, so that no bound for each name is one for all."""
    store = Store.open(url)
    gates = [ended(number, f"job-{number}") for number in range(1, 9)]
    for one in gates:
        said = PutEvent(at=one.created_at, subject=f"job:{one.request.job}", kind="admit", message="m")
        await store.write([PutGate(gate=one), said])
    await store.write([PutLease(row=row("open", LeaseState.GRANTED, gates[0].id))])
    await store.write([PutEvent(at=gates[0].created_at, subject="n1", kind="x", message="m")])

    async def left(most_gates: int) -> list[str]:
        await store.run(lambda c: reading.prune(c, before=0.0, most_gates=most_gates, most_events=5))
        return [event.subject for event in await store.run(lambda c: read_history(c, None, limit=99))]

    assert len(await left(8)) == 9
    running, *others = [f"job:{one.request.job}" for one in gates]
    assert sorted(await left(3)) == sorted(["n1", running, *others[-3:]])
    store.close()


async def test_pruning_costs_little_for_each_event_that_stays() -> None:
    """Of 10,000 nodes with 200 events each: while they are looked through, no gate gets an answer."""
    store, nodes, most = Store.open("sqlite://"), 20, 100
    kept = [PutEvent(at=NOW + n, subject=f"n{n % nodes}", kind="x", message="m") for n in range(nodes * most)]
    await store.write([*kept, PutEvent(at=NOW - 1, subject="n1", kind="x", message="one more")])
    steps = []

    def prune(connection: sa.Connection) -> None:
        line = connection.connection.driver_connection
        assert line is not None
        line.set_progress_handler(lambda: steps.append(1), 100)  # of SQLite's virtual machine
        reading.prune(connection, before=NOW, most_gates=9, most_events=most)
        line.set_progress_handler(None, 0)

    await store.run(prune)
    assert len(await store.run(lambda c: read_history(c, "n1", limit=999))) == most
    assert 100 * len(steps) < 15 * len(kept)
    store.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_two_aggregators_do_not_share_a_file(url: str) -> None:
    store = Store.open(url)
    with pytest.raises(StoreError, match="in use by another aggregator"):
        Store.open(url)
    store.close()
    Store.open(url).close()


def test_a_database_of_the_first_schema_gets_the_tables_of_today(url: str) -> None:
    Store.open(url).close()
    engine = sa.create_engine(url)
    today = tables_of(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE aggregators")
        connection.exec_driver_sql("DROP TABLE quarantined")
        connection.exec_driver_sql("DROP TABLE repairs")
        make_tables_of_facts(connection)
        connection.exec_driver_sql("DROP TABLE notes")
        connection.exec_driver_sql("DROP TABLE postmortems")
        connection.exec_driver_sql("CREATE TABLE baselines (id VARCHAR(16) PRIMARY KEY, record TEXT, samples TEXT)")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '1'")
    Store.open(url).close()
    assert tables_of(engine) == today
    engine.dispose()


FACTS_COLUMNS = {
    "gate_facts": "gate VARCHAR(64) PRIMARY KEY REFERENCES gates (id) ON DELETE CASCADE, decided_at DOUBLE PRECISION, "
    "way VARCHAR(16), would VARCHAR(16), alarmed BOOLEAN, clean BOOLEAN, wait_seconds DOUBLE PRECISION, "
    "device_seconds DOUBLE PRECISION",
    "gate_faults": "gate VARCHAR(64) REFERENCES gates (id) ON DELETE CASCADE, number INTEGER, node VARCHAR(253), "
    "check_name VARCHAR(128), code VARCHAR(64), left_out BOOLEAN, PRIMARY KEY (gate, number)",
}
"""Two tables that databases had up to the sixth schema."""


def make_tables_of_facts(connection: sa.Connection) -> None:
    for table, columns in FACTS_COLUMNS.items():
        connection.exec_driver_sql(f"CREATE TABLE {table} ({columns})")


async def test_a_database_of_the_sixth_schema_keeps_the_facts_of_its_gates(url: str) -> None:
    """Reports over the time before the upgrade stay what they were."""
    store = Store.open(url)
    await store.write([PutGate(gate=ended(number)) for number in range(3)])
    store.close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        make_tables_of_facts(connection)
        connection.exec_driver_sql("DROP TABLE repairs")
        connection.exec_driver_sql("CREATE TABLE placements (node VARCHAR(253) PRIMARY KEY, shard VARCHAR(253))")
        for number in range(3):
            facts = f"'{ended(number).id}', {NOW + number}, 'observed', 'reject', TRUE, FALSE, 2.5, 8.0"
            connection.exec_driver_sql(f"INSERT INTO gate_facts VALUES ({facts})")
        for number in range(2):
            fault = f"'{ended(1).id}', {number}, 'n{number}', 'matmul', 'WrongResult', {number == 1}"
            connection.exec_driver_sql(f"INSERT INTO gate_faults VALUES ({fault})")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '6'")
    store = Store.open(url)
    found = await store.run(lambda c: [facts for facts, _ in reading.read_facts_since(c, NOW + 1)])
    store.close()
    faults = (
        Fault(node="n0", check="matmul", code="WrongResult", out=False),
        Fault(node="n1", check="matmul", code="WrongResult", out=True),
    )
    assert sorted(found, key=lambda facts: facts.gate) == [
        GateFacts(
            gate=ended(number).id,
            decided_at=NOW + number,
            way=GateEnding.OBSERVED,
            would=Verdict.REJECT,
            alarmed=True,
            clean=False,
            wait_seconds=2.5,
            device_seconds=8.0,
            faults=faults if number == 1 else (),
        )
        for number in (1, 2)
    ]
    assert not {*FACTS_COLUMNS, "placements"} & {*sa.inspect(engine).get_table_names()}
    engine.dispose()


def tables_of(engine: sa.Engine) -> dict[str, tuple[list[str], set[str | None]]]:
    """By table its columns, with their types, and its indexes."""
    seen = sa.inspect(engine)
    return {
        name: (
            [f"{column['name']} {column['type']} {column['nullable']}" for column in seen.get_columns(name)],
            {index["name"] for index in seen.get_indexes(name)},
        )
        for name in seen.get_table_names()
    }


def test_a_database_of_the_third_schema_keeps_its_term(url: str) -> None:
    Store.open(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE aggregators")
        connection.exec_driver_sql("DROP TABLE quarantined")
        connection.exec_driver_sql("DROP TABLE repairs")
        make_tables_of_facts(connection)
        connection.exec_driver_sql("DROP TABLE leadership")
        columns = "id INTEGER PRIMARY KEY, term INTEGER, holder VARCHAR(300), renewed DOUBLE PRECISION"
        connection.exec_driver_sql(f"CREATE TABLE leadership ({columns})")
        connection.exec_driver_sql("INSERT INTO leadership VALUES (1, 7, 'old:1', 1000.0)")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '3'")
    store = Store.open(url)
    assert store.term == 8
    store.close()
    with engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT shard, term FROM leadership").one()
    assert tuple(row) == ("default", 8)
    engine.dispose()


@pytest.mark.parametrize(
    "change", ["DELETE FROM meta WHERE key = 'schema_readable_by'", "UPDATE meta SET value = '9998'"]
)
def test_a_database_of_another_schema_is_refused(url: str, change: str) -> None:
    Store.open(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.exec_driver_sql(change)
    engine.dispose()
    with pytest.raises(StoreError, match=r"\(schema 9999\); upgrade healthd, or use another"):
        Store.open(url)


def test_tables_of_somebody_else_are_not_taken_over(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE events (x INTEGER)")
    with pytest.raises(StoreError, match="events"):
        Store.open(url)
    assert sa.inspect(engine).get_table_names() == ["events"]
    engine.dispose()


async def test_more_records_go_in_one_transaction_than_a_statement_has_parameters(url: str) -> None:
    names = [f"n{number}" for number in range(70_000)]

    store = Store.open(url)
    await store.write([PutRecord(kind=Kind.QUARANTINE, key=name, record=QUARANTINE) for name in ("n1", "kept")])
    gone = [PutRecord(kind=Kind.QUARANTINE, key=name, record=None) for name in names]
    await store.run(lambda connection: apply_changes(connection, gone), seconds=60.0 * PATIENCE)
    assert set(store.load().quarantines) == {"kept"}
    store.close()


def test_a_record_of_a_newer_healthd_is_told_at_the_start(url: str) -> None:
    Store.open(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO records (kind, key, record) VALUES ('wish', 'n1', '{}')")
    engine.dispose()
    store = Store.open(url)
    with pytest.raises(HealthdError, match="n1 of kind 'wish' was written by a newer healthd; upgrade healthd"):
        store.load()
    store.close()


def test_a_file_that_is_no_database_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.db"
    path.write_bytes(b"this is not a database, it is a letter" * 200)
    with pytest.raises(StoreError, match=f"database {path}: file is not a database; restore a backup"):
        Store.open(f"sqlite:///{path}")
    assert path.read_bytes().startswith(b"this is not")


def test_a_damaged_database_is_noticed_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.db"

    async def fill() -> None:
        store = Store.open(f"sqlite:///{path}")
        await store.write([PutGate(gate=ended(number)) for number in range(1, 200)])
        store.close()

    asyncio.run(fill())
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = bytearray(path.read_bytes())
    for page in range(5, len(whole) // 4096):
        whole[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    path.write_bytes(whole)
    with pytest.raises(StoreError, match=r"(damaged|malformed).*restore a backup"):
        Store.open(f"sqlite:///{path}")


def test_a_directory_that_is_missing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make its directory exist and be writable"):
        Store.open(f"sqlite:///{tmp_path}/missing/aggregator.db")


def line_of(url: str, kind: type[HealthdError]) -> str:
    """The one line of an opening that fails, which must not have the password in it."""
    with pytest.raises(kind) as caught:
        Store.open(url)
    line = str(caught.value)
    assert "\n" not in line
    assert "hunter2" not in line
    return line


@every(
    ("url", "text"),
    [
        ("my database", "not a database URL"),
        ("hunter2", "write sqlite:///PATH"),
        ("sqlite:/relative.db", "not a database URL"),
        ("sqlite://folder/aggregator.db", "a file has no host"),
        ("mysql://u:hunter2@db/healthd", "mysql is not a supported database"),
        ("https://u:hunter2@db/healthd", "https is not a supported database"),
        ("postgresql+psycopg://u:hunter2@db:port/healthd", "is its port a number?"),
        ("postgresql+psycopg://u:hunter2@db:99999/healthd", "99999 is not a port"),
        ("postgresql+psycopg://u:x@hunter2@db/healthd", "write it as %40"),
        ("postgresql+nodriver://u:hunter2@db/healthd", "pip install psycopg[binary]"),
        ("postgresql+pg8000://u:hunter2@db/healthd", "needs pg8000, which is not installed"),
        ("sqlite+pysqlcipher://:hunter2@/x.db", "sqlite+pysqlcipher needs"),
        ("postgresql+psycopg://u:hunter2@127.0.0.1:1/healthd?hosst=x", "correct the part after ?"),
    ],
)
def test_a_url_that_cannot_be_right_is_a_fault_of_the_configuration(url: str, text: str) -> None:
    line = line_of(url, ConfigError)
    assert text in line
    assert "database" in line


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql+psycopg://u:hunter2@127.0.0.1:1/healthd", "Connection refused; start the server"),
        ("postgresql+psycopg://u@127.0.0.1:1/healthd?password=hunter2", "Connection refused; start the server"),
        ("postgresql+psycopg://u:hunter2@no-such-host.invalid/healthd", "correct the host"),
        ("postgresql+psycopg:///healthd?host=/nowhere", "start the server, or name its host"),
    ],
)
def test_a_server_that_is_away_is_told_with_its_place(url: str, text: str) -> None:
    line = line_of(url, StoreError)
    assert text in line
    assert line.startswith("database postgresql+psycopg://")


@pytest.mark.system
def test_wrong_passwords_and_names_are_faults_of_the_configuration(postgres: str) -> None:
    server = sa.make_url(postgres)
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE locked LOGIN PASSWORD 'right'")
        rules = Path(connection.exec_driver_sql("SHOW hba_file").scalar_one())
        before = rules.read_text()
        rules.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{before}")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
        try:
            locked = server.set(username="locked", password="hunter2").render_as_string(hide_password=False)
            wait_until_refused(locked)
            line = line_of(locked, ConfigError)
            assert "password authentication failed" in line
            assert "correct user and password" in line
            assert "put the password into" in line_of(locked.replace(":hunter2", ""), ConfigError)
            nowhere = server.set(database="nowhere").render_as_string(hide_password=False)
            assert "create it, or correct" in line_of(nowhere, ConfigError)
        finally:
            rules.write_text(before)
            connection.exec_driver_sql("DROP ROLE locked")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
    engine.dispose()


async def test_a_database_locked_by_another_program_fails_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.db"

    store = Store.open(f"sqlite:///{path}?timeout=0.1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="database is locked; another program holds it"):
        await store.write([PutMeta(key="a", value="b")])
    other.execute("ROLLBACK")
    other.close()
    await store.write([PutMeta(key="a", value="b")])
    store.close()


async def test_a_fault_of_ours_in_one_job_is_an_error_and_the_writer_goes_on() -> None:
    store = Store.open("sqlite://")
    with pytest.raises(StoreError, match="internal error: division by zero"):
        await store.run(lambda _: 1 / 0)
    await store.write([PutKey(node="n1", key_hash="k", seen_at=NOW)])
    assert store.load().nodes[0].key_hash == "k"
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        await store.write([PutMeta(key="a", value="b")])
