"""The notes that nodes send of a job's bad end, and what was said of it."""

from alembic import op
from sqlalchemy import Column, Double, ForeignKey, Index, Integer, LargeBinary, String, Text

revision = "3"
down_revision = "2"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "notes",
        Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        Column("member", String(300), primary_key=True),
        Column("node", String(253), nullable=False),
        Column("told_at", Double, nullable=False),
        Column("notes", LargeBinary, nullable=False),
    )
    op.create_table(
        "postmortems",
        Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        Column("job", String(256), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("phase", String(16), nullable=False),
        Column("record", Text, nullable=False),
        Index("postmortems_by_job", "job"),
        Index("postmortems_by_phase", "phase"),
    )
