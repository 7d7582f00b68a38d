"""Which aggregator may write: the term goes on from how often the database was opened until now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    leadership = op.create_table(
        "leadership",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("term", sa.Integer, nullable=False),
        sa.Column("holder", sa.String(300), nullable=False),
        sa.Column("renewed", sa.Double, nullable=False),
    )
    meta = sa.table("meta", sa.column("key", sa.String), sa.column("value", sa.Text))
    opened = op.get_bind().execute(sa.select(meta.c.value).where(meta.c.key == "generation")).scalar()
    op.bulk_insert(leadership, [{"id": 1, "term": int(opened or 0), "holder": "", "renewed": 0.0}])
    op.execute(meta.delete().where(meta.c.key == "generation"))
