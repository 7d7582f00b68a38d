"""The aggregators that use the database, and a table of nodes that is not used any more."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
