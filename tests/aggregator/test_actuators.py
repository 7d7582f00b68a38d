"""Bad nodes out of the scheduler's way: what is wanted, how it is made so, and that only what is ours is undone."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Status, Tier
from healthd.aggregator.drain.controller import ActuatorCollector, observe
from healthd.aggregator.drain.plan import (
    ActuatorError,
    Candidate,
    NodeFault,
    RejectedNode,
    Why,
    culprits,
    make_plan,
)
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.drain.targets import make_actuator
from healthd.aggregator.gate.records import Decided, Gate
from healthd.aggregator.policy import Policy
from healthd.core.errors import HealthdError, StoreError
from healthd.core.model import Quarantine, Reason, Verdict
from tests.aggregator import parts
from tests.aggregator.actuators_kit import ACT, Scene, Scheduler, decided, fault, fleet_of, kept, suspect
from tests.aggregator.lab import Lab
from tests.aggregator.world import NOW, node, state


def rejected(until: float = NOW + 600, *, injected: bool = False) -> RejectedNode:
    return RejectedNode(gate="g-1", reason="WrongResult on neuron:3", injected=injected, since=NOW, until=until)


def out(*suspects: Candidate, already: frozenset[str] = frozenset(), **more: Any) -> list[str]:
    return list(make_plan(NOW, fleet_of(*suspects, **more), already).out)


# --- what is wanted -------------------------------------------------------------------------------------------------


def test_quarantined_node_is_to_be_out_until_its_quarantine_ends() -> None:
    assert out(suspect("n1", kept())) == ["n1"]
    assert out(suspect("n1", kept(until=NOW + 1))) == ["n1"]
    assert out(suspect("n1", kept(until=NOW))) == []


def test_node_that_a_gate_rejected_is_out_for_a_while() -> None:
    plan = make_plan(NOW, fleet_of(suspect("n1", rejected=rejected())), frozenset())
    assert plan.out["n1"].why is Why.GATE
    assert "gate g-1: WrongResult" in plan.out["n1"].reason
    assert out(suspect("n1", rejected=rejected(until=NOW))) == []


def test_rules_take_out_no_more_than_their_share_of_a_pool_and_those_first_that_are_out() -> None:
    many = [suspect(f"n{i}", kept(since=NOW - 100 + i)) for i in range(9)]
    assert out(*many) == ["n0", "n1", "n2", "n3"], "a tenth of 40, the oldest first"
    assert out(*many, already=frozenset({"n8"})) == ["n8", "n0", "n1", "n2"]
    plan = make_plan(NOW, fleet_of(*many), frozenset())
    assert "4 of 40 nodes are out already (pool a)" in plan.kept_back["n8"]


def test_small_pool_loses_two_at_most() -> None:
    assert len(out(*(suspect(f"n{i}", kept()) for i in range(4)), size=4)) == 2


def test_person_is_not_bounded_by_the_share() -> None:
    assert len(out(*(suspect(f"n{i}", kept("ada")) for i in range(9)), size=10)) == 9


def test_open_breaker_lets_nothing_new_out_and_takes_nothing_back() -> None:
    two = (suspect("n1", kept()), suspect("n2", kept()), suspect("n3", kept("ada")))
    opened = frozenset({"a"})
    assert out(*two, breakers=opened) == ["n3"]
    assert out(*two, breakers=opened, already=frozenset({"n1"})) == ["n1", "n3"]
    plan = make_plan(NOW, fleet_of(*two, breakers=opened), frozenset())
    assert "breaker reset" in plan.kept_back["n1"]


def test_removal_tells_what_must_not_be_ended_for_it() -> None:
    plan = make_plan(
        NOW,
        fleet_of(suspect("n1", kept(), faults=True, allocated=True), suspect("n2", kept("ada"), faults=True)),
        frozenset(),
    )
    assert (plan.out["n1"].injected, plan.out["n1"].allocated, plan.out["n1"].by_person) == (True, True, False)
    assert (plan.out["n2"].injected, plan.out["n2"].by_person) == (False, True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([f"n{i}" for i in range(30)]),
            st.sampled_from(["rule:soft", "rule:hard", "ada"]),
            st.floats(NOW - 1000, NOW),
            st.one_of(st.none(), st.floats(NOW - 100, NOW + 100)),
        ),
        max_size=30,
        unique_by=lambda item: item[0],
    ),
    st.sets(st.sampled_from([f"n{i}" for i in range(30)])),
    st.booleans(),
)
def test_plan_is_stable_bounded_and_of_suspects_alone(
    told: list[tuple[str, str, float, float | None]], already: set[str], opened: bool
) -> None:
    suspects = tuple(suspect(name, kept(owner, since=since, until=until)) for name, owner, since, until in told)
    seen = fleet_of(*suspects, breakers=frozenset({"a"}) if opened else frozenset())
    plan = make_plan(NOW, seen, already)
    assert set(plan.out) <= {one.node for one in suspects}
    assert not set(plan.out) & set(plan.kept_back)
    assert sum(not removal.by_person for removal in plan.out.values()) <= 4
    # What was carried out is wanted again: the hand does not swing.
    again = make_plan(NOW, seen, frozenset(plan.out))
    assert set(again.out) == set(plan.out)


# --- what a reject accuses ------------------------------------------------------------------------------------------


def test_only_nodes_at_fault_are_accused() -> None:
    found = culprits(
        decided(
            ("bad", fault()),
            ("unknown", fault("Timeout", Status.UNKNOWN)),
            ("path", fault("PathFault")),
            ("busy", fault("Allocated", Status.UNKNOWN)),
            ("silent", fault("Silent")),
        )
    )
    assert list(found) == ["bad"]


def test_only_a_retryable_reject_accuses() -> None:
    assert culprits(decided(("bad", fault()), retryable=False)) == {}
    assert culprits(decided(("bad", fault()), verdict=Verdict.ADMIT)) == {}
    assert culprits(decided(("bad", fault()), verdict=Verdict.HOLD)) == {}


# --- the hand, with a scheduler in memory ---------------------------------------------------------------------------


def test_quarantine_takes_a_node_out_and_its_end_gives_it_back() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    async def play() -> None:
        scene.quarantine("n1")
        await scene.hand.turn()
        assert scheduler.marks == {"n1": "rule:hard: EccErrors on neuron:3"}
        scene.suspects.clear()
        await scene.hand.turn()
        assert scheduler.marks == {}

    asyncio.run(play())
    assert [(name, kind) for name, kind, _ in scene.history] == [
        ("n1", "removed from scheduling"),
        ("n1", "given back"),
    ]


def counted(scene: Scene) -> dict[tuple[str, str], float]:
    """What a scrape shows, by name and call."""
    found = {}
    for family in ActuatorCollector(scene.hand).collect():
        for sample in family.samples:
            assert sample.labels["kind"] == "scheduler"
            found[sample.name.removeprefix("healthd_actuator_"), sample.labels.get("call", "")] = sample.value
    return found


async def test_what_the_hand_does_and_what_fails_is_counted_and_a_lasting_failure_shows() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    assert set(counted(scene).values()) == {0}, "every series is there from the start"
    scheduler.refuses.add("n2")
    scene.quarantine("n1", "n2")
    await scene.hand.turn()
    found = counted(scene)
    assert (found["calls_total", "list"], found["calls_total", "remove"], found["calls_total", "restore"]) == (
        1,
        2,
        0,
    )
    assert (found["failures_total", "remove"], found["nodes_out", ""], found["nodes_overdue", ""]) == (1, 1, 1)
    scene.suspects.pop("n2")
    await scene.hand.turn()
    assert counted(scene)["nodes_overdue", ""] == 0, "nobody wants it out any more"
    scene.suspects.clear()
    await scene.hand.turn()
    found = counted(scene)
    assert (found["calls_total", "restore"], found["nodes_out", ""]) == (1, 0)


async def test_a_scheduler_that_cannot_even_be_listed_shows_until_it_can() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    scheduler.away = "connection refused"
    with pytest.raises(ActuatorError):
        await scene.hand.turn()
    assert (counted(scene)["failures_total", "list"], counted(scene)["nodes_overdue", ""]) == (1, 1)
    scheduler.away = None
    await scene.hand.turn()
    assert counted(scene)["nodes_overdue", ""] == 0


def test_marks_from_before_a_restart_are_found_and_undone() -> None:
    scheduler = Scheduler(marks={"n1": "old", "n2": "old"})
    scene = Scene(scheduler)
    scene.quarantine("n2")
    asyncio.run(scene.hand.turn())
    assert list(scheduler.marks) == ["n2"]


async def test_aggregator_that_does_not_know_its_fleet_yet_gives_nothing_back() -> None:
    scheduler = Scheduler(marks={"n1": "old"})
    scene = Scene(scheduler)
    scene.unsure = True

    scene.quarantine("n2")
    await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n1", "n2"]
    scene.unsure = False
    await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n2"]


def test_observe_touches_nothing_and_says_what_it_would_do(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(marks={"n9": "old"})
    scene = Scene(scheduler, ActuatorSettings(kind="kubernetes"))
    scene.quarantine("n1")
    caplog.set_level(logging.WARNING)

    async def play() -> None:
        for _ in range(3):
            await scene.hand.turn()
        answer = scene.reject("g-1", "n2")
        assert await scene.hand.settle("g-1", answer, 5.0) is answer

    asyncio.run(play())
    assert scheduler.asked == []
    assert len([r for r in caplog.records if "n1 would be removed from scheduling" in r.getMessage()]) == 1


async def test_no_more_than_so_many_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler, ActuatorSettings(kind="kubernetes", mode="act", removals_per_minute=3))

    scene.quarantine(*(f"n{i}" for i in range(5)), owner="ada")
    await scene.hand.turn()
    assert len(scheduler.marks) == 3
    scene.now += 30.0
    await scene.hand.turn()
    assert len(scheduler.marks) == 3
    assert caplog.text.count("3 nodes per minute") == 1
    scene.now += 31.0
    await scene.hand.turn()
    assert len(scheduler.marks) == 5


async def test_one_node_that_is_refused_does_not_keep_the_others_in() -> None:
    scheduler = Scheduler()
    scheduler.refuses = {"n1"}
    scene = Scene(scheduler)
    scene.quarantine("n1", "n2", "n3")

    await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n2", "n3"]
    asked = scheduler.asked.count("remove n1")
    await scene.hand.turn()
    assert scheduler.asked.count("remove n1") == asked, "not at once again"
    scheduler.refuses.clear()
    scene.now += 2.0
    await scene.hand.turn()
    assert "n1" in scheduler.marks


async def test_node_that_the_scheduler_does_not_know_is_left_and_holds_nobody() -> None:
    scene = Scene(Scheduler())

    async with scene.running():
        answer = scene.reject("g-1", "stranger")
        assert await scene.hand.settle("g-1", answer, 5.0) is answer


@pytest.mark.parametrize("error", [StoreError("disk full"), HealthdError("internal error")])
def test_history_that_cannot_be_written_stops_nothing(error: HealthdError) -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)
    scene.disk_full, scene.no_note = True, error
    scene.quarantine("n1")
    asyncio.run(scene.hand.turn())
    assert "n1" in scheduler.marks


def test_mark_for_a_reject_stands_over_a_restart_until_its_time_is_over() -> None:
    """The gates on disk are told again at the start, when and however often that is."""
    scheduler = Scheduler()
    scheduler.marks["n1"] = "gate g-1: 100% wrong"
    scene = Scene(scheduler)
    scene.wall = NOW + ACT.gate_seconds - 1.0
    scene.reject("g-1", "n1")  # decided at NOW
    asyncio.run(scene.hand.turn())
    assert "n1" in scheduler.marks
    scene.wall += 2.0
    scene.reject("g-1", "n1")
    asyncio.run(scene.hand.turn())
    assert "n1" not in scheduler.marks


# --- a reject is answered after the removal -------------------------------------------------------------------------


async def test_reject_is_answered_when_its_node_is_out() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    async with scene.running():
        answer = scene.reject("g-1", "n1")
        held = await scene.hand.settle("g-1", answer, 0.0)
        assert held.decision is Verdict.HOLD
        assert held.reasons[0].code == "Removing"
        assert "n1" in held.reasons[0].message
        assert await scene.hand.settle("g-1", answer, 5.0) is answer
        assert "n1" in scheduler.marks


def test_reject_is_answered_after_its_time_though_the_scheduler_is_away(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scheduler.away = "scheduler: no answer"
    scene = Scene(scheduler)

    async def play() -> None:
        async with scene.running():
            answer = scene.reject("g-1", "n1")
            assert (await scene.hand.settle("g-1", answer, 0.05)).decision is Verdict.HOLD
            scene.now += 6.0
            assert await scene.hand.settle("g-1", answer, 5.0) is answer
            assert await scene.hand.settle("g-1", answer, 5.0) is answer

    asyncio.run(play())
    assert "could not be removed from scheduling in time" in caplog.text


async def test_node_out_for_a_reject_comes_back_after_a_while() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    scene.reject("g-1", "n1")
    await scene.hand.turn()
    assert "n1" in scheduler.marks
    scene.wall += 601.0
    await scene.hand.turn()
    assert scheduler.marks == {}


async def test_node_out_for_a_reject_comes_back_when_newer_evidence_speaks_for_it_or_a_person_releases_it() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    scene.reject("g-1", "n1", "n2")
    assert set(scene.hand.removed()) == {"n1", "n2"}, "at once: the mark is about to come"
    await scene.hand.turn()
    assert set(scheduler.marks) == {"n1", "n2"}
    scene.refuted = frozenset({"n1"})
    await scene.hand.turn()
    assert (set(scheduler.marks), set(scene.hand.removed())) == ({"n2"}, {"n2"})
    await scene.hand.release("n2", "by ana")
    assert ("n2", "released", "by ana") in scene.history
    assert set(scene.hand.removed()) == {"n2"}, "as long as the mark stands"
    await scene.hand.turn()
    assert (scheduler.marks, scene.hand.removed()) == ({}, {})


async def test_node_out_for_a_fault_between_nodes_comes_back_with_a_validation_that_it_passes() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)
    names = ("n1", "n2", "n3")

    def validated(**faults: Any) -> Gate:
        lab = Lab(names, **faults)
        decision = dataclasses.replace(lab.decide(lab.ask(nodes=names)), decided_at=NOW)
        return dataclasses.replace(lab.last, progress=Decided(decision=decision))

    scene.hand.gate_decided(validated(bad={"n3": "corrupt"}))
    await scene.hand.turn()
    assert set(scheduler.marks) == {"n3"}
    scene.hand.gate_decided(validated())
    await scene.hand.turn()
    assert scheduler.marks == {}


def test_which_evidence_speaks_against_a_reject() -> None:
    matmul = NodeFault(check="matmul", tier=Tier.DEEP, since=NOW - 60)
    told = dataclasses.replace(rejected(), faults=(matmul,))

    def after(age: float, tier: Tier = Tier.DEEP, status: Status = Status.PASS, check: str = "matmul") -> bool:
        ran = tuple(parts.result(name, age=age, tier=tier, status=status) for name in (check,))
        return told.refuted_by(parts.state("n1", results=ran), NOW)

    assert after(59.0)
    assert not after(61.0), "it is older"
    assert not after(59.0, tier=Tier.QUICK), "a lighter tier could not have shown it"
    assert not after(59.0, status=Status.FAIL)
    assert not after(59.0, status=Status.UNKNOWN)
    assert not after(59.0, check="memory_free")
    between_nodes = dataclasses.replace(matmul, check=None)
    assert not dataclasses.replace(told, faults=(between_nodes,)).refuted_by(parts.state("n1", age=1.0), NOW)


async def test_node_rejected_for_several_faults_comes_back_when_newer_evidence_speaks_against_each() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    def failed(check: str) -> Reason:
        return dataclasses.replace(fault(), check=check)

    def ran(*, matmul: Status) -> None:
        scene.states["n1"] = parts.state("n1", status=matmul)

    scene.decide(decided(("n1", failed("matmul"), failed("memory_free"))))
    scene.wall += 30.0
    for matmul, out in ((Status.FAIL, {"n1"}), (Status.PASS, set())):
        ran(matmul=matmul)
        await scene.hand.turn()
        assert set(scheduler.marks) == out
    scene.decide(decided(("n1", failed("matmul")), gate_id="g-2"))
    scene.decide(decided(("n1", failed("memory_free")), gate_id="g-3"))
    ran(matmul=Status.FAIL)
    await scene.hand.turn()
    assert set(scheduler.marks) == {"n1"}, "what the earlier gate found still stands"


async def test_reject_of_nodes_that_are_kept_in_by_the_share_is_answered_at_once() -> None:
    scene = Scene(Scheduler())
    scene.quarantine("a1", "a2", "a3", "a4")

    async with scene.running():
        answer = scene.reject("g-1", "n1")
        assert await scene.hand.settle("g-1", answer, 5.0) is answer


async def test_stopping_aggregator_answers_who_is_held() -> None:
    scheduler = Scheduler()
    scheduler.away = "away"
    scene = Scene(scheduler)

    answer = scene.reject("g-1", "n1")
    waiting = asyncio.create_task(scene.hand.settle("g-1", answer, 5.0))
    await asyncio.sleep(0)
    scene.hand.stop()
    async with asyncio.timeout(1.0):
        assert (await waiting).decision is Verdict.HOLD


def test_scheduler_that_is_away_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scheduler.away = "scheduler: no answer"
    scene = Scene(scheduler, ActuatorSettings(kind="kubernetes", mode="act", backoff_max_seconds=0.01))
    scene.quarantine("n1")

    async def play() -> None:
        async with scene.running():
            async with asyncio.timeout(5.0):
                while len(scheduler.asked) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            scheduler.away = None
            async with asyncio.timeout(5.0):
                while "n1" not in scheduler.marks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(play())
    assert caplog.text.count("scheduler: no answer") == 1


# --- put together ---------------------------------------------------------------------------------------------------


def test_no_actuator_unless_one_is_named() -> None:
    assert make_actuator(ActuatorSettings()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner": "a b"},
        {"removals_per_minute": 0},
        {"answer_seconds": 600.0},
        {"look_seconds": 0.0},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_seconds")):
        ActuatorSettings(**wrong)


def test_node_that_nobody_has_heard_of_counts_as_taken() -> None:
    class Fleet:
        policy = Policy()

        def quarantines(self) -> Mapping[str, Quarantine]:
            return {"n1": kept(), "n2": kept(), "n3": kept()}

        def leases(self) -> tuple[Any, ...]:
            return ()

        def breakers(self) -> Mapping[str, Any]:
            return {}

        def present(self, name: str) -> bool:
            return name != "n2"

        def unsure(self) -> bool:
            return False

        def now(self) -> float:
            return NOW

        def pool_of(self, name: str) -> str | None:
            return None if name == "n3" else "a"

        async def note(self, subject: str, kind: str, message: str) -> None: ...

        def node(self, name: str) -> Any:
            return {"n1": node("n1", state("n1")), "n2": None, "n3": None}[name]

        def names(self) -> list[str]:
            return ["n1", "n2", "n3"]

        def pool(self, pool: str) -> list[str]:
            return ["n1", "n2"]

    fleet = Fleet()
    seen = observe(fleet, fleet, {})
    assert [one.allocated for one in seen.suspects] == [False, True, True]
    assert [one.gone for one in seen.suspects] == [False, True, False]
    assert {name: pool.nodes for name, pool in seen.pools.items()} == {"a": 1, "": 1}, (
        "nodes that are gone do not count"
    )
    assert [seen.knows(name) for name in ("n1", "n2")] == [True, False]
