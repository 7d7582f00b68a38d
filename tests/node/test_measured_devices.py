"""A result stands for the devices that it measured, as they were then: what came, was reset or swapped is untested."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from pathlib import Path

import pytest

from checks.contract import Status, Tier
from checks.discover import builtin_checks
from healthd.aggregator.fleet.node_record import CompactState
from healthd.core.evidence import judge_tier
from healthd.core.model import Health, NodeState
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.clock import system_clock
from healthd.node.state.saving import StateFile
from healthd.node.state.store import NodeStore, digest_of
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan
from tests.fakes.neuron import NeuronMachine
from tests.node.node_kit import result, settings
from tests.runner.runner_kit import make_runner

BOOT = "boot-1"
QUICK = ("matmul", "all_reduce")


def store_of(folder: Path, *names: str) -> NodeStore:
    wanted = settings(folder, checks=names)
    catalogue = {name: check.info() for name, check in builtin_checks().items()}
    specs = enabled_checks(catalogue, wanted)
    assert {spec.name for spec in specs} == set(names)
    return NodeStore(wanted, specs, clock=system_clock(), boot_id=BOOT)


def run(runner: Runner, store: NodeStore, *names: str, tier: Tier = Tier.QUICK) -> None:
    plan = Plan(tier=tier, checks=names, executor="daemon")
    for one in asyncio.run(runner.run(plan)):
        assert one.status is Status.PASS, one.findings
        store.record(one)
    look(runner, store, again=False)


def look(runner: Runner, store: NodeStore, *, again: bool = True) -> NodeState:
    if again:
        asyncio.run(runner.survey())
    assert runner.latest is not None
    store.set_survey(runner.latest)
    return store.snapshot()


def judged(state: NodeState) -> tuple[Health, list[str]]:
    health, reasons, _ = judge_tier(state, Tier.QUICK, math.inf)
    assert health is state.health, "what the node says of itself"
    assert CompactState(state, 0.0).judged[Tier.QUICK, ()][0] is health, "what a gate takes it for"
    return health, [reason.message for reason in reasons]


@pytest.mark.thorough
def test_device_that_appears_after_the_quick_tier_is_untested_until_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick tier runs while a device is missing; it comes back, and the older result never touched it."""
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "2")
    runner, store = make_runner(), store_of(tmp_path, *QUICK)
    run(runner, store, *QUICK)
    state = store.snapshot()
    assert judged(state) == (Health.HEALTHY, [])
    assert {result.devices for result in state.results} == {("cpu:0", "cpu:1")}
    before = digest_of(state)
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "3")
    state = look(runner, store)
    text = "{} has not run on cpu:2 since the device appeared, was reset or was replaced"
    assert judged(state) == (Health.UNKNOWN, [text.format("all_reduce"), text.format("matmul")])
    assert {reason.code for reason in state.reasons} == {"NotYetRun"}
    assert digest_of(state) != before, "the aggregator is told"
    run(runner, store, *QUICK)
    assert judged(store.snapshot()) == (Health.HEALTHY, [])


def test_device_that_was_gone_and_is_back_is_untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "3")
    runner, store = make_runner(), store_of(tmp_path, "matmul")
    run(runner, store, "matmul")
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "2")
    assert judged(look(runner, store))[0] is Health.HEALTHY, "how many there should be is another check's question"
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "3")
    health, (text,) = judged(look(runner, store))
    assert health is Health.UNKNOWN
    assert "cpu:2" in text


def test_evidence_stands_over_a_restart_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHD_CPU_DEVICES", "2")
    runner, store = make_runner(), store_of(tmp_path, "matmul")
    run(runner, store, "matmul")
    StateFile(store, tmp_path / "state.json").save()
    for devices, health in (("2", Health.HEALTHY), ("3", Health.UNKNOWN)):
        monkeypatch.setenv("HEALTHD_CPU_DEVICES", devices)
        again, other = make_runner(), store_of(tmp_path, "matmul")
        StateFile(other, tmp_path / "state.json").restore()
        again.seen.restore(other.seen_before)
        assert judged(look(again, other))[0] is health


# --- reset and swapped devices, on a stand-in Neuron machine ----------------------------------------------------------

SYSFS = "sys/devices/virtual/neuron_device/neuron{}/info/serial_number"
RESET = (
    "neuron:nr_reset_thread_fn: nd3: initiating device reset request 0",
    "neuron:nr_reset_thread_fn: nd3: reset request 0 completed",
)


class Node:
    """A stand-in machine whose 16 devices have all passed a check a moment ago; no probe runs on a stand-in."""

    def __init__(self, folder: Path, *log: str) -> None:
        self.machine = NeuronMachine(folder / "machine", "trn1.32xlarge")
        self.log(*log, ago_seconds=3000)
        self.runner = make_runner(accelerator="neuron", host_root=self.machine.root, directories=())
        self.store = store_of(folder, "matmul", "kernel_log")
        self.look()
        self.look_at_log()
        self.measure()
        assert self.untested() == ""

    def log(self, *lines: str, ago_seconds: float = 0.0) -> None:
        """The kernel logs these."""
        uptime = float((self.machine.root / "proc/uptime").read_text().split()[0])
        with (self.machine.root / "dev/kmsg").open("a") as file:
            file.writelines(f"[{uptime - ago_seconds:.6f}] {line}\n" for line in lines)

    def look(self) -> None:
        look(self.runner, self.store)

    def look_at_log(self) -> None:
        plan = Plan(tier=Tier.PASSIVE, checks=("kernel_log",), executor="daemon")
        for one in asyncio.run(self.runner.run(plan)):
            self.store.record(one)
        look(self.runner, self.store, again=False)

    def measure(self) -> None:
        inventory = self.store.inventory
        assert inventory is not None
        devices = tuple(device.target for device in inventory.devices)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.store.record(dataclasses.replace(result("matmul", tier=Tier.QUICK), devices=devices, began_at=now))

    def untested(self) -> str:
        reasons = [r for r in judge_tier(self.store.exact(), Tier.QUICK, math.inf).reasons if r.check == "matmul"]
        return ", ".join(str(one.target) for one in reasons)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_device_with_another_serial_number_is_untested(node: Node) -> None:
    (node.machine.root / SYSFS.format(5)).write_text("00aabbccddeeff00\n")
    node.look()
    assert node.untested() == "neuron:5"
    node.measure()
    assert node.untested() == ""


def test_device_whose_driver_was_loaded_again_between_two_looks_is_untested(node: Node) -> None:
    file = node.machine.root / "dev/neuron7"
    former = file.rename(file.with_name("former"))  # its number stays in use
    file.touch()
    node.look()
    assert node.untested() == "neuron:7"
    assert former.exists()


def test_device_that_was_reset_is_untested(node: Node) -> None:
    node.log(*RESET)
    node.look_at_log()
    assert node.untested() == "neuron:3"
    node.measure()
    assert node.untested() == ""
    node.look_at_log()
    assert node.untested() == "", "the same lines of the log are no second reset"


def test_reset_of_long_ago_takes_nothing_from_newer_results(tmp_path: Path) -> None:
    node = Node(tmp_path, *RESET)
    node.look_at_log()
    assert node.untested() == ""
