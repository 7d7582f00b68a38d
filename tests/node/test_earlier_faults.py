"""Faults of devices that cannot be looked at stand beside new results: what rules and gates make of both together."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.contract import Blame, Finding, Status, Tier
from healthd.aggregator.quarantine.counting import facts_of
from healthd.core.evidence import judge_tier
from healthd.core.model import CheckResult, Health
from healthd.node.state.store import NodeStore
from tests.aggregator import world
from tests.aggregator.ruling import ROOM, Case
from tests.node.node_kit import BOOT, MovedClock, finding, result, settings, specs, survey

BUSY = finding(Status.UNKNOWN, "Busy", "cuda:0")
SLOW = finding(Status.FAIL, "SlowDevice", "cuda:0")


class Node:
    """A node whose device cuda:0 failed once and is in use since; the rules look at what it says of each run."""

    def __init__(self, folder: Path, *earlier: Finding) -> None:
        self.time, self.case = MovedClock(), Case()
        self.store = NodeStore(settings(folder), specs(), clock=self.time.clock, boot_id=BOOT)
        self.store.set_survey(survey())
        for name in ("disk", "load"):
            self.store.record(result(name))
        self.run(*(earlier or (SLOW,)), after=0.0)

    def run(self, *findings: Finding, after: float = 400.0) -> CheckResult:
        """Of matmul, so much later; what is then the result of the node."""
        self.time.move(after)
        self.case.now += after
        started = self.time.at + self.time.wall_offset
        self.store.record(result("matmul", *findings, tier=Tier.QUICK, started_at=started))
        told = world.node("n1", self.store.snapshot())
        room, kept = ROOM, self.case.quarantine is not None
        self.case.take(facts_of(self.case.now, told, self.case.policy, room=room, person=False, kept=kept))
        return next(one for one in self.store.snapshot().results if one.check == "matmul")


@pytest.mark.parametrize("code", ["DeviceLost", "WrongResult"])
def test_new_hard_fault_beside_an_earlier_one_quarantines_the_node(code: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    found = node.run(BUSY, finding(Status.FAIL, code, "cuda:1"))
    assert found.age_seconds == 0.0
    assert [one.reason for one in found.findings if one.status is Status.FAIL] == [code, "SlowDevice"]
    assert node.case.owner == "rule:hard"


def test_gate_names_a_new_fault_beside_an_earlier_one_that_is_too_old_for_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(BUSY, finding(Status.FAIL, "WrongResult", "cuda:1"))
    node.store.record(result("disk"))
    node.store.record(result("load"))
    judged = judge_tier(node.store.snapshot(), Tier.QUICK, 60.0)
    assert judged.health is Health.UNHEALTHY
    assert {("WrongResult", "cuda:1"), ("SlowDevice", "cuda:0")} <= {(one.code, one.target) for one in judged.reasons}


def test_new_fault_is_seen_however_many_earlier_ones_there_are(tmp_path: Path) -> None:
    """The rules look at a few findings of each result."""
    earlier = [finding(Status.FAIL, "SlowDevice", f"cuda:{number}") for number in range(12)]
    node = Node(tmp_path, *earlier)
    busy = [finding(Status.UNKNOWN, "Busy", one.target) for one in earlier]
    node.run(*busy, finding(Status.FAIL, "WrongResult", "cuda:12"))
    assert node.case.owner == "rule:hard"


@pytest.mark.parametrize(
    "new",
    [
        finding(target="cuda:1"),
        finding(Status.WARN, "SlowDevice", "cuda:1"),
        finding(Status.UNKNOWN, "Timeout", "cuda:1"),
        finding(Status.FAIL, "WrongResult", "cuda:1", blame=Blame.CHECK),
    ],
    ids=["pass", "warn", "unknown", "fail of the check"],
)
def test_earlier_fault_is_counted_once_however_often_its_device_cannot_be_looked_at(
    new: Finding, tmp_path: Path
) -> None:
    node = Node(tmp_path)
    for number in range(1, 5):
        assert node.run(BUSY, new).age_seconds == number * 400.0
    assert [count.fails for count in node.case.record.counts] == [1]
    assert node.case.quarantine is None


def test_result_is_as_old_as_what_failed_last_once_nothing_fails_anew(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(BUSY, finding(Status.FAIL, "SlowDevice", "cuda:1"))
    assert [node.run(BUSY, finding(target="cuda:1")).age_seconds for _ in range(3)] == [400.0, 800.0, 1200.0]
    assert [count.fails for count in node.case.record.counts] == [2]
