"""${message}"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}
additive = False  # True: the code of the revision before can go on with it (decision 0026)


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}
