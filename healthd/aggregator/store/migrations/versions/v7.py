"""The facts of decided gates are records like others; a table that only older versions used is gone."""

import json

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"
branch_labels = None
depends_on = None

AT_ONCE = 500
FACTS = sa.text(
    "SELECT gate, decided_at, way, would, alarmed, clean, wait_seconds, device_seconds FROM gate_facts ORDER BY gate"
)
FAULTS = sa.text(
    "SELECT gate, node, check_name, code, left_out FROM gate_faults WHERE gate BETWEEN :first AND :last "
    "ORDER BY gate, number"
)
WRITE = sa.text("INSERT INTO records (kind, key, record) VALUES ('facts', :key, :record)")


def upgrade() -> None:
    connection = op.get_bind()
    rows = connection.execute(FACTS).mappings().all()
    for start in range(0, len(rows), AT_ONCE):
        some = {row["gate"]: dict(row, faults=[]) for row in rows[start : start + AT_ONCE]}
        first, *_, last = (*some, *some)
        for row in connection.execute(FAULTS, {"first": first, "last": last}).mappings():
            fault = {"node": row["node"], "check": row["check_name"], "code": row["code"]}
            if row["gate"] in some:
                some[row["gate"]]["faults"].append({**fault, "out": bool(row["left_out"])})
        for one in some.values():
            one.update(alarmed=bool(one["alarmed"]), clean=bool(one["clean"]))
        connection.execute(WRITE, [{"key": gate, "record": json.dumps(one)} for gate, one in some.items()])
    for table in ("gate_faults", "gate_facts", "placements"):
        op.drop_table(table)
