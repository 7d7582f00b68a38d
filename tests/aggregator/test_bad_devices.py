"""One bad device of a node: when it is all that is wrong, and what is out for it; pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from checks.contract import Blame, Finding, Status
from healthd.aggregator.drain.controller import observe
from healthd.aggregator.drain.plan import Removal, make_plan
from healthd.aggregator.quarantine.counting import MOST_FAULTS, MOST_LATCHES, facts_of
from healthd.core.model import DeviceRecord, Inventory, Verdict
from tests.aggregator.actuators_kit import ACT, Scene, Scheduler, fleet_of, kept, suspect
from tests.aggregator.engine_kit import running
from tests.aggregator.rules_engine_kit import measured, slow_results
from tests.aggregator.ruling import DAY, POLICY, ROOM, Case
from tests.aggregator.ruling import fault as finding_of
from tests.aggregator.world import NOW, World, neuron, node, result, state

GPU, PCI = "GPU-5d0ea2a4", "0000:53:00.0"


def record(target: str = "cuda:0", serial: str | None = GPU, bdf: str | None = PCI) -> DeviceRecord:
    return DeviceRecord(target=target, kind="GPU", serial=serial, cores=None, memory_bytes=None, bdf=bdf)


# --- when a device is all that is wrong -----------------------------------------------------------------------------


def devices_of(case: Case) -> tuple[str, ...] | None:
    return None if case.quarantine is None else case.quarantine.devices


def test_latched_device_is_all_that_is_wrong_with_its_node_and_goes_where_it_goes() -> None:
    case = Case()
    case.result(finding_of("EccErrors", device="dev:1"))
    assert devices_of(case) == ("dev:1",)
    case.result(finding_of("WrongResult", device="dev:0"))
    assert devices_of(case) == ("dev:0", "dev:1")
    case.serials = {"dev:0": "S1", "dev:1": "S0"}
    case.result()
    assert devices_of(case) == ("dev:0", "dev:1")
    case.result(finding_of("KernelFault"))
    assert devices_of(case) == (), "something is wrong with the node itself"


def test_device_without_a_serial_number_is_not_told_from_others() -> None:
    case = Case(serials={"dev:0": None, "dev:1": None})
    case.result(finding_of("EccErrors", device="dev:1"))
    assert devices_of(case) == ()


def test_counted_failures_name_the_devices_of_the_results_that_are_looked_at() -> None:
    case = Case()
    slow = [finding_of("SlowDevice", device=f"dev:{number}") for number in range(2)]
    for _ in range(3):
        case.result(slow[0])
    assert devices_of(case) == ("dev:0",)
    for _ in range(4):
        case.result(*slow)
    assert devices_of(case) == ("dev:0", "dev:1")
    for _ in range(5):
        case.result(slow[1])
    assert devices_of(case) == ("dev:1",), "dev:0 did not fail in the last five"
    case.result(finding_of("SlowDevice"))
    assert devices_of(case) == ()


def test_device_stays_named_until_the_quarantine_ends() -> None:
    case = Case()
    for _ in range(3):
        case.result(finding_of("SlowDevice", device="dev:0"))
    case.result()
    case.result()
    assert case.quarantine is not None
    assert case.quarantine.until is not None
    assert devices_of(case) == ("dev:0",)
    case.now += DAY
    case.result()
    assert case.quarantine is None


def test_many_bad_devices_are_a_bad_node() -> None:
    serials: dict[str, str | None] = {f"dev:{number}": f"S{number}" for number in range(MOST_LATCHES + 1)}
    case = Case(serials=serials)
    for number in range(4):
        case.result(finding_of("EccErrors", device=f"dev:{number}"))
    assert len(devices_of(case) or ()) == 4
    case.result(finding_of("EccErrors", device="dev:4"))
    assert devices_of(case) == ()


def test_one_fault_of_each_device_is_among_those_that_are_looked_at() -> None:
    targets = ["dev:0"] * MOST_FAULTS + ["dev:1"]
    devices = (record("dev:0"), record("dev:1"))
    inventory = Inventory(
        accelerator="cuda", device_count=2, core_count=None, memory_bytes=None, efa_count=None, devices=devices
    )
    findings = tuple(
        Finding(target=target, status=Status.FAIL, message="bad", reason="EccErrors", blame=Blame.NODE)
        for target in targets
    )
    failed = dataclasses.replace(result("matmul", status=Status.FAIL), findings=findings)
    seen = node("n1", dataclasses.replace(state("n1", (failed,)), inventory=inventory))
    facts = facts_of(NOW, seen, POLICY, room=ROOM, person=False, kept=False)
    assert {one.device for one in facts.outcomes[0].faults} == {"dev:0", "dev:1"}


# --- what is out for it ---------------------------------------------------------------------------------------------


class Remembering(Scheduler):
    """As `Scheduler`, and what was to be out of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[tuple[list[str], bool]] = []

    async def remove(self, removal: Removal) -> Any:
        self.out.append((sorted(device.target for device in removal.devices), removal.whole))
        return await super().remove(removal)


