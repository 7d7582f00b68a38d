"""Screening in idle hours: what is ordered when, what a job that comes sees of it, and what is remembered."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from healthd.aggregator.screening.service import ScreeningCollector
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.core.model import Allocation, GateRequest, Quarantine
from tests.aggregator.lab import Lab, inventory
from tests.aggregator.screening_kit import DAY, DEEP, SETTINGS, Idle, site
from tests.aggregator.world import NOW, good_results


async def test_one_node_of_a_small_pool_at_a_time_until_all_have_passed() -> None:
    async with site(Idle("n1", "n2", "n3")) as here:
        seen = []
        for _ in range(3):
            await here.turn()
            (name,) = here.world.screened()
            assert set(here.world.orders(name)) == set(DEEP)
            assert here.listed()[name].work == "deep"
            seen.append(name)
            here.world.finish(name)
        await here.turn()
        assert sorted(seen) == ["n1", "n2", "n3"]
        assert here.world.screened() == set()
        assert await here.kinds("n1") == ["screened"]
        await here.turn(9 * DAY)
        assert here.world.screened() == set(), "they rest for half of `every`"
        await here.turn(2 * DAY)
        assert len(here.world.screened()) == 1


async def test_a_gate_takes_the_node_in_its_own_pass_and_what_had_passed_counts() -> None:
    async with site(Idle("n1")) as here:
        await here.turn()
        assert here.world.orders("n1")
        here.world.part("n1", "matmul", "all_reduce")
        await here.turn(1.0)
        await here.run.engine.ask(GateRequest(job="train", nodes=("n1",)))
        orders = here.world.daemons["n1"].orders or ()
        assert here.world.orders("n1") == (), "withdrawn before the gate has its answer"
        assert [order.kind for order in orders] == ["lease"]
        await here.run.settle()
        await here.turn()
        assert here.world.screened() == set()
        assert "screening yields" in await here.kinds("n1")
        here.world.end_job("n1")
        await here.run.settle()
        await here.turn(61.0)
        await here.turn(61.0)
        assert here.world.orders("n1") == ("memory",), "only what had not passed"
        here.world.finish("n1")
        await here.turn()
        assert "screened" in await here.kinds("n1")


async def test_a_gate_that_waits_for_others_has_the_nodes_that_it_names_off_their_screening() -> None:
    async with site(Idle("n1", "n2")) as here:
        here.world.renew("n2", allocated=(Allocation(by="process", holder="1234"),))
        here.world.tell("n2")
        await here.turn()
        assert here.world.screened() == {"n1"}
        gate = await here.run.engine.ask(GateRequest(job="train", nodes=("n1", "n2")))
        assert here.world.screened() == set()
        await here.turn(120.0)
        assert here.world.screened() == set(), "nothing begins there while the gate is open"
        await here.run.engine.release(gate.id)
        await here.turn(120.0)
        assert here.world.screened() == {"n1"}


async def test_a_failure_is_noted_and_counted_and_the_node_is_not_tried_again_at_once() -> None:
    async with site(Idle("n1", "n2")) as here:
        await here.turn()
        (name,) = here.world.screened()
        here.world.finish(name, bad="memory")
        await here.turn()
        assert await here.kinds(name) == ["screening failed"]
        assert here.listed()[name].candidate.failures == 1
        assert here.world.screened() == {"n1", "n2"} - {name}
        (other,) = here.world.screened()
        here.world.finish(other)
        await here.turn(3600.0)
        assert here.world.screened() == set(), "it rests for six hours"
        await here.turn(6 * 3600.0)
        assert here.world.orders(name) == ("memory",)


async def test_a_node_with_a_hard_fault_is_quarantined_and_not_screened_while_it_is() -> None:
    async with site(Idle("n1"), rules=True) as here:
        await here.turn()
        here.world.finish("n1", bad="memory")
        await here.turn()
        kept = here.run.engine.quarantines()["n1"]
        assert kept.owner_kind == "rule"
        assert {"screening failed", "quarantined"} <= set(await here.kinds("n1"))
        await here.turn(DAY)
        assert here.world.screened() == set()
        assert here.screening.figures() == {}, "nobody can screen it"


async def test_a_person_who_quarantines_a_node_ends_its_screening() -> None:
    async with site(Idle("n1")) as here:
        await here.turn()
        assert here.world.orders("n1")
        kept = Quarantine(reason="r", owner="ana", owner_kind="person", since=here.world.now, until=None)
        await here.run.engine.quarantine("n1", kept)
        assert here.world.orders("n1") == ()


async def test_a_node_that_is_forgotten_ends_its_screening_and_no_other(tmp_path: Path) -> None:
    async with site(Idle("n1", "n2")) as here:
        await here.turn()
        (name,) = here.world.screened()
        await here.run.engine.forget(name, "ana")
        await here.turn(61.0)
        (other,) = here.world.screened()
        assert {name, other} == {"n1", "n2"}
        here.world.finish(other)
        await here.turn(4 * 3600.0)  # long after the run on the forgotten node would have been late
        assert await here.kinds(other) == ["screened"]


async def test_the_next_aggregator_knows_what_had_passed_and_withdraws_what_runs(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", Idle("n1", "n2")
    async with site(world, url=url) as here:
        await here.turn()
        (first,) = world.screened()
        world.finish(first)
        await here.turn()
        (second,) = world.screened()
        world.part(second, "matmul")
        await here.turn(1.0)
    world.now += DAY
    # Since then other checks ran in the quick tier, as they do before each job: only the aggregator knows of the deep.
    for name in world.daemons:
        world.renew(name, results=good_results())
    async with site(world, url=url) as here:
        assert world.screened() == set()
        await here.turn()
        assert world.screened() == {second}
        assert set(world.orders(second)) == set(DEEP) - {"matmul"}
        assert here.listed()[first].candidate.days_since_pass is not None


async def test_another_machine_under_the_name_begins_anew_and_another_driver_is_due() -> None:
    async with site(Idle("n1")) as here:
        await here.turn()
        here.world.finish("n1")
        await here.turn()
        assert here.listed()["n1"].candidate.days_since_pass is not None
        assert here.listed()["n1"].candidate.age_days is None, "it may be old"
        here.world.renew("n1", versions={"nvidia_driver": "570"})
        await here.turn(DAY)
        assert not here.listed()["n1"].candidate.changed, "it was not known before"
        assert here.world.screened() == set()
        here.world.renew("n1", instance_id="i-2", results=good_results())
        await here.turn(DAY)
        assert here.listed()["n1"].candidate.days_since_pass is None
        assert here.world.orders("n1")
        here.world.finish("n1")
        await here.turn()
        assert here.listed()["n1"].candidate.age_days is not None, "it came after the others"
        here.world.renew("n1", versions={"nvidia_driver": "575"})
        await here.turn(DAY)
        assert here.listed()["n1"].candidate.changed
        assert set(here.world.orders("n1")) == set(DEEP)
        here.world.finish("n1")
        await here.turn()
        assert not here.listed()["n1"].candidate.changed
        assert here.world.screened() == set()


async def test_a_neighbour_of_a_node_that_failed_is_at_risk() -> None:
    async with site(Idle("n1", "n2", "n3")) as here:
        for name, switch in (("n1", "s1"), ("n2", "s1"), ("n3", "s2")):
            here.world.renew(name, labels={"pool": "a", "switch": switch})
        await here.turn()
        assert here.world.screened() == {"n1"}
        here.world.finish("n1", bad="memory")
        await here.turn()
        found = {name: one.candidate.neighbour_failed for name, one in here.listed().items()}
        assert found == {"n1": False, "n2": True, "n3": False}


async def test_a_pair_that_fails_borrows_a_free_node_within_the_share_and_names_the_one_at_fault() -> None:
    world, lab = Idle("n1", "n2", "n3"), Lab(("n1", "n2", "n3"), bad={"n2": "corrupt"})
    for name in world.daemons:
        world.renew(name, inventory=inventory(), peer_address="10.0.0.1")
    async with site(world, ScreeningSettings(tier="deep", share=1.0)) as here:
        await here.turn()
        assert world.screened() == {"n1", "n2", "n3"}
        for name in world.daemons:
            world.finish(name)
        for _ in range(30):
            await here.turn(1.0)
            assert len(here.run.engine.screenings()) <= 3
            world.link(lab)
        assert "accused" in await here.kinds("n2")
        assert "screening failed" in await here.kinds("n2")
        assert "accused" not in [*await here.kinds("n1"), *await here.kinds("n3")]
        assert here.listed()["n1"].paired_at is not None
        assert here.listed()["n2"].paired_at is None


async def test_a_pool_with_a_share_of_one_node_screens_no_pairs() -> None:
    world = Idle("n1", "n2", "n3")
    for name in world.daemons:
        world.renew(name, inventory=inventory(), peer_address="10.0.0.1")
    async with site(world) as here:
        await here.screen_all()
        await here.turn(60.0)
        assert here.run.engine.screenings() == {}


async def test_only_nodes_of_the_pools_of_the_settings_are_screened_in_their_hours() -> None:
    hour = int(NOW % DAY // 3600)
    world = Idle("n1")
    world.add("x1", pool="x")
    world.renew("x1", checks=world.daemons["n1"].state.checks)
    chosen = dataclasses.replace(SETTINGS, pools=("x",), windows=(f"{(hour + 2) % 24}-{(hour + 4) % 24}",))
    async with site(world, chosen) as here:
        await here.turn()
        assert world.screened() == set()
        await here.turn(2 * 3600.0)
        assert world.screened() == {"x1"}
        assert set(here.screening.figures()) == {"x"}


async def test_figures_say_how_old_the_oldest_screening_is_and_how_many_are_due() -> None:
    async with site(Idle("n1", "n2")) as here:
        for name in ("n1", "n2"):
            here.world.renew(name, allocated=(Allocation(by="process", holder="1234"),))
        await here.turn()
        await here.turn(22 * DAY)
        (age, due, busy) = here.screening.figures()["a"]
        assert (age > 21 * DAY, due, busy) == (True, 2, 0)
        here.world.renew("n1", allocated=())
        await here.turn(120.0)
        assert here.screening.figures()["a"][1:] == (2, 1)
        here.world.finish("n1")
        await here.turn()
        assert here.screening.figures()["a"][1:] == (1, 0)
        names = {one.name for one in ScreeningCollector(here.screening).collect()}
        assert names == {f"healthd_screening_{one}" for one in ("oldest_seconds", "due_nodes", "running_nodes")}


@pytest.mark.parametrize(
    "wrong", [{"every_seconds": 0.0}, {"share": 0.0}, {"share": 1.5}, {"windows": ("6",)}, {"windows": ("7-7",)}]
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_seconds")):
        ScreeningSettings(**wrong)
