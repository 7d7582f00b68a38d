"""
Faults of Neuron devices that a reset cures: reset first, probe again, replace only when they come back.

By the kernel log (also the driver's own words, which need no job) and by the driver's counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Action, Evidence, Finding, Previous, Status
from checks.system.kernel_log import find_fault, kernel_log
from checks.system.neuron.neuron_counters import Abort, neuron_counters, next_abort
from tests.checks.neuron_looks import SYSFS, Looks, look
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import Machine

ABORT = "NEURON_HW_ERR=DMA_ERROR instance-id=i-0 hostname=h nd-id=3 nc-id=0 serial-num=00aa action=X"
INITIATED = "neuron:nr_reset_thread_fn: nd3: initiating device reset request 0"
COMPLETED = "neuron:nr_reset_thread_fn: nd3: reset request 0 completed"
RESET = (INITIATED, COMPLETED)
LOADED = ("Neuron Driver Started with Version:2.30.2.0-0123 at: 2026-nov-02",)
OF_CORES = ("neuron:nr_reset_thread_fn: nd3: initiating TPB reset request 7", COMPLETED.replace("0 c", "7 c"))
OF_ANOTHER = tuple(line.replace("nd3", "nd4") for line in RESET)
NEW, AFTER, AGAIN = ("fail", Action.RESET_DEVICE), ("warn", Action.INSPECT), ("fail", Action.REPLACE)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def log(machine: Machine, lines: Sequence[str], start_seconds: float = 4000.0) -> None:
    text = "".join(f"[ {start_seconds + n:.6f}] {line}\n" for n, line in enumerate(lines))
    machine.remove("/dev/kmsg")
    machine.write("/dev/kmsg", text)


def judged(machine: Machine, previous: Previous | None = None) -> tuple[list[tuple[str, Action | None]], Previous]:
    items = machine.run(kernel_log, previous=previous)
    findings = [item for item in items if isinstance(item, Finding) and item.status is not Status.PASS]
    evidence = tuple(item for item in items if isinstance(item, Evidence))
    later = Previous(evidence=evidence, elapsed_seconds=60.0, boot_id=machine.host.boot_id())
    assert all(finding.target in ("neuron:3", "neuron:5", "node") for finding in findings)
    return [(finding.status.value, finding.action) for finding in findings], later


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([ABORT], NEW),
        ([*RESET, ABORT], NEW),
        ([ABORT, ABORT], NEW),
        ([ABORT, *RESET], AFTER),
        ([ABORT, *LOADED], AFTER),
        ([ABORT, *RESET, ABORT], AGAIN),
        ([ABORT, *RESET, ABORT, *RESET], AGAIN),
        ([ABORT, *OF_CORES], NEW),
        ([ABORT, *OF_ANOTHER], NEW),
        ([ABORT, INITIATED], NEW),
        ([ABORT, COMPLETED], NEW),
    ],
)
def test_dma_abort_in_the_log_is_reset_then_probed_then_replaced(
    lines: list[str], expected: tuple[str, Action], machine: Machine
) -> None:
    log(machine, lines)
    assert judged(machine)[0] == [expected]


def test_stage_of_a_fault_outlives_its_lines(machine: Machine) -> None:
    log(machine, [ABORT])
    _, seen = judged(machine)
    log(machine, ["something else"], 4100.0)
    assert judged(machine, seen)[0] == [NEW]
    log(machine, RESET, 4200.0)
    found, seen = judged(machine, seen)
    assert found == [AFTER]
    log(machine, ["something else"], 4300.0)
    found, seen = judged(machine, seen)
    assert found == [AFTER]
    log(machine, [ABORT], 4400.0)
    found, seen = judged(machine, seen)
    assert found == [AGAIN]
    log(machine, RESET, 4500.0)
    assert judged(machine, seen)[0] == [AGAIN]


# --- the driver's own words -------------------------------------------------------------------------------------------

# Format strings of aws-neuron-driver, filled in: neuron_cdev.c, neuron_reset.c, v2/neuron_dhal_v2.c.
WORDS = [
    ("neuron:ncdev_open: nd5 is in an invalid state", "neuron:5"),
    ("neuron:nr_reset_thread_fn: nd5: reset request 1 was initiated, but failed to complete", "neuron:5"),
    ("neuron:nr_reset_thread_fn: nd5: reset request 1 failed", "neuron:5"),
    ("neuron:nr_reset_thread_fn: nd5: failed to initialize dma after reset", "neuron:5"),
    ("neuron:nr_reset_thread_fn: nd5: failed to complete post reset configuration", "neuron:5"),
    ("neuron:nr_reset_thread_fn: nd5: device didnt come out reset", "neuron:5"),
    ("neuron:neuron_pci_get_device_id_v2: Could not retrieve device index (read timeout)", "node"),
    ("neuron:neuron_pci_get_device_id_v3: duplicate routing id 3 found", "node"),
    ("neuron:neuron_pci_get_device_id_v4: Invalid device index 77", "node"),
]


@pytest.mark.parametrize(("line", "target"), WORDS)
def test_drivers_own_words_are_faults_of_the_device_without_any_job(line: str, target: str, machine: Machine) -> None:
    log(machine, [line])
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "KernelFault", target)
    assert finding.action is Action.REBOOT
    log(machine, [line, *LOADED])
    (finding,) = machine.findings(kernel_log)
    assert finding.status is Status.WARN
    log(machine, [*LOADED, line])
    assert judged(machine)[0] == [("fail", Action.REBOOT)]


@every(
    "line",
    [
        "Neuron Driver Started with Version:2.26.5.0-0123456789abcdef at: 2026-nov-02 10:00:00.000123",
        "neuron:neuron_pci_get_device_id_v2: ** BDF: 10:1c.0 => nd[0] (routing id: 0)",
        INITIATED,
        COMPLETED,
        "neuron:npid_attach: neuron:npid_attach: pid=90193, slot=0",
        "neuron:ncdev_open: nd0: pid 90217 failed to open",
        "neuron:nr_start_ncs: Pending reset request for pid 4711 on device 3 already exists!",
    ],
)
def test_what_every_start_of_driver_and_jobs_makes_is_no_fault(line: str) -> None:
    assert find_fault(line) is None


# --- shares of containers ---------------------------------------------------------------------------------------------


@pytest.fixture
def container(machine: Machine) -> Machine:
    mounts = machine.host.read("/proc/self/mountinfo").replace(" - ext4 /dev/nvme0n1p1 ", " - overlay overlay ")
    machine.remove("/proc/self/mountinfo")
    machine.write("/proc/self/mountinfo", mounts)
    return machine


def share(**changes: Any) -> dict[str, Any]:
    device = {"target": "neuron:0", "index": 0, "host_index": 5, "serial": "00bb", **changes}
    return {"accelerator": "neuron", "devices": [device], "sysfs_indices": list(range(16))}


@pytest.mark.parametrize("line", [ABORT, "neuron:ncdev_open: nd0 is in an invalid state"])
def test_line_about_a_device_of_another_tenant_does_not_count(line: str, container: Machine) -> None:
    log(container, [line])
    (finding,) = container.findings(kernel_log, inventory=share())
    assert finding.status is Status.PASS
    (finding,) = container.findings(kernel_log, inventory=share(host_index=None))
    assert (finding.status, finding.target) == (Status.FAIL, "node")  # it may be ours


@pytest.mark.parametrize(("line", "number"), [(ABORT, 3), ("neuron:ncdev_open: nd0 is in an invalid state", 0)])
def test_line_about_a_device_that_a_host_has_lost_counts(line: str, number: int, machine: Machine) -> None:
    log(machine, [line])
    (finding,) = machine.findings(kernel_log, inventory=share(target="neuron:5"))
    assert (finding.status, finding.target) == (Status.FAIL, f"neuron:{number}")


@pytest.mark.parametrize("line", [ABORT.replace("00aa", "00bb"), "neuron:ncdev_open: nd5 is in an invalid state"])
def test_line_about_our_device_names_it_as_we_do(line: str, container: Machine) -> None:
    log(container, [line])
    (finding,) = container.findings(kernel_log, inventory=share())
    assert (finding.status, finding.target) == (Status.FAIL, "neuron:0")


# --- counters ---------------------------------------------------------------------------------------------------------


def test_counted_aborts_are_reset_then_probed_then_replaced(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    uptime = machine.host.uptime_seconds()
    of_ours = [line.replace("nd3", "nd0") for line in RESET]
    looks = Looks(machine)

    def judge() -> tuple[str, Action | None]:
        (finding,) = looks.look()
        assert (finding.reason, finding.target) == ("HardwareErrors", "neuron:0")
        return finding.status.value, finding.action

    machine.fault("exec_errors", "neuroncore:0", "hw_dma_abort_error=1")
    assert judge() == NEW
    log(machine, of_ours, uptime + 10)
    assert judge() == AFTER
    assert judge() == AFTER
    log(machine, ["something else"], uptime + 20)  # the ring of the log has no place for the reset any more
    assert judge() == AFTER
    leaf = f"{SYSFS}/neuron0/neuron_core0/stats/status/hw_dma_abort_error/total"
    machine.remove(leaf)
    looks.look()
    machine.write(leaf, "1\n")
    assert judge() == AFTER
    machine.fault("exec_errors", "neuroncore:0", "hw_dma_abort_error=1")
    serial = machine.state["devices"][0]["serial"]
    again = ABORT.replace("nd-id=3", "nd-id=0").replace("00aa", serial)
    log(machine, [*of_ours, again], uptime + 10)
    assert judge() == AGAIN


@every(
    ("before", "count", "resets", "aborts", "stage"),
    [
        (None, 1, [], [], "new"),
        (None, 1, [50.0], [40.0], "reset"),
        (None, 1, [30.0], [40.0], "new"),
        (None, 2, [50.0], [40.0, 60.0], "again"),
        (Abort(1, 40.0, again=False, stage="new"), 1, [50.0], [], "reset"),
        (Abort(1, 40.0, again=False, stage="reset"), 2, [50.0], [60.0], "again"),
        (Abort(1, 40.0, again=False, stage="new"), 2, [70.0], [60.0], "reset"),
        (Abort(2, 60.0, again=True, stage="again"), 2, [70.0], [], "again"),
        (Abort(2, 60.0, again=True, stage="again"), 1, [], [], "new"),  # the driver was loaded again
        (Abort(1, 40.0, again=False, stage="reset"), 1, [], [], "reset"),  # the log has forgotten the reset
        (Abort(1, 40.0, again=False, stage="reset"), 2, [], [60.0], "again"),
        (Abort(1, 40.0, again=False, stage="reset"), 2, [], [], "again"),
        (Abort(2, 40.0, again=False, stage="reset"), 1, [], [], "new"),
    ],
)
def test_times_of_resets_and_aborts_make_the_stage(
    before: Abort | None, count: int, resets: list[float], aborts: list[float], stage: str
) -> None:
    assert next_abort(before, count, 100.0, resets, aborts).stage == stage


def test_resets_that_failed_are_one_number_of_the_device_at_each_of_its_cores(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.3xlarge")
    for core in range(8):
        leaf = f"{SYSFS}/neuron0/neuron_core{core}/stats/other_info/reset_fail_count/total"
        machine.remove(leaf)
        machine.write(leaf, "3\n")
    (finding,) = look(machine)
    assert (finding.status, finding.measurements[0].value) == (Status.WARN, 3.0)


# --- the state of a device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n", (Status.PASS, None)),
        ("2\n", (Status.FAIL, "DeviceLost")),
        ("0\n", (Status.UNKNOWN, "NoData")),
        ("7\n", (Status.UNKNOWN, "NoData")),
        ("", (Status.PASS, None)),  # an older driver does not tell
        (None, (Status.PASS, None)),
    ],
)
def test_state_of_a_device_is_read_where_the_driver_tells_it(
    text: str | None, expected: tuple[Status, str | None], tmp_path: Path
) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.remove(f"{SYSFS}/neuron0/reset")
    if text is not None:
        machine.write(f"{SYSFS}/neuron0/reset", text)
    (finding,) = machine.findings(
        neuron_counters,
        inventory={"accelerator": "neuron", "devices": [{"target": "neuron:0", "index": 0, "host_index": 0}]},
    )
    assert (finding.status, finding.reason) == expected
    if finding.status is Status.FAIL:
        assert (finding.target, finding.action) == ("neuron:0", Action.REBOOT)
        assert "reload the driver or reboot" in finding.message
