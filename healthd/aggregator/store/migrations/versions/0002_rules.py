"""What the rules of quarantine remember, and which machine each node was last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table, key, length in (("rules", "node", 253), ("latches", "identity", 300), ("machines", "node", 253)):
        op.create_table(
            table,
            sa.Column(key, sa.String(length), primary_key=True),
            sa.Column("record", sa.Text, nullable=False),
        )
    op.create_index("events_by_age", "events", ["at"])
