"""How many quarantines each node has had."""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"
branch_labels = None
depends_on = None
additive = True


def upgrade() -> None:
    op.create_table(
        "quarantined",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
    )
