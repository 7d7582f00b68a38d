"""The first schema, which `Store` makes from `tables`: what later revisions are based on."""

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
