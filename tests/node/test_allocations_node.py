"""What the schedulers' word does to a node: taken, probed or left alone, and how long leases last."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checks.contract import Tier
from healthd.cli.hooks.gate import own_workload
from healthd.core.model import RunOrder
from healthd.node.checks.scheduler import ALLOCATION_WATCH_SECONDS
from healthd.node.occupancy.model import NO_SCHEDULERS, Reading, Scheduled, Workload, allocations
from healthd.node.orders.leases import HeldLease, Observations, judge_lease
from healthd.node.settings import ActiveSettings, Unprompted
from tests.every import every
from tests.node.node_kit import MovedClock, World, eventually, lease, lease_order, quiet, run, run_order

MINUTES = 60.0


def seen(*jobs: str, unseen: str = "") -> Reading:
    return Reading(
        scheduler="Slurm", kind="slurm", workloads=tuple(Workload(name=f"slurm:{job}") for job in jobs), unseen=unseen
    )


def silent(*remembered: str) -> Reading:
    before = tuple(Workload(name=f"slurm:{job}") for job in remembered)
    return Reading(scheduler="Slurm", kind="slurm", workloads=None, unseen="it does not answer", remembered=before)


class Told:
    """The schedulers of a host say what a test has them say."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = readings
        self.clock = MovedClock()
        self.looks = 0

    async def look(self) -> Scheduled:
        self.looks += 1
        return Scheduled(readings=self.readings, read_at=self.clock.at)


def world(folder: Path, told: Told, active: ActiveSettings | None = None) -> World:
    made = World(folder, active=active, schedulers=told)
    told.clock = made.time
    return made


def claims(made: World) -> list[tuple[str, str]]:
    return [(claim.by, claim.holder) for claim in made.book.allocated]


def test_job_that_compiles_for_forty_minutes_keeps_its_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = Told(seen("7"))
        async with world(tmp_path, told) as made:
            await quiet()
            for _ in range(80):
                await made.passed(0.5 * MINUTES)
                assert claims(made) == [("scheduler", "slurm:7")]
            assert made.probes.active_plans() == []
            told.readings = (seen(),)
            await made.passed(30)
            assert made.book.allocated == ()
            assert [plan.tier for plan in made.probes.active_plans()] == [Tier.QUICK]

    run(scenario())


def test_nothing_active_runs_before_the_schedulers_were_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = Told(seen("7"))
        async with world(tmp_path, told, ActiveSettings(unprompted=Unprompted.IDLE)) as made:
            await quiet()
            assert told.looks > 0
            assert made.probes.active_plans() == []

    run(scenario())


def test_blind_scheduler_means_one_run_a_boot_and_sight_brings_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = Told(silent())
        async with world(tmp_path, told) as made:
            await quiet()
            assert len(made.probes.active_plans()) == 1
            await made.passed(120 * MINUTES)
            assert len(made.probes.active_plans()) == 1
            # Nobody could renew it, so it stands.
            assert [spec.expires_seconds for spec in made.book.specs if spec.tier is Tier.QUICK] == [None]
            told.readings = (seen(),)
            await made.passed(30)
            await quiet()
            assert len(made.probes.active_plans()) == 2
            assert [spec.expires_seconds for spec in made.book.specs if spec.tier is Tier.QUICK] == [9000.0]

    run(scenario())


def test_run_under_way_ends_when_the_devices_are_given_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = Told(seen())
        async with world(tmp_path, told, ActiveSettings(unprompted=Unprompted.OFF)) as made:
            made.probes.gate.clear()
            await made.take(run_order())
            assert made.status("R1") == "running"
            told.readings = (seen("7"),)
            await eventually(lambda: made.status("R1") == "refused", ALLOCATION_WATCH_SECONDS + 5)
            assert made.orders.reports()["R1"].message == "the devices are allocated to a job: slurm:7"
            await quiet()
            assert len(made.probes.cancelled) == 1

    run(scenario())


@pytest.mark.parametrize(("workload", "status"), [("slurm:7", "done"), ("slurm:8", "refused"), (None, "refused")])
def test_gate_of_a_job_may_probe_what_the_job_was_given(tmp_path: Path, workload: str | None, status: str) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Told(seen("7")), ActiveSettings(unprompted=Unprompted.OFF)) as made:
            await quiet()
            order = dataclasses.replace(run_order(), run=RunOrder(tier=Tier.QUICK, workload=workload))
            await made.take(order)
            await eventually(lambda: made.status("R1") == status)

    run(scenario())


def test_gate_of_a_job_may_not_probe_what_a_process_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, Told(seen("7")), ActiveSettings(unprompted=Unprompted.OFF)) as made:
            made.probes.holders = ("cpu:0: pid 7 (python)",)
            await made.scheduler.refresh()
            await made.take(dataclasses.replace(run_order(), run=RunOrder(tier=Tier.QUICK, workload="slurm:7")))
            assert made.status("R1") == "refused"

    run(scenario())


