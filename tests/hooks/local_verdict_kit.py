"""What the tests of local verdict, and those beside them, are made with."""

from __future__ import annotations

from pathlib import Path

from checks.contract import Tier
from healthd.node.state.store import NodeStore
from tests.node.node_kit import BOOT, MovedClock, measured, result, settings, specs, survey


def fit(folder: Path, time: MovedClock | None = None, **changes: object) -> NodeStore:
    clock = (time or MovedClock()).clock
    book = NodeStore(settings(folder, aliases=("ip-10-0-0-1",), **changes), specs(), clock=clock, boot_id=BOOT)
    book.set_survey(survey())
    for check in ("disk", "load"):
        book.record(result(check))
    book.record(result("matmul", measured("matmul_flops_per_second", 2e11, "cpu:0"), tier=Tier.QUICK))
    return book
