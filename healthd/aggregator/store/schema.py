"""
The version of the schema: which code may use a database, and how it is brought up to date.

Beside its version a database keeps the oldest version whose code can still use it (`READABLE_BY`), so that aggregators
of two versions can share one while they are updated one after the other. See decision 0026.
"""

from __future__ import annotations

import functools
import importlib.resources
import logging
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from healthd.aggregator.store import session
from healthd.aggregator.store.rows import PutMeta, apply_changes
from healthd.aggregator.store.session import DEFAULT_SHARD, LEASE_SECONDS, Session, clock_of, first_line
from healthd.aggregator.store.tables import AGGREGATORS, COMMON, LEADERSHIP, META, METADATA
from healthd.aggregator.store.watch import say_alive
from healthd.core.errors import StoreError

log = logging.getLogger(__name__)

MIGRATION_LOCK = 0x6865616C746864
"""PostgreSQL advisory lock of who brings the schema up to date: "healthd" in ASCII. Several may start at once."""
READABLE_BY = "schema_readable_by"
"""The key in `meta`."""


def bring_up_to_date(opened: Session, connection: Connection, own_url: str | None = None) -> None:
    """
    Make the tables or migrate them; leaves those of a newer healthd as they are where this one can use them.

    With `own_url` it writes that the aggregator which answers there lives, before anybody else can migrate. StoreError
    for a schema that this healthd cannot use, and for a migration after which others could not go on that live now.
    """
    config = _config()
    config.attributes.update(connection=connection, schema=opened.schema)
    scripts = _scripts()
    try:
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            if opened.schema is not None:
                _require_usable(connection, scripts, _common_schema(connection), opened.place)
            current = _require_usable(connection, scripts, opened.schema, opened.place)
            if current is None:
                _make(connection, opened.schema)
                command.stamp(config, "head")
            elif current != scripts.get_current_head() and current in _known(scripts):
                _migrate(connection, config, scripts, current, opened, own_url)
            if current is None or current in _known(scripts):
                apply_changes(connection, [PutMeta(key=READABLE_BY, value=_readable_by(scripts))])
            if own_url is not None:
                say_alive(connection, own_url)
    except CommandError as error:
        raise StoreError(f"{opened.place} cannot be migrated: {first_line(error)}") from None


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("healthd.aggregator.store") / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


@functools.cache
def _scripts() -> ScriptDirectory:
    """The migrations, read once: each takeover looks whether there is one to be run."""
    return ScriptDirectory.from_config(_config())


def _make(connection: Connection, schema: str | None) -> None:
    made = [one for one in METADATA.sorted_tables if schema is None or one not in COMMON]
    METADATA.create_all(connection, made, checkfirst=False)  # a table of somebody else is never taken over
    if schema is None:
        row = {"shard": DEFAULT_SHARD, "term": 0, "holder": "", "url": "", "renewed": 0.0}
        connection.execute(LEADERSHIP.insert().values(row))


def _migrate(
    connection: Connection, config: Config, scripts: ScriptDirectory, current: str, opened: Session, own_url: str | None
) -> None:
    """
    Nobody may go on with a schema that its code does not know: where a migration is not additive, no other aggregator
    may live, and the leases of all end with it, of one that is frozen too. The tables that are common to all shards
    come first, so this is decided with them.
    """
    steps = [step for step in scripts.iterate_revisions(scripts.get_current_head(), current) if step is not None]
    breaks = opened.schema is None and _is_shared(connection) and not all(map(_additive, steps))
    if breaks and (living := _living(connection, own_url)):
        raise StoreError(
            f"{opened.place} would be migrated from schema {current} to {scripts.get_current_head()}, with which the "
            f"older healthd of {', '.join(living)} cannot go on; stop these aggregators, then start this one"
        )
    command.upgrade(config, "head")
    if breaks:
        session.depose(connection, None)


def _is_shared(connection: Connection) -> bool:
    """Whether others may use it. An aggregator whose schema has no table for that holds the migration lock for life."""
    if connection.dialect.name != "postgresql":
        return False
    return connection.exec_driver_sql("SELECT to_regclass(%s)", (AGGREGATORS.name,)).scalar() is not None


def _living(connection: Connection, own_url: str | None) -> Sequence[str]:
    """The other aggregators that have written lately that they live."""
    lately = AGGREGATORS.c.renewed > clock_of(connection) - LEASE_SECONDS
    query = sa.select(AGGREGATORS.c.url).where(lately, AGGREGATORS.c.url != (own_url or ""))
    return connection.execute(query.order_by(AGGREGATORS.c.url)).scalars().all()


def _require_usable(connection: Connection, scripts: ScriptDirectory, schema: str | None, place: str) -> str | None:
    """The version of these tables; None where there are none yet. StoreError where this healthd cannot use them."""
    heads = MigrationContext.configure(connection, opts={"version_table_schema": schema}).get_current_heads()
    unknown = sorted(set(heads) - _known(scripts))
    if unknown and not _leaves_room(connection, unknown, int(scripts.get_current_head() or 0), schema):
        raise StoreError(
            f"{place} is of a newer healthd, or of a development version before 0.1.0 (schema {', '.join(unknown)}); "
            "upgrade healthd, or use another database"
        )
    if unknown:
        log.info("%s has schema %s of a newer healthd, which this one can use too", place, unknown[0])
    return heads[0] if heads else None


def _leaves_room(connection: Connection, versions: Sequence[str], own: int, schema: str | None) -> bool:
    """Whether a newer healthd has left the tables such that code of the schema `own` can use them."""
    if not all(version.isdecimal() and int(version) > own for version in versions):
        return False  # of a development version, which may have no table `meta`
    query = sa.select(META.c.value).where(META.c.key == READABLE_BY)
    options = {} if schema is None else {"schema_translate_map": {None: schema}}
    oldest = connection.execute(query, execution_options=options).scalar_one_or_none()
    return oldest is not None and oldest.isdecimal() and int(oldest) <= own


def _common_schema(connection: Connection) -> str | None:
    """Where the tables are that all shards have together; None where they are not made yet."""
    query = "SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)"
    found = connection.exec_driver_sql(query, (LEADERSHIP.name,)).scalar()
    return None if found is None else str(found)


def _known(scripts: ScriptDirectory) -> set[str]:
    return {script.revision for script in scripts.walk_revisions()}


def _readable_by(scripts: ScriptDirectory) -> str:
    """The oldest schema whose code can use the newest one: all migrations since are additive."""
    return next(script.revision for script in scripts.walk_revisions() if not _additive(script))


def _additive(script: Script) -> bool:
    """What does not say so is not: a migration that nobody thought about is refused beside older code."""
    return bool(getattr(script.module, "additive", False))
