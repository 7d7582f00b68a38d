"""The row of `leadership` has a key, and the address of the leader."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    term, holder, renewed = connection.exec_driver_sql("SELECT term, holder, renewed FROM leadership").one()
    op.drop_table("leadership")
    made = op.create_table(
        "leadership",
        sa.Column("shard", sa.String(253), primary_key=True),
        sa.Column("term", sa.Integer, nullable=False),
        sa.Column("holder", sa.String(300), nullable=False),
        sa.Column("url", sa.String(300), nullable=False),
        sa.Column("renewed", sa.Double, nullable=False),
    )
    values = {"shard": "default", "term": term, "holder": holder, "url": "", "renewed": renewed}
    connection.execute(made.insert().values(**values))
