"""Nodes that are gone for good: they keep nobody's place, do not count, and are forgotten; over restarts, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from healthd.aggregator.drain.controller import observe
from healthd.aggregator.drain.plan import Candidate, make_plan
from healthd.aggregator.policy import Policy, Tuning
from healthd.core.model import Quarantine
from tests.aggregator.actuators_kit import Scene, Scheduler, fleet_of, suspect
from tests.aggregator.actuators_kit import kept as kept_out
from tests.aggregator.engine_kit import Running, running
from tests.aggregator.rules_engine_kit import kept, kinds, measured
from tests.aggregator.world import NOW, POLICY, World, with_wrong

DAY = 86400.0


async def lives_on(run: Running, *names: str, days: float) -> None:
    """So many days pass in which these nodes are heard and no others."""
    for _ in range(round(days * 2)):
        run.world.now += DAY / 2
        for name in names:
            run.world.renew(name)
            run.world.tell(name)
        await run.engine.run_once()


def fleet(size: int) -> list[str]:
    return [f"n{i:02}" for i in range(size)]


async def test_quarantined_nodes_that_are_gone_leave_their_places_below_the_breaker_to_others() -> None:
    async with running(World(*fleet(30))) as run:
        for name in ("n00", "n01", "n02"):
            measured(run, name, with_wrong(1.0), after=1.0)
        await run.engine.run_once()
        await lives_on(run, *fleet(30)[3:], days=1.5)
        measured(run, "n03", with_wrong(1.0))
        await run.engine.run_once()
        assert kept(run, "n03") is not None
        assert run.engine.breakers() == {}
        assert kept(run, "n00") is not None, "it is kept out as before"


async def test_names_of_nodes_that_are_gone_do_not_make_a_pool_large() -> None:
    async with running(World(*fleet(40))) as run:
        await lives_on(run, *fleet(10), days=1.5)
        for name in ("n00", "n01", "n02"):
            measured(run, name, with_wrong(1.0), after=1.0)
        await run.engine.run_once()
        assert [name for name in fleet(10) if kept(run, name)] == ["n00", "n01"]
        assert "rules quarantine 2 of 10 nodes and may quarantine 2" in run.engine.breakers()["a"].reason


async def test_after_a_restart_who_has_not_spoken_yet_still_counts_and_who_was_gone_does_not(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World(*fleet(40))
    async with running(world, url) as run:
        await lives_on(run, *fleet(30), days=1.5)
        await pruned(run)
    world.now += 10 * DAY  # nobody listened: that is no silence of theirs
    async with running(world, url, hear=False) as run:
        measured(run, "n00", with_wrong(1.0))
        await run.engine.run_once()
        assert run.engine._memory.rules.breakers.room(world.now, "a").size == 30


async def pruned(run: Running) -> None:
    """What the engine does once an hour, and the turn after it."""
    await run.engine._prune()
    await run.engine.run_once()


async def test_a_node_silent_for_weeks_is_forgotten_quarantined_by_rule_or_not(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World("n1", "bad", "quiet", "kept", "leased", "twice")
    async with running(world, url) as run:
        measured(run, "bad", with_wrong(1.0))
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=NOW, until=None)
        await run.engine.quarantine("kept", word)
        await run.admit(nodes=("leased",))
        assert kept(run, "bad") is not None
        world.daemons["twice"].duplicate = True
        await lives_on(run, "n1", days=27)
        await pruned(run)
        assert sorted(world.daemons) == ["bad", "kept", "leased", "n1", "quiet", "twice"]
        await lives_on(run, "n1", days=1.5)
        await pruned(run)
        # A person's word, a job's node, and a name that two claim stay.
        assert sorted(world.daemons) == ["kept", "leased", "n1", "twice"]
        assert sorted(row.node for row in run.store.load().nodes) == ["kept", "leased", "n1", "twice"]
        assert "bad" not in run.engine.quarantines()
        assert "forgotten" in await kinds(run, "bad")
        world.add("bad", results=with_wrong())
        await run.engine.run_once()
        assert kept(run, "bad") is not None, "what is latched on the machine is not forgotten"


def test_days_until_a_node_is_forgotten_are_bounded() -> None:
    assert Policy(forget_days=1.0).forget_days == 1.0
    with pytest.raises(ValueError, match="forget_days: must be from 1"):
        Policy(forget_days=0.0)


# --- the hand -------------------------------------------------------------------------------------------------------


def test_nodes_that_are_gone_take_no_place_of_those_that_can_be_taken_out() -> None:
    dead = [suspect(f"dead{i}", kept_out(since=NOW - 1000 + i), gone=True) for i in range(6)]
    live = [suspect(f"n{i}", kept_out()) for i in range(4)]
    plan = make_plan(NOW, fleet_of(*dead, *live), frozenset({"dead0"}))
    assert sorted(plan.out) == ["dead0", "n0", "n1", "n2", "n3"], "a mark on one that is gone stays"
    assert plan.kept_back["dead1"] == "it has not reported for a day"
    person: Candidate = dataclasses.replace(suspect("dead9", kept_out("ada")), gone=True)
    assert list(make_plan(NOW, fleet_of(person), frozenset()).out) == ["dead9"]


async def test_nodes_that_the_scheduler_does_not_know_take_no_place_either() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)

    scene.quarantine(*(f"stranger{i}" for i in range(6)))
    await scene.hand.turn()
    assert scheduler.marks == {}
    scene.suspects.update({f"n{i}": suspect(f"n{i}", kept_out(since=NOW)) for i in range(3)})
    for _ in range(2):  # four are tried in the first turn, and two more in the second
        await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n0", "n1", "n2"]


async def test_mark_on_a_node_that_was_forgotten_stays_until_the_node_speaks() -> None:
    scheduler = Scheduler()
    scene = Scene(scheduler)
    heard = {"n1"}
    look = scene.hand._look
    scene.hand._look = lambda told: dataclasses.replace(look(told), knows=heard.__contains__)

    scene.quarantine("n1")
    await scene.hand.turn()
    scene.suspects.clear()
    heard.clear()
    await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n1"], "nobody is there to speak for it"
    heard.add("n1")
    await scene.hand.turn()
    assert scheduler.marks == {}


# --- a database that does not know its fleet yet --------------------------------------------------------------------


async def test_fresh_database_gives_nothing_back_until_it_has_proved_itself(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, tuning=Tuning())
    world = World()
    async with running(world, f"sqlite:///{tmp_path}/a.db", policy) as run:
        assert observe(run.engine, world, {}).unsure, "nobody was heard: that nothing is quarantined proves nothing"
        world.add("n1")
        world.now += policy.tuning.settle_seconds + 1
        world.sync("n1")
        await run.engine.run_once()
        assert observe(run.engine, world, {}).unsure
        world.now += policy.recovery_seconds
        world.sync("n1")
        await run.engine.run_once()
        assert not observe(run.engine, world, {}).unsure
    async with running(world, f"sqlite:///{tmp_path}/a.db", policy) as run:
        assert observe(run.engine, world, {}).unsure, "it has just started"
        world.now += policy.tuning.settle_seconds + 1
        assert not observe(run.engine, world, {}).unsure


async def test_what_this_process_took_out_itself_is_given_back_however_new_its_database_is() -> None:
    scheduler = Scheduler(marks={"n0": "of before"})
    scene = Scene(scheduler)
    scene.unsure = True

    scene.quarantine("n1")
    await scene.hand.turn()
    scene.suspects.clear()
    await scene.hand.turn()
    assert sorted(scheduler.marks) == ["n0"]
