"""What the tests of node api, and those beside them, are made with."""

from __future__ import annotations

from pathlib import Path

from checks.contract import Status, Tier
from healthd.core.model import CheckSpec
from healthd.node.state.store import NodeStore
from tests.node.node_kit import (
    BOOT,
    MovedClock,
    finding,
    measured,
    result,
    settings,
    specs,
    survey,
)


def node(folder: Path, time: MovedClock | None = None, *, chosen: tuple[CheckSpec, ...] | None = None) -> NodeStore:
    book = NodeStore(settings(folder), chosen or specs(), clock=(time or MovedClock()).clock, boot_id=BOOT)
    book.set_survey(survey())
    return book


def healthy(folder: Path, time: MovedClock | None = None) -> NodeStore:
    book = node(folder, time)
    book.record(result("disk", finding(Status.SKIP, "NotApplicable")))
    book.record(result("load"))
    speed = measured("matmul_flops_per_second", 2e11, "cpu:0", dtype="fp32")
    book.record(result("matmul", speed, tier=Tier.QUICK))
    return book
