"""What is remembered of the screenings of each node."""

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"
branch_labels = None
depends_on = None
additive = True


def upgrade() -> None:
    op.create_table(
        "screenings",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
