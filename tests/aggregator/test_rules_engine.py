"""Quarantine by rule with a real engine and store: what nodes and gates see of it, over restarts and failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checks.contract import Action, Blame, Status
from healthd.aggregator.gate.records import Accuse
from healthd.aggregator.quarantine.records import RuleMode
from healthd.core.errors import StoreError
from healthd.core.model import DeviceRecord, Inventory, OrderReport, Quarantine, Reason, Verdict
from tests.aggregator.engine_kit import running
from tests.aggregator.rules_engine_kit import kept, kinds, measured, slow_results
from tests.aggregator.world import POLICY, World, good_results, result, with_wrong

HOUR = 3600.0


def serials(*numbers: str | None) -> Inventory:
    devices = tuple(
        DeviceRecord(target=f"cpu:{i}", kind="cpu", serial=serial, cores=1, memory_bytes=None)
        for i, serial in enumerate(numbers)
    )
    return Inventory(
        accelerator="cpu",
        device_count=len(devices),
        core_count=None,
        memory_bytes=None,
        efa_count=None,
        devices=devices,
    )


async def test_a_hard_fault_keeps_the_node_out_over_passes_and_a_restart_until_a_person_releases_it(
    tmp_path: Path,
) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World("n1", "n2", "n3")
    async with running(world, url) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert (found.owner, found.owner_kind, found.until) == ("rule:hard", "rule", None)
        _, decision = await run.admit(job="a", nodes=("n1",))
        codes = [reason.code for reason in decision.excluded[0].reasons]
        assert (codes[0], codes[-1]) == ("WrongResult", "Quarantined")
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
    async with running(world, url) as run:
        _, decision = await run.admit(job="b", nodes=("n1",))
        assert decision.decision is Verdict.REJECT
        assert decision.excluded[0].reasons[0].code == "Quarantined"
        await run.engine.quarantine("n1", None, why="by ana")
        measured(run, "n1", good_results(1.0))
        _, decision = await run.admit(job="c", nodes=("n1",))
        assert decision.decision is Verdict.ADMIT
        events = await kinds(run, "n1")
        assert events[-2:] == ["quarantined", "failed"]
        assert "quarantine lifted" in events


async def test_the_latch_follows_the_device_to_another_node(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World("n1", "n2", "n3")
    async with running(world, url) as run:
        measured(run, "n1", with_wrong(1.0), inventory=serials("S0", "S1"))
        await run.engine.run_once()
        assert kept(run, "n1") is not None
    async with running(world, url) as run:
        measured(run, "n2", good_results(1.0), inventory=serials("S5", "S0"))
        measured(run, "n1", good_results(1.0), inventory=serials("S9", "S1"), boot_id="b2")
        await run.engine.run_once()
        moved, waits = kept(run, "n2"), kept(run, "n1")
        assert moved is not None
        assert "serial:S0" in moved.reason
        assert waits is not None
        assert "serial:S9 replaced the latched serial:S0" in waits.reason
        assert {"replaced", "device replaced", "booted"} <= set(await kinds(run, "n1"))
        await run.engine.quarantine("n1", None)
        measured(run, "n2", good_results(1.0))
        await run.engine.run_once()
        assert (kept(run, "n1"), kept(run, "n2")) == (None, moved), "the other node's latch is not released with it"


async def test_too_many_failures_keep_it_out_until_ordered_runs_pass() -> None:
    world = World("n1", "n2", "n3")
    async with running(world) as run:
        for _ in range(3):
            measured(run, "n1", slow_results())
            await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert found.owner == "rule:soft"
        assert "3 of its last 3 results" in found.reason
        measured(run, "n1", slow_results(), after=660.0)
        await run.engine.run_once()
        orders = run.world.daemons["n1"].orders
        assert orders is not None
        assert [order.kind for order in orders] == ["run"]
        for _ in range(4):
            run.world.now += 40
            run.world.daemons["n1"].result_of_runs = lambda: tuple(
                dataclasses.replace(r, started_at=run.world.now) for r in good_results(1.0)
            )
            await run.settle(rounds=2)
        assert kept(run, "n1") is None
        assert len(run.world.daemons["n1"].runs) == 2
        assert run.world.daemons["n1"].orders == ()
        assert {"passed again", "quarantine lifted"} <= set(await kinds(run, "n1"))


async def test_time_alone_ends_a_quarantine_that_has_nothing_left_to_wait_for() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        for results in (*[slow_results()] * 3, good_results(1.0), good_results(1.0)):
            measured(run, "n1", results)
            await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert found.until is not None
        run.world.now = found.until + 1
        for daemon in run.world.daemons.values():
            daemon.heard_at = run.world.now
        await run.engine.run_once()
        assert kept(run, "n1") is None


async def test_the_breaker_trips_at_a_tenth_of_the_pool_says_so_and_stays_open_over_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    world = World(*(f"n{i:02}" for i in range(30)))
    world.add("lone", pool="b")
    async with running(world, url) as run:
        for i in range(5):
            measured(run, f"n{i:02}", with_wrong(1.0), after=1.0)
        await run.engine.run_once()
        assert [name for name in sorted(world.daemons) if kept(run, name)] == ["n00", "n01", "n02"]
        assert "rules quarantine 3 of 30 nodes and may quarantine 3" in run.engine.breakers()["a"].reason
        assert run.engine.rule_words()["hard", RuleMode.HELD.value] == 2
        assert await kinds(run, "fleet") == ["breaker tripped"]
        measured(run, "lone", with_wrong(1.0))
        await run.engine.run_once()
        assert kept(run, "lone") is not None, "another pool has a breaker of its own"
    async with running(world, url) as run:
        assert list(run.engine.breakers()) == ["a"]
        await run.engine.quarantine("n00", None)
        await run.engine.run_once()
        assert kept(run, "n03") is None, "open until somebody resets it, however few are out"
        assert await run.engine.reset_breaker("ana", None) == ("a",)
        await run.engine.run_once()
        assert kept(run, "n03") is not None
        assert list(run.engine.breakers()) == ["a"], "n04 is still one too many"


async def test_two_nodes_of_a_small_fleet_may_be_kept_out_and_a_third_not() -> None:
    async with running(World("n1", "n2", "n3", "n4")) as run:
        for name in ("n1", "n2", "n3"):
            measured(run, name, with_wrong(1.0), after=1.0)
        await run.engine.run_once()
        assert [name for name in run.world.daemons if kept(run, name)] == ["n1", "n2"]
        _, decision = await run.admit(nodes=("n3",))
        assert decision.decision is Verdict.REJECT, "what fails its evidence is not admitted, breaker or not"


async def test_a_persons_quarantine_is_left_alone_and_its_end_by_a_person_forgives_everything() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=None)
        await run.engine.quarantine("n1", word)
        for _ in range(4):
            measured(run, "n1", with_wrong(1.0))
            await run.engine.run_once()
        assert kept(run, "n1") == word
        await run.engine.quarantine("n1", None)
        await run.settle()
        assert kept(run, "n1") is None


async def test_a_persons_quarantine_that_runs_out_gives_way_to_the_rules() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        until = run.world.now + 100
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=until)
        await run.engine.quarantine("n1", word)
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        assert kept(run, "n1") == word
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert found.owner == "rule:hard"


async def test_an_injected_fault_keeps_the_node_out_while_it_is_in_force_and_leaves_nothing_behind() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        wrong = tuple(dataclasses.replace(r, injected=r.status is Status.FAIL) for r in with_wrong(1.0))
        measured(run, "n1", wrong, faults=("matmul=corrupt",))
        await run.engine.run_once()
        assert kept(run, "n1") is not None
        measured(run, "n1", good_results(1.0), faults=())
        await run.engine.run_once()
        assert kept(run, "n1") is None
        assert run.engine.remembered("n1") is None


async def test_a_write_that_fails_leaves_the_rules_where_the_disk_is(tmp_path: Path) -> None:
    async with running(World("n1", "n2", "n3"), f"sqlite:///{tmp_path}/a.db") as run:
        for _ in range(2):
            measured(run, "n1", slow_results())
            await run.engine.run_once()
        before = run.engine.remembered("n1")
        moved = (tmp_path / "a.db").rename(tmp_path / "away.db")
        measured(run, "n1", slow_results())
        await run.engine.run_once()
        assert run.engine.recovering()
        assert run.engine.unsure(), "what was worked out is not on disk, and that cannot be read either"
        word = Quarantine(reason="x", owner="ana", owner_kind="person", since=0.0, until=None)
        with pytest.raises(StoreError):
            await run.engine.quarantine("n2", word)
        moved.rename(tmp_path / "a.db")
        assert await run.engine._rebuild()
        assert run.engine.recovering() is None
        assert run.engine.remembered("n1") == before
        assert kept(run, "n1") is None
        run.world.now += 5
        run.world.tell("n1")
        await run.engine.run_once()
        assert kept(run, "n1") is not None


async def test_a_rules_quarantine_of_a_lost_database_is_taken_over_as_the_node_tells_it() -> None:
    world = World("n1", "n2", "n3")
    word = Quarantine(reason="matmul WrongResult", owner="rule:hard", owner_kind="rule", since=0.0, until=None)
    world.renew("n1", quarantine=word)
    world.daemons["n1"].issuer = "store-lost"
    async with running(world) as run:
        found = kept(run, "n1")
        assert found is not None
        assert found.owner == "rule:hard"
        assert "matmul WrongResult" in found.reason


async def test_accusations_count_in_the_transaction_that_accuses() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        reason = Reason(
            code="CollectiveFault",
            message="n1 fails in collectives with n2, n3",
            status=Status.FAIL,
            blame=Blame.NODE,
            action=Action.INSPECT,
            node="n1",
        )
        assert "n1" not in run.engine._memory.rules.doubted()
        for number in range(2):
            await run.engine.submit(lambda batch: batch.accused.append(Accuse(node="n1", reason=reason)))
            run.world.now += HOUR
            assert (kept(run, "n1") is not None) is (number == 1)
            assert "n1" in run.engine._memory.rules.doubted()  # from the first on: it is no partner for others
        assert "n2" not in run.engine._memory.rules.doubted()


async def test_with_rules_off_nothing_is_remembered() -> None:
    policy = dataclasses.replace(POLICY, rules=False)
    async with running(World("n1", "n2"), policy=policy) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        assert kept(run, "n1") is None
        assert run.engine.remembered("n1") is None


async def test_a_node_at_rest_writes_nothing_and_is_not_looked_at_again() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        await run.settle()
        before = run.engine.remembered("n1")
        writes = len(await kinds(run, "n1"))
        run.world.daemons["n1"].reports["x"] = OrderReport(status="done")
        for _ in range(3):
            run.world.now += 25
            run.world.tell("n1")
            await run.engine.run_once()
        assert run.engine.remembered("n1") == before
        assert len(await kinds(run, "n1")) == writes


async def test_what_no_machine_would_say_is_cut_and_breaks_no_write(tmp_path: Path) -> None:
    async with running(World("n1", "n2", "n3"), f"sqlite:///{tmp_path}/a.db") as run:
        good = good_results(1.0)
        wrong = result("matmul", age=1.0, status=Status.FAIL, code="WrongResult", message="a\0b\n" * 5000)
        odd = serials("S" * 5000, "x\0y")
        measured(run, "n1", (good[0], wrong, good[2]), inventory=odd, instance_id="i" * 999, boot_id="\0")
        await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert found.reason.isprintable()
        assert len(found.reason) < 1000
        assert "latched on node:n1" in found.reason


@pytest.mark.parametrize("age", [1e12, 1e300])
@pytest.mark.parametrize(
    "target", ["rank:\N{SUPERSCRIPT TWO}", "rank:" + "9" * 5000, "rank:7"], ids=["no digit", "long", "none of them"]
)
async def test_what_a_node_says_without_sense_ends_nobody_but_at_most_itself(target: str, age: float) -> None:
    async with running(World("n1", "n2", "n3")) as run:
        (wrong,) = [one for one in with_wrong() if one.status is Status.FAIL]
        finding = dataclasses.replace(wrong.findings[0], target=target)
        odd = dataclasses.replace(wrong, findings=(finding,), age_seconds=age)
        measured(run, "n1", (odd,), inventory=serials("S0", "S1"))
        await run.engine.run_once()
        assert kept(run, "n2") is None
