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

from healthd.aggregator.store.database import first_line
from healthd.aggregator.store.leadership import FLEET, LEASE_SECONDS, clock_of, depose, say_alive
from healthd.aggregator.store.rows import PutMeta, apply_changes
from healthd.aggregator.store.tables import AGGREGATORS, LEADERSHIP, META, METADATA
from healthd.core.errors import StoreError

log = logging.getLogger(__name__)

MIGRATION_LOCK = 0x6865616C746864
"""PostgreSQL advisory lock of who brings the schema up to date: "healthd" in ASCII. Several may start at once."""
READABLE_BY = "schema_readable_by"
"""The key in `meta`."""


def bring_up_to_date(connection: Connection, place: str, own_url: str | None = None) -> None:
    """
    Make the tables or migrate them; leaves those of a newer healthd as they are where this one can use them.

    With `own_url` it writes that the aggregator which answers there lives, before anybody else can migrate. StoreError
    for a schema that this healthd cannot use, and for a migration after which others could not go on that live now.
    """
    config = _config()
    config.attributes["connection"] = connection
    scripts = _scripts()
    try:
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            current = _require_usable(connection, scripts, place)
            if current is None:
                _make(connection)
                command.stamp(config, "head")
            elif current != scripts.get_current_head() and current in _known(scripts):
                _migrate(connection, config, scripts, current, place, own_url)
            _require_one_fleet(connection, place)
            if current is None or current in _known(scripts):
                apply_changes(connection, [PutMeta(key=READABLE_BY, value=_readable_by(scripts))])
            if own_url is not None:
                say_alive(connection, own_url)
    except CommandError as error:
        raise StoreError(f"{place} cannot be migrated: {first_line(error)}") from None


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("healthd.aggregator.store") / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


@functools.cache
def _scripts() -> ScriptDirectory:
    """The migrations, read once: each takeover looks whether there is one to be run."""
    return ScriptDirectory.from_config(_config())


def _make(connection: Connection) -> None:
    METADATA.create_all(connection, checkfirst=False)  # a table of somebody else is never taken over
    row = {"shard": FLEET, "term": 0, "holder": "", "url": "", "renewed": 0.0}
    connection.execute(LEADERSHIP.insert().values(row))


def _require_one_fleet(connection: Connection, place: str) -> None:
    """StoreError for a database in which an older healthd has divided the fleet into shards."""
    others = connection.execute(sa.select(LEADERSHIP.c.shard).where(LEADERSHIP.c.shard != FLEET)).scalars().all()
    if others:
        raise StoreError(
            f"{place}: has the shards {', '.join(sorted((*others, FLEET)))}: this healthd keeps one fleet in a "
            f"database; remove all but {FLEET} with the healthd that made them (aggregator --remove-shard NAME), or "
            "give each part of the fleet an aggregator with a new database"
        )


def _migrate(
    connection: Connection, config: Config, scripts: ScriptDirectory, current: str, place: str, own_url: str | None
) -> None:
    """
    Nobody may go on with a schema that its code does not know: where a migration is not additive, no other aggregator
    may live, and the lease ends with it, also of a leader that is frozen.
    """
    steps = [step for step in scripts.iterate_revisions(scripts.get_current_head(), current) if step is not None]
    breaks = _is_shared(connection) and not all(map(_additive, steps))
    if breaks and (living := _living(connection, own_url)):
        raise StoreError(
            f"{place} would be migrated from schema {current} to {scripts.get_current_head()}, which the "
            f"older healthd of {', '.join(living)} cannot use; stop these aggregators, then start this one"
        )
    command.upgrade(config, "head")
    if breaks:
        depose(connection)


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


def _require_usable(connection: Connection, scripts: ScriptDirectory, place: str) -> str | None:
    """The version of these tables; None where there are none yet. StoreError where this healthd cannot use them."""
    heads = MigrationContext.configure(connection).get_current_heads()
    unknown = sorted(set(heads) - _known(scripts))
    if unknown and not _leaves_room(connection, unknown, int(scripts.get_current_head() or 0)):
        raise StoreError(
            f"{place} is from a newer healthd, or from a development version before 0.1.0 (schema "
            f"{', '.join(unknown)}); upgrade healthd, or use another database"
        )
    if unknown:
        log.info("%s has schema %s of a newer healthd, which this version can also use", place, unknown[0])
    return heads[0] if heads else None


def _leaves_room(connection: Connection, versions: Sequence[str], own: int) -> bool:
    """Whether a newer healthd has left the tables such that code of the schema `own` can use them."""
    if not all(version.isdecimal() and int(version) > own for version in versions):
        return False  # of a development version, which may have no table `meta`
    query = sa.select(META.c.value).where(META.c.key == READABLE_BY)
    oldest = connection.execute(query).scalar_one_or_none()
    return oldest is not None and oldest.isdecimal() and int(oldest) <= own


def _known(scripts: ScriptDirectory) -> set[str]:
    return {script.revision for script in scripts.walk_revisions()}


def _readable_by(scripts: ScriptDirectory) -> str:
    """The oldest schema whose code can use the newest one: all migrations since are additive."""
    return next(script.revision for script in scripts.walk_revisions() if not _additive(script))


def _additive(script: Script) -> bool:
    """What does not say so is not: a migration that nobody thought about is refused beside older code."""
    return bool(getattr(script.module, "additive", False))
