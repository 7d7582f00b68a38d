"""Whatever nodes report in whatever order: the promises of the rules hold."""

from __future__ import annotations

import dataclasses

from hypothesis import example, given, settings
from hypothesis import strategies as st

from checks.contract import Action, Blame, Finding, Status, Tier
from checks.reasons import REASONS
from healthd.aggregator.quarantine.counting import counts, facts_of
from healthd.aggregator.quarantine.judge import judge
from healthd.aggregator.quarantine.records import Latch, LiftQuarantine, PoolLimit, RuleRecord, SetQuarantine
from healthd.core import wire
from healthd.core.model import DeviceRecord, Inventory, Reason
from tests.aggregator.ruling import HOUR, POLICY, ROOM, Case, fault, outcome
from tests.aggregator.world import NOW, node, result, state
from tests.profile import examples

CODES = sorted(REASONS)
NODE_CODES = sorted(code for code, one in REASONS.items() if one.blame is Blame.NODE)
OTHER_CODES = sorted(code for code, one in REASONS.items() if one.blame is not Blame.NODE)

faults = st.builds(
    fault, st.sampled_from(NODE_CODES), device=st.sampled_from([None, "dev:0", "dev:1"]), injected=st.booleans()
)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "after": st.sampled_from([1.0, 60.0, 700.0, HOUR, 30 * HOUR]),
            "faults": st.lists(faults, max_size=2),
            "known": st.booleans(),
            "boot": st.sampled_from(["b1", "b2", None]),
            "serial": st.sampled_from(["S0", "T0", None]),
            "tier": st.sampled_from([Tier.PASSIVE, Tier.QUICK, Tier.DEEP]),
            "person": st.booleans(),
            "injected": st.sampled_from([(), ("matmul=fail",)]),
            "allocated": st.booleans(),
            "kept": st.integers(0, 12),
            "open": st.booleans(),
            "deep": st.booleans(),
        }
    ),
    max_size=25,
)


def play(case: Case, step: dict[str, object]) -> None:
    case.now += step["after"]  # type: ignore[operator]
    case.boot_id, case.injected = step["boot"], step["injected"]  # type: ignore[assignment]
    case.serials = {"dev:0": step["serial"], "dev:1": "S1"}  # type: ignore[dict-item]
    case.person, case.allocated = bool(step["person"]), bool(step["allocated"])
    if case.person:
        case.quarantine = None  # a person's word takes the place of the rule's
    case.room = PoolLimit(pool="a", size=100, kept=step["kept"], most=10, open=bool(step["open"]))  # type: ignore[arg-type]
    found = outcome(case.now - 0.5, *step["faults"], tier=step["tier"], known=bool(step["known"]))  # type: ignore[misc, arg-type]
    allowed = tuple(one for one in found.faults if not one.injected or case.injected)
    passed = False if allowed else found.passed if not found.faults else None
    found = dataclasses.replace(found, faults=allowed, passed=passed)
    at = case.now - 0.5 if step["deep"] else None
    case.look(found, quick_at=at, deep_at=at)


LOOK = {
    "after": 1.0,
    "faults": [],
    "known": False,
    "boot": "b1",
    "serial": "S0",
    "tier": Tier.PASSIVE,
    "person": False,
    "injected": (),
    "allocated": False,
    "kept": 0,
    "open": False,
    "deep": False,
}
LEFT_WITH_AN_INJECTED_FAULT = [
    LOOK | {"faults": [fault("StuckProcesses", device="dev:0")]},
    LOOK | {"faults": [fault("EccErrors", device="dev:0", injected=True)], "injected": ("matmul=fail",)},
    LOOK | {"serial": None},
]


@given(steps)
@example(LEFT_WITH_AN_INJECTED_FAULT)
@settings(max_examples=examples(150), deadline=None)
def test_the_same_facts_again_change_nothing_and_the_record_survives_the_disk(story: list[dict[str, object]]) -> None:
    case = Case()
    for step in story:
        play(case, step)
        assert case.last is not None
        facts = dataclasses.replace(case.last, kept=case.quarantine is not None)
        identities = dict.fromkeys((*facts.identities, *(seat.identity for seat in case.record.seats)))
        # What a cleared fault did to a device that is not here goes for good once the device is seen again.
        latches = tuple(
            one for key in identities for one in case.latches.get(key, ()) if case.injected or not one.fault.injected
        )
        composed = dataclasses.replace(case.record, latches=latches)
        again, effects = judge(case.now, composed, facts, case.policy)
        if facts.room.kept < facts.room.most and not facts.room.open:
            assert not [one for one in effects if isinstance(one, SetQuarantine | LiftQuarantine)]
        # A run whose time is set by now itself may be ordered a look later.
        assert dataclasses.replace(again, probe=None, probe_after=0.0) == dataclasses.replace(
            composed, probe=None, probe_after=0.0
        )
        assert wire.decode(wire.encode(case.record), RuleRecord, what="record") == case.record
        assert wire.decode(wire.encode(latches), tuple[Latch, ...], what="latches") == latches
        assert len(case.record.counts) <= 64
        assert len(wire.encode(case.record)) < 60_000


