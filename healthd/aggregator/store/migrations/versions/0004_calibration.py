"""What figures on the gate itself are made of: a few facts of each decided gate, and what it knew against nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gate_facts",
        sa.Column("gate", sa.String(64), sa.ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.Column("way", sa.String(16), nullable=False),
        sa.Column("would", sa.String(16), nullable=False),
        sa.Column("alarmed", sa.Boolean, nullable=False),
        sa.Column("clean", sa.Boolean, nullable=False),
        sa.Column("wait_seconds", sa.Double, nullable=False),
        sa.Column("device_seconds", sa.Double, nullable=False),
    )
    op.create_index("gate_facts_by_age", "gate_facts", ["decided_at"])
    op.create_table(
        "gate_faults",
        sa.Column("gate", sa.String(64), sa.ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("node", sa.String(253), nullable=False),
        sa.Column("check_name", sa.String(128), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("left_out", sa.Boolean, nullable=False),
    )
