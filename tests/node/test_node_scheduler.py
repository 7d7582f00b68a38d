"""When checks run: ticks, the quick tier's rule, orders first, nothing active while somebody has the devices."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Status, Tier
from healthd.core.errors import ConfigError
from healthd.core.model import CheckResult, OrderReport
from healthd.node.checks.active_run import DeviceUse
from healthd.node.checks.catalogue import PassiveTimetable, QuickFacts, enabled_checks, quick_due_at
from healthd.node.http.control_socket import without
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.node.state.store import NodeStore, StampedResult
from healthd.runner.settings import Survey
from tests.every import every
from tests.node.node_kit import BOOT as NODE_BOOT
from tests.node.node_kit import (
    CATALOGUE,
    MovedClock,
    World,
    eventually,
    finding,
    quiet,
    result,
    run,
    settings,
    specs,
)

# --- ticks ------------------------------------------------------------------------------------------------------------


def test_all_passive_checks_are_due_at_the_start() -> None:
    table = PassiveTimetable(specs(), now=100.0, phase_ratio=0.5)
    assert table.due(100.0) == ("disk", "load")


def test_checks_that_are_due_together_share_a_tick() -> None:
    table = PassiveTimetable(specs(), now=100.0, phase_ratio=0.5)  # disk each 30 s, load each 60 s, phase 15 s
    table.started(table.due(100.0), 100.0)
    ticks = []
    for _ in range(5):
        at = table.next_at()
        ticks.append((at, table.due(at)))
        table.started(table.due(at), at)
    assert ticks == [
        (115.0, ("disk", "load")),
        (145.0, ("disk",)),
        (175.0, ("disk", "load")),
        (205.0, ("disk",)),
        (235.0, ("disk", "load")),
    ]


def test_missed_ticks_are_skipped_not_made_up_for() -> None:
    table = PassiveTimetable(specs(), now=0.0, phase_ratio=0.0)
    table.started(("disk", "load"), 3600.5)
    assert table.next_at() == 3630.0


def test_no_passive_check_means_never_due() -> None:
    assert PassiveTimetable((), now=0.0, phase_ratio=0.3).next_at() == math.inf


# --- the rule of the quick tier ---------------------------------------------------------------------------------------


def due_at(
    mode: Unprompted,
    *,
    status: Status | None = Status.PASS,
    measured_at: float = 0.0,
    attempted_at: float | None = 0.0,
    released: bool = False,
    forced: bool = False,
    untested: bool = False,
    now: float = 10.0,
) -> float:
    stamped = (
        None
        if status is None
        else StampedResult(result=result("matmul", finding(status)), measured_at=measured_at, boot_id=None)
    )
    facts = QuickFacts(
        specs=specs(),
        result=lambda name: stamped,
        attempted_at=attempted_at,
        released=released,
        forced=forced,
        untested=untested,
        jitter=0.0,
    )
    return quick_due_at(facts, ActiveSettings(unprompted=mode, interval_seconds=3600, retry_seconds=120), now=now)


IDLE, BOOT, OFF = Unprompted.IDLE, Unprompted.BOOT, Unprompted.OFF


@every(
    ("at", "expected"),
    [
        (due_at(IDLE), 3600.0),
        (due_at(IDLE, status=None, attempted_at=None), 10.0),
        (due_at(IDLE, status=None, attempted_at=5.0), 125.0),
        (due_at(IDLE, status=Status.WARN), 3600.0),
        (due_at(IDLE, status=Status.FAIL), 120.0),
        (due_at(IDLE, status=Status.UNKNOWN), 120.0),
        (due_at(IDLE, status=Status.SKIP), 120.0),
        (due_at(IDLE, released=True), 10.0),
        (due_at(IDLE, released=True, attempted_at=8.0), 18.0),
        (due_at(IDLE, forced=True), 10.0),
        (due_at(IDLE, untested=True), 120.0),
        (due_at(IDLE, untested=True, attempted_at=None), 10.0),
        (due_at(BOOT, untested=True), math.inf),
        (due_at(BOOT), math.inf),
        (due_at(BOOT, status=None, attempted_at=None), 10.0),
        (due_at(BOOT, status=Status.FAIL), math.inf),
        (due_at(BOOT, released=True), math.inf),
        (due_at(OFF, status=None, attempted_at=None), math.inf),
        (due_at(OFF, released=True), math.inf),
        (due_at(OFF, forced=True), 10.0),
    ],
)
def test_quick_tier_is_due_by_the_rule(at: float, expected: float) -> None:
    assert at == expected


def test_results_expire_by_what_could_renew_them(tmp_path: Path) -> None:
    def expiry(mode: Unprompted) -> dict[str, float | None]:
        chosen = enabled_checks(CATALOGUE, settings(tmp_path, active=ActiveSettings(unprompted=mode)))
        return {spec.name: spec.expires_seconds for spec in chosen}

    assert expiry(IDLE) == {"disk": 95.0, "load": 185.0, "matmul": 9000.0, "burn": None}
    assert expiry(BOOT) == expiry(OFF) == {"disk": 95.0, "load": 185.0, "matmul": None, "burn": None}


def test_rival_fault_7_an_enabled_name_that_matches_nothing_is_an_error_at_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node.checks: no such check: 'matmull'; did you mean 'matmul'\?"):
        enabled_checks(CATALOGUE, settings(tmp_path, checks=("matmull",)))


def test_rival_fault_1_no_check_at_all_is_an_error_at_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no check is enabled"):
        enabled_checks(CATALOGUE, settings(tmp_path, disabled=tuple(CATALOGUE)))


# --- the scheduler at work --------------------------------------------------------------------------------------------


def test_first_round_is_passive_in_one_run_and_then_the_quick_tier_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            assert world.probes.plans[0].checks == ("disk", "load")
            assert [plan.checks for plan in world.probes.active_plans()] == [("matmul",)]
            assert world.book.snapshot().health.value == "healthy"

    run(main())


def test_rival_fault_22_nothing_active_runs_while_a_job_has_the_devices(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.holders = ("cpu:0: pid 7 (python)",)
            await quiet()
            await world.passed(7200)
            assert world.probes.active_plans() == []
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, (), said.append)
            assert [report.status for report in said] == ["refused"]
            assert "pid 7 (python)" in said[0].message

    run(main())


def test_holders_that_cannot_be_seen_count_as_a_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.holders = None
            await quiet()
            await world.passed(7200)
            assert world.probes.active_plans() == []

    run(main())


def test_release_makes_the_quick_tier_overdue_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await quiet()
            world.probes.holders = ("cpu:0: pid 7 (python)",)
            await world.passed(60)
            before = len(world.probes.active_plans())
            world.probes.holders = ()
            await world.passed(60)
            assert len(world.probes.active_plans()) == before + 1

    run(main())


def test_device_that_is_back_is_looked_at_at_once_and_measured_as_soon_as_the_rule_allows(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            probes, state = world.probes, world.book.snapshot
            probes.outcome = lambda check, plan: dataclasses.replace(
                result(check, tier=plan.tier), began_at=world.time.at
            )
            await quiet()
            assert state().health.value == "healthy"
            world.time.move(1)
            probes.since, before = world.time.at, len(probes.plans)
            await world.scheduler.refresh()
            await quiet()
            assert [plan.checks for plan in probes.plans[before:]] == [("disk", "load")]
            assert [(one.code, one.target) for one in state().reasons] == [("NotYetRun", "cpu:0")]
            await world.passed(ActiveSettings().retry_seconds)
            assert state().health.value == "healthy"

    run(main())


def test_rival_fault_12_a_repaired_node_clears_without_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.outcome = lambda check, plan: result(check, finding(Status.FAIL), tier=plan.tier)
            await quiet()
            assert world.book.snapshot().health.value == "unhealthy"
            await world.passed(130)
            assert world.book.snapshot().health.value == "unhealthy"  # rival fault 4: seen twice, it is still a fault
            world.probes.outcome = lambda check, plan: result(check, tier=plan.tier)
            await world.passed(130)
            assert world.book.snapshot().health.value == "healthy"

    run(main())


def test_order_runs_the_tier_and_all_lighter_ones_and_tells_how_it_went(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.DEEP, (), said.append)
            await quiet()
            assert world.probes.active_plans()[-1].checks == ("disk", "load", "matmul", "burn")
            assert [report.status for report in said] == ["accepted", "running", "done"]
            assert said[-1].message == "deep: 4 pass"

    run(main())


def test_order_joins_the_run_that_does_its_work_already(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.gate.clear()
            await quiet()
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, (), said.append)
            world.probes.gate.set()
            await quiet()
            # The devices were probed once; the passive checks that the order wants too had a run of their own.
            assert [p.checks for p in world.probes.active_plans()] == [("matmul",), ("disk", "load")]
            assert said[-1].status == "done"

    run(main())


def test_one_active_run_at_a_time_and_passive_ones_go_on_beside_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            world.probes.gate.clear()
            await quiet()
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.DEEP, (), said.append)
            passive = len(world.probes.plans) - len(world.probes.active_plans())
            await world.passed(60)
            assert len(world.probes.active_plans()) == 1
            assert len(world.probes.plans) - len(world.probes.active_plans()) == passive + 1
            world.probes.gate.set()
            await quiet()
            assert [plan.tier for plan in world.probes.active_plans()] == [Tier.QUICK, Tier.DEEP]

    run(main())


def test_cancelled_order_stops_its_run_and_the_next_one_starts(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            world.probes.gate.clear()
            first: list[OrderReport] = []
            second: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, (), first.append)
            await quiet()
            world.scheduler.cancel("o1", "called off")
            world.scheduler.order("o2", Tier.QUICK, (), second.append)
            world.probes.gate.set()
            await quiet()
            assert [r.status for r in first] == ["accepted", "running", "cancelled"]
            assert len(world.probes.cancelled) == 1
            assert second[-1].status == "done"

    run(main())


@pytest.mark.parametrize("use", [False, True])
def test_killed_workers_that_still_have_their_devices_open_do_not_look_like_a_job(tmp_path: Path, use: bool) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            world.probes.gate.clear()
            ranks = DeviceUse(name="ranks", work=forever, refuse=lambda why: None, on_stop=lambda why: None)
            if use:
                world.scheduler.use_devices(ranks)
            else:
                world.scheduler.order("o1", Tier.QUICK, (), lambda report: None)
            await eventually(lambda: world.book.running is not None)
            await quiet()
            world.time.move(60.0)
            world.probes.holders = ("cpu:0: pid 7 (python)",)  # until the kernel has closed its files
            looks = world.probes.surveys
            if use:
                world.scheduler.stop_use(ranks, "called off")
            else:
                world.scheduler.cancel("o1", "called off")
            await eventually(lambda: world.probes.surveys > looks)
            assert world.book.running is not None
            world.probes.holders = ()
            await eventually(lambda: world.book.running is None)
            assert world.book.allocated == ()

    run(main())


@pytest.mark.parametrize("stand_down", [False, True])
def test_order_that_is_cancelled_while_the_devices_are_looked_at_does_not_start(
    tmp_path: Path, stand_down: bool
) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            world.time.move(2.0)  # the last look is too old for a run
            world.probes.look_gate.clear()
            looks = world.probes.surveys
            first: list[OrderReport] = []
            second: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, (), first.append)
            await eventually(lambda: world.probes.surveys > looks)
            if stand_down:
                await world.scheduler.stop_active("called off")
            else:
                world.scheduler.cancel("o1", "called off")
            world.scheduler.order("o2", Tier.QUICK, (), second.append)
            world.probes.look_gate.set()
            await eventually(lambda: second[-1].status == "done")
            assert [(r.status, r.message) for r in first] == [("accepted", ""), ("cancelled", "called off")]
            assert [plan.order for plan in world.probes.active_plans()] == ["o2"]

    run(main())


@pytest.mark.parametrize("stand_down", [False, True])
def test_order_does_not_join_a_run_that_is_being_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_down: bool
) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            cleaned_up = asyncio.Event()
            scripted = world.probes.run

            async def slow_to_end(*args: Any, **named: Any) -> tuple[CheckResult, ...]:
                try:
                    return await scripted(*args, **named)
                except asyncio.CancelledError:
                    await cleaned_up.wait()
                    raise

            monkeypatch.setattr(world.probes, "run", slow_to_end)
            world.probes.gate.clear()
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, (), lambda report: None)
            await quiet()
            standing_down = asyncio.ensure_future(world.scheduler.stop_active("a job")) if stand_down else None
            if standing_down is None:
                world.scheduler.cancel("o1", "called off")
            await quiet()
            world.scheduler.order("o2", Tier.QUICK, (), said.append)
            world.probes.gate.set()
            cleaned_up.set()
            await quiet()
            assert standing_down is None or standing_down.done()
            assert len(world.probes.cancelled) == 1
            assert [plan.order for plan in world.probes.active_plans()] == ["o1", "o2"]
            assert said[-1] == OrderReport(status="done", message="quick: 3 pass")

    run(main())


def test_run_that_found_the_devices_busy_is_no_done_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            world.probes.outcome = lambda check, plan: result(check, finding(Status.SKIP, "Busy"), tier=plan.tier)
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, ("matmul",), said.append)
            await quiet()
            assert said[-1].status == "refused"

    run(main())


def test_unknown_check_in_an_order_is_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            said: list[OrderReport] = []
            world.scheduler.order("o1", Tier.QUICK, ("nonsense",), said.append)
            assert said == [OrderReport(status="refused", message="check not enabled here: 'nonsense'")]

    run(main())


def test_set_fault_runs_what_it_touches_and_clearing_drops_what_it_latched(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=BOOT)) as world:
            await quiet()
            world.probes.outcome = lambda check, plan: result(
                check, finding(Status.FAIL if check == "matmul" else Status.PASS), tier=plan.tier, injected=True
            )
            world.scheduler.set_faults(("matmul=corrupt",))
            await quiet()
            assert world.probes.faults[-1] == ("matmul=corrupt",)
            assert world.book.snapshot().health.value == "unhealthy"
            world.probes.outcome = lambda check, plan: result(check, tier=plan.tier)
            world.scheduler.set_faults(())
            assert world.book.result("matmul") is None
            await quiet()
            assert world.probes.faults[-1] == ()
            assert world.book.snapshot().health.value == "healthy"

    run(main())


def test_a_fault_at_a_place_of_a_check_is_a_fault_of_that_check(tmp_path: Path) -> None:
    placed = "matmul.block1.gelu@cpu:0=corrupt:0.001/10000"  # as train_step has them: the names here are another's
    store = NodeStore(settings(tmp_path), specs(), clock=MovedClock().clock, boot_id=NODE_BOOT)
    assert store.set_faults((placed,)) == {"matmul"}
    assert store.set_faults(()) == {"matmul"}
    assert without([placed, "load=fail"], ["matmul"]) == ("load=fail",)


def test_result_of_a_fault_that_was_cleared_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            world.scheduler.set_faults(("matmul=corrupt",))
            world.probes.gate.clear()
            await quiet()
            world.probes.outcome = lambda check, plan: result(
                check, finding(Status.FAIL), tier=plan.tier, injected=len(world.probes.active_plans()) < 2
            )
            world.scheduler.set_faults(())
            world.probes.gate.set()
            await quiet()
            kept = world.book.result("matmul")
            assert len(world.probes.active_plans()) == 2
            assert kept is not None
            assert not kept.result.injected

    run(main())


def test_stay_is_refused_when_the_look_at_the_devices_fails(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ActiveSettings(unprompted=OFF)) as world:
            await quiet()
            survey, refused = world.probes.survey, list[str]()

            async def broken() -> Survey:
                world.probes.survey = survey  # type: ignore[method-assign]
                raise RuntimeError("no look")

            async def never() -> None:
                raise AssertionError("it has begun")

            world.probes.survey = broken  # type: ignore[method-assign]
            stay = DeviceUse(name="visit", work=never, refuse=refused.append, on_stop=refused.append)
            world.scheduler.use_devices(stay)
            await asyncio.wait_for(stay.released.wait(), 5)
            assert ["RuntimeError" in why for why in refused] == [True]
            world.forgive()

    run(main())
