"""Limits that are learned are no longer kept and approved here: they are printed as settings (decision 0010)."""

from alembic import op

revision = "2"
down_revision = "1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("baselines")
