"""What shows on a stand-in Neuron machine from look to look, and what nccom-test finds on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.contract import Tier
from checks.system.efa import MIN_ELAPSED_SECONDS
from healthd.core.model import Health
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan
from tests.fakes.neuron import NeuronMachine, parse_fault
from tests.node.standin_kit import (
    COUNTS,
    INF2,
    TRN1,
    TRN2,
    Make,
    Row,
    accused,
    counted,
    efa,
    look,
    machines,
    settings,
)
from tests.profile import some

NCCOM = "nccom_all_reduce"


@pytest.fixture
def make() -> Iterator[Make]:
    with machines() as made:
        yield made


# --- faults that show from look to look -------------------------------------------------------------------------------


class Looks:
    """Rounds of one runner, which remembers what counters held."""

    def __init__(self, machine: NeuronMachine, *names: str) -> None:
        self.machine, self.names = machine, names
        self.runner = Runner(settings(machine.root).runner())

    def again(self, *faults: str) -> set[Row]:
        for fault in faults:
            self.machine.fault(*parse_fault(fault))
        plan = Plan(tier=Tier.PASSIVE, checks=self.names, executor="test")
        return accused(asyncio.run(self.runner.run(plan)))


def test_errors_that_were_counted_are_told_after_the_counter_began_anew(make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    assert looks.again("ecc@neuron:5=mem_ecc_uncorrected=3") == counted("EccErrors", "neuron:5", "replace")
    assert looks.again("ecc_reset") == counted("EccErrors", "neuron:5", "replace", "warn")
    assert looks.again("ecc@neuron:5=mem_ecc_uncorrected=1") == counted("EccErrors", "neuron:5", "replace")


def test_counter_that_began_anew_without_damage_accuses_nobody(make: Make) -> None:
    looks = Looks(make(TRN1, "ecc@neuron:5=mem_ecc_corrected=7"), "neuron_counters")
    assert looks.again() == set()
    assert looks.again("ecc_reset") == set()


def test_corrected_errors_that_rise_fast_are_a_warning(make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    rising = looks.again("ecc@neuron:5=mem_ecc_corrected=5000")
    assert rising == counted("CorrectedErrors", "neuron:5", "inspect", "warn")


@pytest.mark.parametrize("status", ["timeout", "execute_completed_with_error", "hw_collectives_error"])
def test_executions_that_a_program_may_have_caused_are_a_warning_once_seen(status: str, make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    found = looks.again(f"exec_errors@neuroncore:10={status}=2")
    assert found == counted("HardwareErrors", "neuron:5", "inspect", "warn")


def test_interfaces_whose_errors_rise_are_named(make: Make) -> None:
    looks = Looks(make(TRN2), "efa")
    assert looks.again() == set()
    time.sleep(MIN_ELAPSED_SECONDS)  # rates over less are not judged
    rising = {
        "rdmap86s0": "rx_drops",
        "rdmap87s0": "retrans_timeout_events",
        "rdmap108s0": "unresponsive_remote_events",
    }
    found = looks.again(*(f"efa_errors@efa:{name}={counter}=100000000" for name, counter in rising.items()))
    assert found == efa("LinkErrors", *(f"efa:{name}" for name in rising), status="warn")


# --- faults that nccom-test finds -------------------------------------------------------------------------------------


def nccom(status: str, reason: str, action: str) -> set[Row]:
    return {(NCCOM, status, reason, "node", action)}


# What differs between types is the number of ranks alone.
OF_NCCOM: list[tuple[str, str, set[Row]]] = [
    (TRN2, "nccom_wrong", nccom("fail", "CollectiveMismatch", "inspect")),
    (INF2, "nccom_fail", nccom("fail", "CollectiveFailed", "inspect")),
    (TRN1, "nccom_missing_row", nccom("fail", "CollectiveFailed", "inspect")),
    (TRN1, "nccom_nan", nccom("fail", "CollectiveFailed", "inspect")),
    (TRN1, "nccom_slow=3", set()),  # no limit is set: shown, unjudged
    (TRN2, "old_units", set()),
    (INF2, "half_json@nccom-test", set()),  # the table says the same
    (TRN1, "no_tools@nccom-test", nccom("unknown", "MissingTool", "inspect")),
    (INF2, "busy@neuron:5", nccom("skip", "Busy", "retry")),
    (TRN1, "stuck_core@neuron:5", nccom("skip", "Busy", "retry")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault", "expected"), some(OF_NCCOM, 3), ids=lambda value: value if isinstance(value, str) else ""
)
def test_fault_of_collectives_is_named(name: str, fault: str, expected: set[Row], make: Make) -> None:
    state = look(make(name, fault), NCCOM)
    assert accused(state.results) == expected
    assert (state.health is Health.HEALTHY) is not bool(expected)
    measured = {m.labels["ranks"] for r in state.results for f in r.findings for m in f.measurements}
    assert measured <= {str(COUNTS[name][1])}
    assert bool(measured) is (not expected or fault in ("nccom_wrong", "nccom_fail", "nccom_missing_row"))


def test_collective_that_hangs_is_ended_and_told(make: Make) -> None:
    machine = make(TRN1, "nccom_hang")
    state = look(machine, NCCOM, nccom_all_reduce={"step_seconds": 2.0})
    assert accused(state.results) == nccom("fail", "Timeout", "inspect")
    pid = int((machine.root / "neuron-bench.pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()
