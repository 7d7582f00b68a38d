"""A gate keeps what only one phase has in the record of that phase; what was kept of older gates is rewritten."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from checks.json_text import parse_json

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

GROUP = ("asked_attempt", "members", "roster", "generation", "gone", "restarts", "began_at", "former")


def upgrade() -> None:
    connection = op.get_bind()
    gates = sa.table("gates", sa.column("id", sa.String), sa.column("record", sa.Text))
    for gate_id in connection.execute(sa.select(gates.c.id)).scalars().all():
        row = sa.select(gates.c.record).where(gates.c.id == gate_id)
        record = rewritten(parse_json(connection.execute(row).scalar_one()))
        connection.execute(sa.update(gates).where(gates.c.id == gate_id).values(record=json.dumps(record)))


def rewritten(old: dict[str, Any]) -> dict[str, Any]:
    """The record of a gate as it is now."""
    new = dict(old)
    phase, validation, decision = new.pop("phase"), new.pop("validation", None), new.pop("decision", None)
    reserved, granted = new.pop("reserved", []), new.pop("granted", {})
    new.pop("ready_at", None)
    new["ended"] = new.pop("past", [])
    group = {name: new.pop(name) for name in GROUP if name in new}
    new["group"] = group if new["request"].get("join") else None
    under_way = validation is not None and validation.get("verdict") is None
    if decision is not None:
        new["progress"] = {"name": "decided", "decision": decision, "granted": granted}
    elif phase == "collecting":
        new["progress"] = {"name": "collecting"}
    elif not reserved:
        new["progress"] = {"name": "waiting"}
    elif granted:
        new["progress"] = {"name": "granting", "reserved": reserved, "granted": granted}
    elif under_way:
        new["progress"] = {"name": "validating", "reserved": reserved, "validation": validation}
        validation = None
    else:
        new["progress"] = {"name": "checking", "reserved": reserved}
    if validation is not None:
        if under_way and decision is None:  # nobody follows it any more: it was stopped
            validation = {**validation, "groups": [], "partners": []}
        new["ended"] = [*new["ended"], validation]
    return new
