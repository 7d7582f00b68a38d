"""Repairs that healthd advises: from the finding over a person's decision to the pass that shows the repair."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checks.contract import Action, Tier
from healthd.aggregator.quarantine import repairs
from healthd.aggregator.quarantine.records import RuleRecord
from healthd.aggregator.quarantine.repair_records import Repair, RepairDecision, RepairEnd, RepairState
from healthd.core.errors import ConflictError, NotFoundError
from healthd.core.model import Verdict
from tests.aggregator.engine_kit import running
from tests.aggregator.metrics_kit import metrics_of
from tests.aggregator.parts import Clock, fleet
from tests.aggregator.rules_engine_kit import kept, kinds, measured
from tests.aggregator.ruling import DAY, HOUR, MINUTE, Case, fault
from tests.aggregator.world import World, good_results, with_wrong

WRONG = fault("WrongResult", device="dev:0")
REBOOT = fault("MissingDevice")
DONE = RepairDecision.DONE


@dataclasses.dataclass
class Book:
    """The repairs of one node beside its rules."""

    case: Case = dataclasses.field(default_factory=Case)
    open: tuple[Repair, ...] = ()
    ended: list[Repair] = dataclasses.field(default_factory=list)
    tier: Tier = Tier.DEEP

    @property
    def record(self) -> RuleRecord:
        here = (self.case.latches.get(seat.identity, ()) for seat in self.case.record.seats)
        latches = tuple(one for of_one in here for one in of_one)
        return dataclasses.replace(self.case.record, latches=latches)

    def follow(self) -> None:
        found = repairs.follow(self.case.now, self.open, self.record)
        self.open = tuple(one for one in found if one.closed_at is None)
        self.ended += [one for one in found if one.closed_at is not None]

    def see(self, *faults: object, **more: object) -> None:
        self.case.result(*faults, **more)  # type: ignore[arg-type]
        self.follow()

    def decide(self, decision: RepairDecision, device: str | None = None) -> None:
        before = self.open
        self.open = repairs.decided(self.case.now, before, decision, device, "ana", "new part")
        made = [new for old, new in zip(before, self.open, strict=True) if new is not old and decision is DONE]
        proved = repairs.repaired(self.case.now, self.record, made, self.tier)
        for seat in self.case.record.seats:
            self.case.latches[seat.identity] = tuple(one for one in proved.latches if one.identity == seat.identity)
        self.case.record = dataclasses.replace(proved, latches=())


def test_repair_opens_once_for_a_device_with_the_strongest_advice_and_never_for_a_drill() -> None:
    book = Book()
    book.see(fault("EccErrors", device="dev:0"))
    assert [(one.device, one.advice) for one in book.open] == [("dev:0", Action.RESET_DEVICE)]
    first = book.open[0]
    book.see(WRONG, fault("EccErrors", device="dev:0"), after=HOUR)
    (one,) = book.open
    assert (one.advice, one.code, one.since) == (Action.REPLACE, "WrongResult", first.since)
    book.see(fault("WrongResult", device="dev:1", injected=True))
    assert [one.device for one in book.open] == ["dev:0"]
    book.see(REBOOT)
    assert {(one.device, one.advice) for one in book.open} == {("dev:0", Action.REPLACE), ("node", Action.REBOOT)}


def test_repaired_device_stays_out_until_the_deep_tier_passes_and_the_run_is_ordered_at_once() -> None:
    book = Book()
    book.see(WRONG)
    book.case.wait(5 * MINUTE)
    book.decide(DONE)
    assert book.open[0].state is RepairState.DONE
    made_at = book.case.now
    book.see(deep_at=made_at - 60.0)  # a deep pass from before the repair shows nothing
    assert book.case.quarantine is not None
    assert "dev:0: the repair is marked as done" in book.case.quarantine.reason
    assert book.case.record.probe is not None
    assert book.case.record.probe.tier is Tier.DEEP
    assert [one.state for one in book.open] == [RepairState.DONE]
    book.see(after=HOUR, deep_at=book.case.now + HOUR - 5.0)
    assert book.case.quarantine is None
    assert book.open == ()
    (one,) = book.ended
    assert one.end is RepairEnd.PASSED
    assert one.repaired_seconds == pytest.approx(HOUR + 6 * MINUTE, abs=5.0)
    assert [(step.state.value, step.by) for step in one.steps] == [
        ("advised", "healthd"),
        ("done", "ana"),
        ("closed", "healthd"),
    ]


def test_repair_that_did_not_help_is_advised_again_and_counts_from_the_first_finding() -> None:
    book = Book()
    book.see(WRONG)
    since = book.open[0].since
    book.decide(DONE)
    book.see(WRONG, after=HOUR)
    (one,) = book.open
    assert (one.state, one.since) == (RepairState.ADVISED, since)
    assert one.steps[-1].why.startswith("failed again")


def test_advice_that_a_reboot_settled_and_a_device_that_was_replaced_close_by_themselves() -> None:
    book = Book()
    book.see(REBOOT)
    book.decide(RepairDecision.ACCEPT)
    book.case.boot_id = "b2"
    book.see(after=HOUR)
    (rebooted,) = book.ended
    assert (rebooted.end, rebooted.advice) == (RepairEnd.CLEARED, Action.REBOOT)
    assert rebooted.repaired_seconds is not None
    book.see(WRONG)
    book.case.serials["dev:0"] = "S9"
    book.see(after=HOUR)
    (one,) = book.open
    assert (one.state, one.steps[-1].by) == (RepairState.DONE, "healthd")
    book.see(after=HOUR, deep_at=book.case.now + HOUR - 5.0)
    assert [one.end for one in book.ended] == [RepairEnd.CLEARED, RepairEnd.PASSED]


def test_machine_that_was_replaced_waits_for_the_proof_of_all_its_devices() -> None:
    book = Book(Case(serials={"dev:0": None, "dev:1": None}))
    book.see(WRONG)
    assert book.open[0].device == "dev:0"
    book.case.identity = "instance:i-2"
    book.see(after=HOUR)
    assert [one.state for one in book.open] == [RepairState.DONE]
    assert book.ended == []


def test_only_all_repairs_together_let_a_node_in() -> None:
    book = Book()
    book.see(WRONG, fault("WrongResult", device="dev:1"))
    book.decide(DONE, "dev:1")
    book.see()
    assert book.case.record.probe is None, "no run can clear the other device"
    assert {one.device: one.state for one in book.open} == {
        "dev:0": RepairState.ADVISED,
        "dev:1": RepairState.DONE,
    }
    book.decide(DONE)
    book.see()
    assert book.case.record.probe is not None


def test_decisions_are_safe_to_repeat_and_a_repair_that_is_done_is_not_rejected() -> None:
    book = Book()
    with pytest.raises(NotFoundError):
        book.decide(RepairDecision.ACCEPT)
    book.see(WRONG)
    with pytest.raises(NotFoundError, match="open: dev:0"):
        book.decide(RepairDecision.ACCEPT, "dev:7")
    for _ in range(2):
        book.decide(RepairDecision.REJECT)
    assert [step.state for step in book.open[0].steps] == [RepairState.ADVISED, RepairState.REJECTED]
    book.decide(DONE)
    with pytest.raises(ConflictError, match="healthd fleet release n1"):
        book.decide(RepairDecision.REJECT)


def test_site_that_screens_by_the_soak_tier_proves_a_repair_by_it() -> None:
    book = Book(tier=Tier.SOAK)
    book.see(WRONG)
    book.decide(DONE)
    book.see(deep_at=book.case.now + MINUTE - 1.0)
    assert book.case.quarantine is not None
    assert book.case.record.probe is not None
    assert book.case.record.probe.tier is Tier.SOAK
    book.see(soak_at=book.case.now + MINUTE - 1.0)
    assert book.case.quarantine is None
    assert [one.end for one in book.ended] == [RepairEnd.PASSED]


def test_person_who_keeps_the_node_out_still_gets_the_run_that_shows_the_repair() -> None:
    book = Book(Case(person=True))
    book.see(WRONG)
    book.case.wait(DAY)
    assert book.case.record.probe is None
    book.decide(DONE)
    book.see()
    assert book.case.record.probe is not None


async def test_done_survives_a_takeover_and_the_node_is_admitted_only_after_the_ordered_run(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World("n1", "n2")
    async with running(world, url) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        (one,) = run.engine.repairs()
        assert (one.node, one.advice, one.state) == ("n1", Action.REPLACE, RepairState.ADVISED)
        await run.engine.decide_repair("n1", RepairDecision.ACCEPT, device=None, by="ana", why="part ordered")
    async with running(world, url) as run:
        assert [one.state for one in run.engine.repairs()] == [RepairState.ACCEPTED]
        await run.engine.decide_repair("n1", DONE, device=None, by="ana", why="new part")
    async with running(world, url) as run:
        told: list[Repair] = []
        run.engine.on_repaired.append(told.append)
        world.daemons["n1"].result_of_runs = lambda: tuple(
            dataclasses.replace(r, tier=Tier.DEEP, started_at=world.now) for r in good_results(0.0)
        )
        world.now += 10.0
        _, decision = await run.admit(job="a", nodes=("n1",), wait_seconds=0.0)
        assert decision.decision is Verdict.REJECT
        await run.settle()
        assert len(world.daemons["n1"].runs) == 1
        assert kept(run, "n1") is None
        assert run.engine.repairs() == ()
        (closed,) = await run.engine.closed_repairs(limit=10)
        assert told == [closed]
        assert [step.state.value for step in closed.steps] == ["advised", "accepted", "done", "closed"]
        assert {"repair accepted", "repair done", "repair closed"} <= set(await kinds(run, "n1"))
        metrics = metrics_of(fleet(Clock()))
        metrics.repair_closed(closed)
        text = metrics.render("text/plain")[0].decode()
        assert 'healthd_repair_seconds_count{advice="replace"} 1.0' in text
        assert 'healthd_repair_seconds_count{advice="reboot"} 0.0' in text


async def test_release_and_forgetting_close_a_repair_that_counts_as_none(tmp_path: Path) -> None:
    async with running(World("n1", "n2", "n3"), f"sqlite:///{tmp_path}/a.db") as run:
        for name in ("n1", "n2"):
            measured(run, name, with_wrong(1.0))
        await run.engine.run_once()
        assert len(run.engine.repairs()) == 2
        await run.engine.quarantine("n1", None, why="by ana: wrong alarm")
        run.world.now += 2 * HOUR
        await run.engine.forget("n2", "ana")
        assert run.engine.repairs() == ()
        found = await run.engine.closed_repairs(limit=10)
        assert {one.node: one.end for one in found} == {"n1": RepairEnd.RELEASED, "n2": RepairEnd.GONE}
        assert [one.repaired_seconds for one in found] == [None, None]
