"""A fault that lasts does not come and go with the moment at which somebody looks."""

from __future__ import annotations

import time
from pathlib import Path

from checks.contract import Evidence, Finding, Previous, Status
from checks.host.machine import Host
from checks.system.kernel_log import PATTERNS, find_fault
from checks.system.processes import processes
from tests.every import every
from tests.hosts.machine import Machine
from tests.patience import PATIENCE


def hung(machine: Machine, before: Evidence | None, seconds: float) -> tuple[Status, Evidence]:
    boot_id = Host(machine.root).boot_id()
    previous = None if before is None else Previous(evidence=(before,), elapsed_seconds=seconds, boot_id=boot_id)
    items = machine.run(processes, previous=previous)
    (evidence,) = [item for item in items if isinstance(item, Evidence)]
    (finding,) = [
        item for item in items if isinstance(item, Finding) and item.measurements[0].name == "processes_stuck_count"
    ]
    return finding.status, evidence


def test_a_hung_process_stays_a_fault_when_somebody_looks_again_at_once(tmp_path: Path) -> None:
    """A gate may order a passive round a second after the daemon's own."""
    machine = Machine(tmp_path / "machine")
    machine.process(400, "dd", "D")
    status, before = hung(machine, None, 0.0)
    assert status is Status.PASS
    status, before = hung(machine, before, 60.0)
    assert status is Status.FAIL
    status, before = hung(machine, before, 1.0)
    assert status is Status.FAIL
    machine.process(400, "dd", "S")
    assert hung(machine, before, 1.0)[0] is Status.PASS


@every("start", ["rcu", "XFS ", "NVRM: Xid (", "AER: ", "nvme", "EDAC ", "npid_detach "])
def test_a_line_of_any_length_is_searched_in_a_moment(start: str) -> None:
    line = start * 100_000
    begun = time.monotonic()
    find_fault(line)
    assert time.monotonic() - begun < 5 * PATIENCE  # it takes milliseconds; without a bound on the length, minutes


def test_every_kind_of_fault_says_what_to_do_and_how_bad_it_is() -> None:
    for pattern in PATTERNS:
        assert pattern.status in (Status.WARN, Status.FAIL)
        assert pattern.action.value != "none"
