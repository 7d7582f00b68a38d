"""Who shares the shards of a fleet, and which node is of which."""

import sqlalchemy as sa
from alembic import context, op

revision = "5"
down_revision = "4"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if context.config.attributes.get("schema") is not None:
        return  # of a shard: these tables are common to all
    op.create_table(
        "aggregators",
        sa.Column("url", sa.String(300), primary_key=True),
        sa.Column("renewed", sa.Double, nullable=False),
    )
    op.create_table(
        "placements",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("shard", sa.String(253), nullable=False),
    )