def test_quarantine_of_a_device_takes_out_the_device_and_a_gates_reject_the_node_besides() -> None:
    quarantine = dataclasses.replace(kept(), devices=("cuda:0",))
    bad = suspect("n1", quarantine, devices=(record(),))
    (removal,) = make_plan(NOW, fleet_of(bad), frozenset()).out.values()
    assert (removal.devices, removal.whole) == ((record(),), False)
    (removal,) = make_plan(NOW, fleet_of(suspect("n1", quarantine)), frozenset()).out.values()
    assert (removal.devices, removal.whole) == ((), True), "this scheduler knows no devices"


async def test_each_change_of_what_is_to_be_out_is_made_so_at_once() -> None:
    scheduler = Remembering()
    scene = Scene(scheduler)
    quarantine = dataclasses.replace(kept(), devices=("cuda:0",))
    scene.suspects["n1"] = suspect("n1", quarantine, devices=(record(),))
    await scene.hand.turn()
    await scene.hand.turn()
    assert scheduler.out == [(["cuda:0"], False)]
    two = (record(), record("cuda:1", "GPU-1", None))
    scene.suspects["n1"] = suspect("n1", quarantine, devices=two)
    await scene.hand.turn()
    assert scheduler.out[1:] == [(["cuda:0", "cuda:1"], False)]
    scene.suspects["n1"] = suspect("n1", quarantine)
    await scene.hand.turn()
    assert scheduler.out[2:] == [([], True)]
    assert [kind for _, kind, _ in scene.history] == ["removed from scheduling"] * 3


async def test_reject_for_the_quarantine_alone_is_held_until_the_node_is_out_and_ends_with_it() -> None:
    """No gate admits a quarantined node, whatever device is left out: the next attempt must start elsewhere."""
    scheduler = Remembering()
    scene = Scene(scheduler)
    quarantine = dataclasses.replace(kept(), devices=("cuda:0",))
    scene.suspects["n1"] = suspect("n1", quarantine, devices=(record(),))
    await scene.hand.turn()
    answer = scene.reject("g-1", "n1", code="Quarantined")
    assert (await scene.hand.settle("g-1", answer, 0.0)).decision is Verdict.HOLD
    await scene.hand.turn()
    assert scheduler.out == [(["cuda:0"], False), (["cuda:0"], True)]
    assert await scene.hand.settle("g-1", answer, 0.0) is answer
    scene.wall += ACT.gate_seconds
    await scene.hand.turn()
    assert scheduler.out[2:] == [(["cuda:0"], False)]
    scene.wall = NOW
    scene.reject("g-2", "n1", code="Quarantined")
    scene.suspects.clear()
    await scene.hand.turn()
    assert scheduler.marks == {}, "nothing but the quarantine had spoken against it"


async def test_devices_of_a_quarantine_are_told_as_the_node_shows_them() -> None:
    world = World()
    devices = tuple(record(f"cpu:{number}", f"GPU-{number}") for number in range(2))
    inventory = dataclasses.replace(neuron(), devices=devices, workers=())
    async with running(world) as run:
        world.add("n1")
        await run.engine.run_once()
        for _ in range(3):
            measured(run, "n1", slow_results(), inventory=inventory)
            await run.engine.run_once()
        (one,) = observe(run.engine, world, {}, by_device=True).suspects
        assert one.devices == devices[:1]
        (one,) = observe(run.engine, world, {}).suspects
        assert one.devices == ()
        measured(run, "n1", slow_results(), inventory=None)
        (one,) = observe(run.engine, world, {}, by_device=True).suspects
        assert [(device.target, device.serial) for device in one.devices] == [("cpu:0", None)]
