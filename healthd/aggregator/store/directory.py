"""
Of which shard nodes and gates are: what is looked up, and written, in the tables that all shards have together.

Of PostgreSQL alone. Each call blocks, for some seconds at most; threads take turns on one connection.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError

from healthd.aggregator.model.gates import LeaseState, Phase
from healthd.aggregator.store import session
from healthd.aggregator.store.session import (
    DEFAULT_SHARD,
    AwayError,
    Line,
    make_engine,
    parse,
    place_of,
    remedy_of,
    require_writable,
    said,
    schema_of,
)
from healthd.aggregator.store.tables import AGGREGATORS, GATES, LEADERSHIP, LEASES, META, NODES, PLACEMENTS
from healthd.core.errors import BadInputError, ConfigError, ConflictError, StoreError
from healthd.core.text import counted

MOST_SHARDS = 64
"""Each is led with a connection and a thread of its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,52}")
MOST_SECONDS = 4
"""So long one statement may take: who waits for it has a bound of its own."""
CLOSE_SECONDS = 0.5

T = TypeVar("T")
Table = sa.Table


def check_shard(name: str) -> str:
    """The same; BadInputError where no shard can be named so: PostgreSQL leaves its schema 63 characters."""
    if not _NAME.fullmatch(name):
        raise BadInputError(
            f"{name[:80]!r} names no shard: it must be 1 to 53 letters, digits, dots, hyphens and underscores, the "
            "first a letter or digit; change the label of the node"
        )
    return name


