"""The transfer probe, with real copies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from checks.contract import Finding, Limit, Status
from checks.device.transfer import transfer


def run(ctx: Any) -> list[Finding]:
    return [item for item in transfer(ctx) if isinstance(item, Finding)]


def test_exact_copies_pass_with_bytes_per_second_each_way(context: Any, cpu_device: Any) -> None:
    there, back = run(context(transfer, device=cpu_device, seed=9))
    assert [there.status, back.status] == [Status.PASS, Status.PASS]
    assert [f.measurements[0].labels["direction"] for f in (there, back)] == ["host_to_device", "device_to_host"]
    assert all(f.measurements[0].value and f.measurements[0].value > 1e6 for f in (there, back))
    assert "16777216 bytes host to device exact (seed 9)" in there.message


@pytest.mark.parametrize("read", [1, 2])
def test_one_wrong_bit_is_a_wrong_result_with_its_place(context: Any, tampering: Any, read: int) -> None:
    def flip(tensor: Any, number: int) -> Any:
        if number == read:
            tensor[77] ^= 1
        return tensor

    findings = run(context(transfer, device=tampering(flip), size_bytes=8192, seed=9))
    wrong = findings[read - 1]
    assert (wrong.status, wrong.reason, wrong.target) == (Status.FAIL, "WrongResult", "cpu:0")
    assert "1 of 2048 words of 4 bytes differ after the copy, the first at byte 308 (seed 9)" in wrong.message
    assert [f.status for f in findings].count(Status.FAIL) == 1


def test_device_that_drops_the_data_is_found(context: Any, tampering: Any) -> None:
    device = tampering(measure=lambda operation, repeats, warmup: [1.0])  # never copies
    assert {f.reason for f in run(context(transfer, device=device, size_bytes=8192))} == {"WrongResult"}


def test_slow_direction_fails_at_its_own_limit(context: Any, cpu_device: Any) -> None:
    limits = {"transfer_bytes_per_second/device_to_host": Limit(lower=1e18, upper=None, origin="config")}
    there, back = run(context(transfer, device=cpu_device, size_bytes=8192, limits=limits))
    assert there.status is Status.PASS
    assert (back.status, back.reason) == (Status.FAIL, "SlowDevice")


def test_device_probes_load_without_torch() -> None:
    code = (
        "import sys, checks.device.{m}, checks.device.{n}, checks.accelerators.cpu; assert 'torch' not in sys.modules"
    )
    for pair in (("matmul", "memory"), ("digest", "transfer")):
        subprocess.run([sys.executable, "-c", code.format(m=pair[0], n=pair[1])], check=True, timeout=20)
