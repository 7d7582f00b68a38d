"""The first shape of the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("key_hash", sa.String(128)),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("first_seen", sa.Double, nullable=False),
        sa.Column("last_seen", sa.Double, nullable=False),
    )
    op.create_table(
        "gates",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("job", sa.String(256), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("decided_at", sa.Double),
        sa.Column("record", sa.Text, nullable=False),
        sa.UniqueConstraint("job", "attempt", name="one_gate_for_each_attempt"),
    )
    op.create_index("gates_by_phase", "gates", ["phase"])
    op.create_index("gates_by_age", "gates", ["created_at"])
    op.create_table(
        "evidence",
        sa.Column("gate", sa.String(64), sa.ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("states", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(400), primary_key=True),
        sa.Column("gate", sa.String(64), nullable=False),
        sa.Column("node", sa.String(253), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("granted_at", sa.Double, nullable=False),
        sa.Column("adopted", sa.Boolean, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("leases_by_state", "leases", ["state"])
    op.create_index("leases_by_gate", "leases", ["gate"])
    op.create_table(
        "quarantines",
        sa.Column("node", sa.String(253), primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "overrides",
        sa.Column("job", sa.String(256), primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "outcomes",
        sa.Column("gate", sa.String(64), sa.ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("job", sa.String(256), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("status", sa.String(64), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("told_at", sa.Double, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("subject", sa.String(300), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
    )
    op.create_index("events_by_subject", "events", ["subject", "id"])