def test_lease_is_taken_for_the_job_that_was_given_the_devices_and_for_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = Told(seen("7"))
        async with world(tmp_path, told, ActiveSettings(unprompted=Unprompted.OFF)) as made:
            await quiet()
            await made.take(lease_order(lease("L1", workload="slurm:8")))
            assert made.status("L1") == "refused"
            await made.take(lease_order(lease("L2", workload="slurm:7")))
            assert made.status("L2") == "accepted"
            # It compiles, and no process has a device.
            for _ in range(40):
                await made.passed(1 * MINUTES)
                made.orders.tick()
            assert made.status("L2") == "accepted"
            told.readings = (seen(),)
            for _ in range(4):
                await made.passed(0.5 * MINUTES)
                made.orders.tick()
            assert made.orders.reports()["L2"].message == "slurm:7 has ended"

    run(scenario())


def held(*, age: float, workload: str | None = "slurm:7", last: float | None = None) -> HeldLease:
    return HeldLease(lease=lease(workload=workload), taken_at=1e6 - age, seen_at=None if last is None else 1e6 - last)


LONG = 86401.0


@every(
    ("one", "readings", "holders", "ended", "is_seen"),
    [
        (held(age=5), (seen("7"),), (), "", True),
        (held(age=LONG), (seen("7"),), (), "", True),
        (held(age=899), (seen(),), (), "", False),
        (held(age=900), (seen(),), (), "slurm:7 was not seen within 900 s", False),
        (held(age=900), (seen("8"),), ("x",), "slurm:7 was not seen within 900 s", False),
        (held(age=900, last=59), (seen(),), (), "", False),
        (held(age=900, last=60), (seen(),), ("x",), "slurm:7 has ended", False),
        # A silent scheduler ends nothing that it had; what it never had goes by who holds the devices.
        (held(age=900, last=600), (silent("7"),), (), "", False),
        (held(age=LONG, last=600), (silent("7"),), (), "", False),  # its time counts from when it was last seen
        (
            held(age=LONG, last=LONG),
            (silent("7"),),
            (),
            "its time of 24 h is over, and no node can observe its job",
            False,
        ),
        (held(age=900, last=600), (silent(),), (), "the devices have been free for 600 s", False),
        (held(age=900), (silent(),), ("x",), "", True),
        # One that does not see all may see this one.
        (held(age=900), (seen("7", unseen="no Contain"),), (), "", True),
        (held(age=900, last=5), (seen(unseen="no Contain"),), (), "", False),
        # One that knows that it has ended need not be asked twice.
        (
            held(age=900, last=5),
            (Reading(scheduler="Slurm", kind="slurm", workloads=(), ended=(Workload(name="slurm:7"),)),),
            (),
            "slurm:7 has ended",
            False,
        ),
        # No such scheduler here, or no name: whoever has the devices.
        (held(age=900, workload="pod:ml/a"), (seen("7"),), (), "", True),
        (held(age=900, workload=None), (seen("7"),), (), "", True),
        (held(age=900, workload=None), (seen(),), (), "no process took the devices within 900 s", False),
        (held(age=900, workload="pod:ml/a"), (), (), "no process took the devices within 900 s", False),
    ],
)
def test_lease_lives_with_its_workload(
    one: HeldLease, readings: tuple[Reading, ...], holders: tuple[str, ...], ended: str, is_seen: bool
) -> None:
    sight = Observations(
        start_of=lambda _: None, holders=holders, surveyed_at=1e6, scheduled=Scheduled(readings=readings, read_at=1e6)
    )
    found = judge_lease(one, sight, now=1e6, settle_seconds=60.0)
    assert (found.ended, found.seen) == (ended, is_seen)


def test_pod_is_known_by_its_uid_too() -> None:
    pod = Workload(name="pod:ml/a", aliases=("pod:7d2c",))
    scheduled = Scheduled(readings=(Reading(scheduler="Kubernetes", kind="pod", workloads=(pod,)),), read_at=1e6)
    sight = Observations(start_of=lambda _: None, holders=(), surveyed_at=1e6, scheduled=scheduled)
    assert judge_lease(held(age=9e5, workload="pod:7d2c"), sight, now=1e6, settle_seconds=60.0).seen


def test_what_cannot_be_seen_at_all_names_both_reasons() -> None:
    (claim,) = allocations(surveyed=True, holders=None, leases=(), unseen="mount the socket")
    assert (claim.by, "mount the socket" in claim.holder) == ("unseen", True)


def test_many_workloads_are_a_few_lines() -> None:
    found = allocations(surveyed=True, holders=(), leases=(), scheduled=[f"slurm:{job}" for job in range(20)])
    assert (len(found), found[-1].holder) == (9, "and 12 more")


def test_hook_names_the_allocation_that_it_runs_in() -> None:
    pod = {"POD_NAME": "a", "POD_NAMESPACE": "ml"}
    assert (own_workload(pod, ("n1",)), own_workload(pod, None), own_workload({}, None)) == (
        "pod:ml/a",
        "pod:ml/a",
        None,
    )
    assert own_workload({**pod, "POD_UID": "7d2c"}, None) == "pod:ml/a/7d2c"
    # A pod that asks for others: it may go on when their job has ended, and end before.
    assert own_workload(pod, ("n1", "n2")) is None
    assert [own_workload({**pod, "NODE_NAME": node}, ("n1",)) for node in ("n1", "n2")] == ["pod:ml/a", None]


def test_before_the_first_look_there_is_no_word() -> None:
    assert (NO_SCHEDULERS.workloads, NO_SCHEDULERS.unseen, NO_SCHEDULERS.of("slurm:1")) == ((), "", None)
