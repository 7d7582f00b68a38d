"""A fleet of Trainium nodes as they report: every check of the catalogue, measurements with limits, serial numbers."""

from __future__ import annotations

import random

from checks.contract import Finding, Measurement, Scope, Status, Tier
from checks.discover import builtin_checks
from healthd.core.model import CheckResult, CheckSpec, DeviceRecord, Inventory
from tests.ui.stage import Stage

DEVICES = 16
# Measurement, value, lower limit; None: no limit.
MEASURED: dict[str, tuple[str, float, float | None]] = {
    "matmul": ("matmul_flops_per_second", 88e12, 80e12),
    "memory": ("memory_bytes_per_second", 720e9, 650e9),
    "transfer": ("transfer_bytes_per_second", 24e9, None),
    "all_reduce": ("all_reduce_busbw_bytes_per_second", 150e9, 120e9),
    "all_gather": ("all_gather_busbw_bytes_per_second", 160e9, 120e9),
    "reduce_scatter": ("reduce_scatter_busbw_bytes_per_second", 155e9, 120e9),
    "memory_free": ("memory_free_bytes", 430e9, 10e9),
    "disk_space": ("disk_free_ratio", 0.61, 0.05),
    "clock": ("clock_offset_seconds", 0.0004, None),
}
SKIPPED = ("gpu_driver", "gpu_links", "gpu_memory", "gpu_throttle", "nccom_all_reduce", "nccom_all_gather")


def inventory(node: str) -> Inventory:
    devices = tuple(
        DeviceRecord(
            target=f"neuron:{i}", kind="trainium", serial=f"SN-{node}-{i:02d}", cores=2, memory_bytes=32 * 2**30
        )
        for i in range(DEVICES)
    )
    return Inventory(
        accelerator="neuron",
        device_count=DEVICES,
        core_count=2 * DEVICES,
        memory_bytes=DEVICES * 32 * 2**30,
        efa_count=8,
        devices=devices,
    )


def results(dice: random.Random, *, run: int, age: float = 5.0, slow: float = 1.0) -> tuple[CheckResult, ...]:
    """One result of each check; `run` tells runs apart, `slow` is a factor on what is computed."""
    found = []
    for name, check in builtin_checks().items():
        tier, kind = Tier(check.tier.value), MEASURED.get(name)
        status, reason, numbers, message = Status.PASS, None, tuple[Measurement, ...](), "as it should be"
        if name in SKIPPED:
            status, reason, message = Status.SKIP, "NotApplicable", "no GPU on this node"
        elif kind is not None:
            measurement, usual, lower = kind
            value = usual * dice.uniform(0.985, 1.015) * (slow if name == "matmul" else 1.0)
            numbers = (Measurement(name=measurement, value=value, lower=lower, upper=None, origin="learned"),)
            if lower is not None and value < lower:
                status, reason, message = Status.FAIL, "SlowDevice", f"{measurement} is below its limit on neuron:3"
        finding = Finding(
            status=status, reason=reason, message=message, target="neuron:3" if reason else "node", measurements=numbers
        )
        found.append(
            CheckResult(
                check=name,
                tier=tier,
                status=status,
                findings=(finding,),
                age_seconds=age,
                started_at=600.0 * run,
                duration_seconds=0.4,
                attempts=1,
                error=None,
                injected=False,
                executor="daemon",
            )
        )
    return tuple(found)


def specs() -> tuple[CheckSpec, ...]:
    return tuple(
        CheckSpec(
            name=name,
            tier=Tier(check.tier.value),
            interval_seconds=60.0,
            timeout_seconds=30.0,
            expires_seconds=86400.0,
            scope=Scope.NODE,
            doc="",
        )
        for name, check in builtin_checks().items()
    )


def report(stage: Stage, count: int = 48, runs: int = 12, slow: str = "trn-07") -> None:
    """The nodes report `runs` times; one of them computes slower and slower."""
    for i in range(count):
        name = f"trn-{i:02d}"
        # Not for secrets: the same fleet each time.
        dice = random.Random(i)
        most = runs if name == slow else 1
        for run in range(most):
            factor = 1.0 - 0.02 * run if name == slow else 1.0
            stage.say(
                name,
                labels={"pool": "train", "rack": f"r{i // 16 + 1}", "team": "vision" if i < 8 else "speech"},
                instance_type="trn1.32xlarge",
                instance_id=f"i-0{i:015x}",
                inventory=inventory(name),
                checks=specs(),
                results=results(dice, run=run, age=5.0 + 1200.0 * (most - 1 - run), slow=factor),
                versions={"neuron-driver": "2.19.64", "runtime": "2.22.14", "healthd": "0.1.0"},
            )
            if most > 1:  # a look at its page samples what it says
                with stage.http() as client:
                    assert client.get(f"/nodes/{name}").status_code == 200
