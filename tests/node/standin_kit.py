"""Parts for tests of stand-in Neuron machines with faults: machines, looks at them, and what is then accused."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from checks.contract import Finding, Status, Tier
from checks.reasons import action_of
from healthd.cli.check import examine
from healthd.cli.settings.tree import Settings
from healthd.core.model import CheckResult, NodeState
from healthd.node.settings import NodeSettings
from tests.fakes.neuron import NeuronMachine, parse_fault
from tests.hosts.temporary import memory_folder

TRN1, TRN2, INF2 = "trn1.32xlarge", "trn2.48xlarge", "inf2.48xlarge"
GIB = 1 << 30
# Devices, logical cores, bytes, EFA interfaces.
COUNTS = {TRN1: (16, 32, 512 * GIB, 8), TRN2: (16, 64, 1536 * GIB, 16), INF2: (12, 24, 384 * GIB, 0)}

# check, status, reason, target, action
Row = tuple[str, str, "str | None", str, str]
Make = Callable[..., NeuronMachine]


@contextlib.contextmanager
def machines() -> Iterator[Make]:
    """Machines of any type with faults as on the command line."""
    place = Path(tempfile.mkdtemp(prefix="healthd-standin-", dir=memory_folder()))

    def made(name: str, *faults: str, driver: str = "2.30.2.0", tools: str = "new") -> NeuronMachine:
        machine = NeuronMachine(place / "machine", name, driver=driver, tools=tools)
        for fault in faults:
            machine.fault(*parse_fault(fault))
        return machine

    try:
        yield made
    finally:
        shutil.rmtree(place)


def settings(root: Path, folder: Path | None = None, **checks: dict[str, object]) -> Settings:
    """For a machine, with state in a folder; None: in the one that the machine is in."""
    place = folder or root.parent
    return Settings(
        node=NodeSettings(name="n1", state_dir=place / "state", run_dir=place / "run", host_root=root),
        checks=checks,
    )


def look(machine: NeuronMachine, *names: str, **checks: dict[str, object]) -> NodeState:
    """`healthd check --tier passive`, or of the checks that are named."""
    tier = None if names else Tier.PASSIVE
    return asyncio.run(examine(settings(machine.root, **checks), names, tier, quiet=True))


def accused(results: tuple[CheckResult, ...]) -> set[Row]:
    """What is neither pass nor skipped for a reason that lies in the machine."""
    return {row(result.check, one) for result in results for one in result.findings if told(one)}


def told(finding: Finding) -> bool:
    return finding.status not in (Status.PASS, Status.SKIP) or finding.reason == "Busy"


def row(check: str, finding: Finding) -> Row:
    action = finding.action or action_of(finding.reason)
    return (check, finding.status.value, finding.reason, finding.target, action.value)


# --- what is expected -------------------------------------------------------------------------------------------------


def gone(target: str) -> set[Row]:
    """A device that the driver did not find; it then lists no links either."""
    unlisted = ("neuron_topology", "unknown", "NoData", "node", "inspect")
    return {("device_count", "fail", "MissingDevice", where, "reboot") for where in ("node", target)} | {unlisted}


def topology(*targets: str) -> set[Row]:
    return {("neuron_topology", "warn", "WrongTopology", target, "inspect") for target in targets}


def kernel(action: str, target: str, status: str = "fail") -> set[Row]:
    return {("kernel_log", status, "KernelFault", target, action)}


def counted(reason: str, target: str, action: str, status: str = "fail") -> set[Row]:
    return {("neuron_counters", status, reason, target, action)}


def efa(reason: str, *targets: str, action: str = "inspect", status: str = "fail") -> set[Row]:
    return {("efa", status, reason, target, action) for target in targets}


def unseen(reason: str) -> set[Row]:
    return {("neuron_cores", "unknown", reason, "node", "inspect")}
