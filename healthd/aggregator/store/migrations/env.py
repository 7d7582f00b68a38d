"""Run the migrations on the connection that the store hands over; there is no offline mode."""

from __future__ import annotations

from alembic import context

from healthd.aggregator.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table_schema=context.config.attributes.get("schema"),
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