class Directory:
    """Close it with `close`."""

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        self._place = place_of(parsed)
        self._engine = make_engine(parsed)
        self._line = Line()
        sa.event.listen(self._engine, "do_connect", self._line.connect)
        self._turn = threading.Lock()
        self._connection: sa.Connection | None = None
        self._ending = False

    def close(self) -> None:
        """Safe to repeat; ends a call that hangs. One that waits for a frozen server to let it in is left to itself."""
        self._ending = True
        self._line.cut()
        if self._turn.acquire(timeout=CLOSE_SECONDS):
            try:
                self._disconnect()
            finally:
                self._turn.release()

    def claim_label(self, label: str | None) -> None:
        """
        Make shards of this label of nodes, for as long as the database lasts; None: of no label.

        All nodes that are known until then are of the shard `default`. ConfigError where they are made of another one.
        """

        def work(connection: sa.Connection) -> None:
            connection.execute(
                sa.select(LEADERSHIP.c.term).where(LEADERSHIP.c.shard == DEFAULT_SHARD).with_for_update()
            )
            query = sa.select(META.c.value).where(META.c.key == SHARD_LABEL)
            known = connection.execute(query).scalar_one_or_none()
            if known == label:
                return
            if known is not None:
                raise ConfigError(
                    f"aggregator.shard_label is {label or 'not set'}, and the shards of {self._place} are made of the "
                    f'label "{known}"; set that one on every aggregator, or use another database'
                )
            connection.execute(META.insert().values(key=SHARD_LABEL, value=label))
            nodes = sa.select(NODES.c.node, sa.literal(DEFAULT_SHARD))
            connection.execute(PLACEMENTS.insert().from_select(["node", "shard"], nodes))

        self._run(work)

    def register(self, shard: str) -> None:
        """Make a shard where there is none of this name. BadInputError for a name that cannot be, or one too many."""
        check_shard(shard)

        def work(connection: sa.Connection) -> None:
            known = connection.execute(sa.select(LEADERSHIP.c.shard).order_by(LEADERSHIP.c.shard)).scalars().all()
            if shard in known:
                return
            if len(known) >= MOST_SHARDS:
                raise BadInputError(
                    f"{shard!r} would be one shard more than the {MOST_SHARDS} that there may be "
                    f"({', '.join(known[:4])}, ...); correct the label of the node, or take one with fewer values as "
                    "aggregator.shard_label"
                )
            row = {"shard": shard, "term": 0, "holder": "", "url": "", "renewed": 0.0}
            connection.execute(postgresql.insert(LEADERSHIP).values(row).on_conflict_do_nothing())
            session.notify(connection)

        self._run(work)

    def place(self, node: str, shard: str) -> str | None:
        """The shard of a node: this one, if it is of none. None where this one was removed just now."""

        def work(connection: sa.Connection) -> str | None:
            there = sa.select(sa.literal(node), LEADERSHIP.c.shard).where(LEADERSHIP.c.shard == shard)
            row = postgresql.insert(PLACEMENTS).from_select(["node", "shard"], there)
            connection.execute(row.on_conflict_do_nothing())
            found = connection.execute(sa.select(PLACEMENTS.c.shard).where(PLACEMENTS.c.node == node))
            return found.scalar_one_or_none()

        return self._run(work)

    def remove(self, shard: str) -> int:
        """
        Remove a shard with its tables, for good; how many decided gates went with them.

        ConflictError while it has nodes, leases or open gates; ConfigError for `default`, and where there is none.
        Its leader, if any, is refused from then on.
        """

        def work(connection: sa.Connection) -> int:
            connection.exec_driver_sql(f"LOCK TABLE {PLACEMENTS.name} IN SHARE ROW EXCLUSIVE MODE")
            row = sa.select(LEADERSHIP.c.term).where(LEADERSHIP.c.shard == shard).with_for_update()
            term = connection.execute(row).scalar_one_or_none()
            if term is None:
                known = connection.execute(sa.select(LEADERSHIP.c.shard).order_by(LEADERSHIP.c.shard)).scalars().all()
                raise ConfigError(f"{self._place} has no shard {shard[:80]!r}, but: {', '.join(known)}")
            placed = sa.select(sa.func.count(), sa.func.min(PLACEMENTS.c.node)).where(PLACEMENTS.c.shard == shard)
            nodes, first = connection.execute(placed).one()
            if nodes:
                raise ConflictError(
                    f"shard {shard} has {counted(nodes, 'node')} ({first}{', ...' if nodes > 1 else ''}); forget each "
                    "with 'healthd fleet forget NODE' first"
                )
            return self._drop_tables(connection, shard) if term else self._drop_row(connection, shard)

        if shard == DEFAULT_SHARD:
            raise ConfigError(f"shard {shard} cannot be removed: nodes without the label are of it")
        return self._run(work)

    def _drop_tables(self, connection: sa.Connection, shard: str) -> int:
        """The rest of `remove` for a shard that has been led; a shard has tables from then on."""
        schema = str(schema_of(shard))
        if held := self._count(connection, LEASES, schema, f"state <> '{LeaseState.CLOSED.value}'"):
            raise ConflictError(f"shard {shard} has {counted(held, 'lease')}; release them or wait until the jobs end")
        if count := self._count(connection, GATES, schema, f"phase <> '{Phase.DECIDED.value}'"):
            raise ConflictError(f"shard {shard} has {counted(count, 'open gate')}; release them or wait for them")
        gone = self._count(connection, GATES, schema)
        connection.exec_driver_sql(f"DROP SCHEMA {self._engine.dialect.identifier_preparer.quote(schema)} CASCADE")
        self._drop_row(connection, shard)
        return gone

    def _drop_row(self, connection: sa.Connection, shard: str) -> int:
        connection.execute(sa.delete(LEADERSHIP).where(LEADERSHIP.c.shard == shard))
        session.notify(connection)
        return 0

    def _count(self, connection: sa.Connection, table: Table, schema: str, where: str = "true") -> int:
        query = sa.text(f"SELECT count(*) FROM {self._name(table, schema)} WHERE {where}")  # noqa: S608
        return int(connection.execute(query).scalar_one())

    def forget(self, node: str) -> None:
        """The node is of no shard any more."""
        self._run(lambda connection: connection.execute(sa.delete(PLACEMENTS).where(PLACEMENTS.c.node == node)))

    def placed(self, nodes: Collection[str]) -> Mapping[str, str]:
        """The shards of those nodes that are of one."""
        asked = [node for node in nodes if node.isprintable()]  # PostgreSQL drops the connection over a NUL
        query = sa.select(PLACEMENTS.c.node, PLACEMENTS.c.shard).where(
            PLACEMENTS.c.node == sa.any_(sa.literal(asked, _TEXTS))
        )
        return {row.node: row.shard for row in self._run(lambda connection: connection.execute(query).all())}

    def of_gate(self, gate: str, shards: Iterable[str]) -> str | None:
        """
        The shard with the gate of this id; else that of the newest gate of this job, or of a lease of it. None: none
        of them. `shards` are those that have tables.
        """
        if not gate.isprintable():
            return None
        asked = {"gate": gate}
        for table, where, newest in (
            (GATES, "id = :gate", "id"),
            (GATES, "job = :gate", "id"),
            (LEASES, "gate = :gate", "granted_at"),
        ):
            found = self._newest(table, where, newest, asked, shards)
            if found:
                return found[0]
        return None

    def of_open_gates(self, job: str, shards: Iterable[str]) -> tuple[str, ...]:
        """The shards that have a gate of this job which is not decided."""
        where = "job = :job AND phase <> 'decided'"
        return self._newest(GATES, where, "id", {"job": job}, shards) if job.isprintable() else ()

    def of_pool(self, pool: str, shards: Iterable[str]) -> tuple[str, ...]:
        """The shards that have nodes of this pool."""
        where = "labels::json ->> 'pool' = :pool"
        return self._newest(NODES, where, "node", {"pool": pool}, shards) if pool.isprintable() else ()

    def leave(self, url: str) -> None:
        """The aggregator that answers there is about to end: others need not count on it."""

        def work(connection: sa.Connection) -> None:
            connection.execute(sa.delete(AGGREGATORS).where(AGGREGATORS.c.url == url))
            session.notify(connection)

        self._run(work)

    def _newest(
        self, table: Table, where: str, newest: str, asked: Mapping[str, str], shards: Iterable[str]
    ) -> tuple[str, ...]:
        """The shards with rows like that, the newest first."""
        one = "(SELECT :shard_{0} AS shard, {2} AS at FROM {1} WHERE {3} ORDER BY {2} DESC LIMIT 1)"
        parts, values = [], dict(asked)
        for number, shard in enumerate(sorted(shards)):
            name = self._name(table, schema_of(shard))
            parts.append(one.format(number, name, newest, where))
            values[f"shard_{number}"] = shard
        if not parts:
            return ()
        query = sa.text(f"SELECT shard FROM ({' UNION ALL '.join(parts)}) AS found ORDER BY at DESC")  # noqa: S608
        return tuple(self._run(lambda connection: connection.execute(query, values).scalars().all()))

    def _name(self, table: Table, schema: str | None) -> str:
        quote = self._engine.dialect.identifier_preparer.quote_identifier
        return quote(table.name) if schema is None else f"{quote(schema)}.{quote(table.name)}"

    def _run(self, work: Callable[[sa.Connection], T]) -> T:
        """In a transaction; once more where the connection was lost since the last one. StoreError, ConfigError."""
        with self._turn:
            for again in (self._connection is not None, False):
                try:
                    if self._connection is None:
                        self._connection = self._engine.connect()
                        require_writable(self._connection, self._place)
                    with self._connection.begin():
                        self._connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{MOST_SECONDS}s'")
                        return work(self._connection)
                except SQLAlchemyError as error:
                    self._disconnect()
                    if not again or self._ending:
                        raise self._failed(error) from None
                except StoreError:
                    self._disconnect()
                    raise
        raise AssertionError("it has returned or raised")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
        self._engine.dispose()
        self._line.forget()

    def _failed(self, error: SQLAlchemyError) -> StoreError | ConfigError:
        line = said(self._engine.url, error)
        remedy, misconfigured = remedy_of(line)
        text = f"{self._place}: {line}; {remedy}"
        return ConfigError(text) if misconfigured else AwayError(text)


def remove_shard(url: str, shard: str) -> int:
    """As `Directory.remove`, of a database by its URL. Blocks. ConfigError also for one that has no shards."""
    if parse(url).get_backend_name() == "sqlite":
        raise ConfigError(f"{session.KEY}: SQLite has one shard, which cannot be removed")
    directory = Directory(url)
    try:
        return directory.remove(shard)
    finally:
        directory.close()


SHARD_LABEL = "shard_label"
_TEXTS = postgresql.ARRAY(sa.Text)
