"""When a node was last heard is kept from here on; until now it was when its labels had changed."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Nobody knows it of these: each counts as heard now, so that none is taken for gone that has only been quiet here.
    nodes = sa.table("nodes", sa.column("last_seen", sa.Double))
    op.execute(nodes.update().values(last_seen=time.time()))