@given(steps)
@settings(max_examples=examples(150), deadline=None)
def test_the_breaker_and_a_person_always_win_and_a_latch_never_ends_by_itself(story: list[dict[str, object]]) -> None:
    case = Case()
    for step in story:
        before, said = case.quarantine, len(case.effects)
        play(case, step)
        new = case.quarantine is not None and before is None
        if step["person"]:
            assert not [one for one in case.effects[said:] if isinstance(one, SetQuarantine | LiftQuarantine)]
        if new:
            assert not step["open"]
            assert int(str(step["kept"])) < 10
        here = set(case.last.identities) if case.last is not None else set()
        held = [one for key in here for one in case.latches.get(key, ())]
        if case.quarantine is not None and any(one.fault.action is Action.REPLACE for one in held):
            assert case.quarantine.until is None
        if not step["injected"]:
            assert not any(one.fault.injected for one in held)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CODES),
            st.sampled_from([Blame.PATH, Blame.CHECK, Blame.CONTROL]),
            st.sampled_from(list(Status)),
            st.sampled_from([None, *Action]),
        ),
        max_size=12,
    )
)
@settings(max_examples=examples(150), deadline=None)
def test_blame_that_is_not_the_nodes_never_marks_it(
    told: list[tuple[str, Blame, Status, Action | None]],
) -> None:
    case, now = Case(), NOW
    for code, blame, status, action in told:
        now += 60.0
        finding = Finding(status=status, reason=code, message="m", target="cpu:0", blame=blame, action=action)
        shown = dataclasses.replace(result("matmul", status=status), findings=(finding,), started_at=now)
        known = node("n1", state("n1", [dataclasses.replace(shown, age_seconds=1.0)]))
        facts = facts_of(now, known, POLICY, room=ROOM, person=False, kept=False)
        case.now = now
        case.take(facts)
        accusation = Reason(code=code, message="m", status=Status.FAIL, blame=blame, action=Action.REPLACE, node="n1")
        assert not counts(accusation)
    assert case.quarantine is None
    assert not case.record.active


@given(st.sampled_from(OTHER_CODES))
def test_a_code_of_another_blame_is_no_accusation_whatever_it_says(code: str) -> None:
    said = Reason(code=code, message="m", status=Status.FAIL, blame=Blame.NODE, action=Action.REPLACE, node="n1")
    assert not counts(said)


texts = st.one_of(st.none(), st.sampled_from(["S0", "S0", "S1"]))


@given(
    st.lists(st.tuples(st.sampled_from(["dev:0", "dev:1", "rank:0"]), texts, st.one_of(st.none(), st.integers(0, 4)))),
    st.lists(st.sampled_from(["core:0", "core:1", "core:2", "core:3"]), unique=True),
    st.sampled_from(["dev:0", "core:3", "rank:1", "rank:99", "path:/tmp", "node", "rank:x"]),
    st.floats(allow_nan=True, allow_infinity=True),
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_a_node_says_of_its_devices_makes_facts(
    devices: list[tuple[str, str | None, int | None]], workers: list[str], target: str, age: float
) -> None:
    inventory = Inventory(
        accelerator="x",
        device_count=None,
        core_count=None,
        memory_bytes=None,
        efa_count=None,
        devices=tuple(
            DeviceRecord(target=name, kind="x", serial=serial, cores=cores, memory_bytes=None)
            for name, serial, cores in devices
        ),
        workers=tuple(workers),
    )
    finding = Finding(status=Status.FAIL, reason="WrongResult", message="m", target=target)
    shown = dataclasses.replace(result("matmul", status=Status.FAIL), findings=(finding,), age_seconds=age)
    known = node("n1", dataclasses.replace(state("n1", [shown]), inventory=inventory))
    facts = facts_of(NOW, known, POLICY, room=ROOM, person=False, kept=False)
    told = [serial for _, serial, _ in devices]
    for serial in facts.serials.values():
        assert serial is None or told.count(serial) == 1
    for one in facts.outcomes:
        assert one.passed is False
        assert facts.identity_of(one.faults[0].device) in facts.identities
