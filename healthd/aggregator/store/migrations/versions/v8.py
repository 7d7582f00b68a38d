"""The repairs that healthd advises, and what people decided about them."""

import sqlalchemy as sa
from alembic import op

revision = "8"
down_revision = "7"
branch_labels = None
depends_on = None
additive = True


def upgrade() -> None:
    op.create_table(
        "repairs",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("device", sa.String(128), primary_key=True),
        sa.Column("since", sa.Double, primary_key=True),
        sa.Column("closed_at", sa.Double),
        sa.Column("record", sa.Text, nullable=False),
        sa.Index("repairs_by_end", "closed_at"),
    )
