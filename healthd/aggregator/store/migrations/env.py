"""Run the migrations on the connection that the store provides; there is no offline mode."""

from __future__ import annotations

from alembic import context

from healthd.aggregator.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
