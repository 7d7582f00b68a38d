"""
Real NVIDIA GPUs: probes, their figures beside plain loops, passive checks by the real NVML, collectives by NCCL.

`python -m pytest -m gpu tests/checks` on a machine with a GPU, its driver, torch with CUDA and pytest.
HEALTHD_CUDA_PYTHON names another interpreter that has torch. Each GPU is used from a process of its own, as in service.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import cuda
from checks.catalog import find_type
from checks.collective.all_gather import all_gather
from checks.collective.all_reduce import all_reduce
from checks.collective.reduce_scatter import reduce_scatter
from checks.contract import Check, Context, Evidence, Finding, Previous, Status, Tier, load_params
from checks.device.digest import judge_digests
from checks.host.identity import read_identity
from checks.host.machine import Host
from checks.system.gpu.gpu_driver import gpu_driver
from checks.system.gpu.gpu_links import gpu_links
from checks.system.gpu.gpu_memory import gpu_memory
from checks.system.gpu.gpu_throttle import gpu_throttle
from checks.training.digests import judge_steps
from checks.worker.protocol import to_finding, to_record

HERE = Host(None)
SCRIPT = Path(__file__).with_name("on_gpu.py")
PYTHON = os.environ.get("HEALTHD_CUDA_PYTHON") or sys.executable
INVENTORY = cuda.find(HERE, {})
TARGETS = [str(device["target"]) for device in INVENTORY["devices"]]
COLLECTIVES = (all_gather, all_reduce, reduce_scatter)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not TARGETS, reason="no NVIDIA GPU")]


def has_nvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


needs_nvml = pytest.mark.skipif(not has_nvml(), reason="nvidia-ml-py is not installed")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [PYTHON, str(SCRIPT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(processes: Sequence[subprocess.Popen[str]], seconds: float = 300.0) -> list[Any]:
    """What each says; none is left behind."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    """What the probes say on each GPU, all at the same time."""
    return dict(zip(TARGETS, answers([start("probes", target) for target in TARGETS]), strict=True))


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """On the first GPU, with nothing else running."""
    (found,) = answers([start("figures", TARGETS[0])])
    return dict(found)


@pytest.mark.parametrize("name", ["matmul", "memory", "transfer"])
def test_probe_passes_on_each_gpu_with_a_number(name: str, probed: dict[str, Any]) -> None:
    for target, answer in probed.items():
        findings = [to_finding(item) for item in answer["said"][name]]
        assert findings
        assert {(item.status, item.target) for item in findings} == {(Status.PASS, target)}, findings
        assert all(item.measurements and (item.measurements[0].value or 0) > 0 for item in findings)


def test_products_of_the_deep_tier_pass_or_say_that_the_gpu_cannot(probed: dict[str, Any]) -> None:
    for answer in probed.values():
        findings = [to_finding(item) for item in answer["said"]["matmul_deep"]]
        assert len(findings) == 4
        assert {item.status for item in findings} <= {Status.PASS, Status.SKIP}, findings
        assert {item.status for item in findings[:3]} == {Status.PASS}  # fp32, bf16 and fp16


def test_digests_of_all_gpus_of_a_kind_are_the_same(probed: dict[str, Any]) -> None:
    items = [item for answer in probed.values() for item in answer["said"]["digest"]]
    findings = [to_finding(item) for item in items if "status" in item]
    evidence = [to_record(Evidence, item) for item in items if "data" in item]
    assert [item.target for item in evidence] == TARGETS
    findings += judge_digests(evidence, [])
    assert Status.FAIL not in {item.status for item in findings}, findings


@pytest.mark.parametrize("name", ["train_step", "train_step_deep"])
def test_training_step_is_right_and_the_same_on_all_gpus_of_a_kind(name: str, probed: dict[str, Any]) -> None:
    items = [item for answer in probed.values() for item in answer["said"][name]]
    findings = [to_finding(item) for item in items if "status" in item]
    findings += judge_steps([to_record(Evidence, item) for item in items if "data" in item], [])
    assert {item.status for item in findings} == {Status.PASS}, findings
    print([item.message for item in findings])


def test_free_memory_is_told(probed: dict[str, Any]) -> None:
    assert all(answer["available_bytes"] > 2**30 for answer in probed.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_of_the_probe_are_as_fast_as_a_plain_loop(dtype: str, figures: dict[str, Any]) -> None:
    found = figures[f"matmul_{dtype}"]
    print(f"matmul {dtype}: {found['probe'] / 1e12:.1f} of {found['loop'] / 1e12:.1f} TFLOP/s")
    assert found["probe"] >= 0.9 * found["loop"], found


def test_copies_of_the_probe_are_as_fast_as_a_plain_loop(figures: dict[str, Any]) -> None:
    found = figures["copy"]
    print(f"copy: {found['probe'] / 1e9:.0f} of {found['loop'] / 1e9:.0f} GB/s")
    assert abs(found["probe"] / found["loop"] - 1) <= 0.1, found


# --- passive ----------------------------------------------------------------------------------------------------------


def look(check: Check, previous: Previous | None = None) -> tuple[list[Finding], Previous]:
    context: Context[Any] = Context(
        host=HERE,
        params=load_params(check.params_type, {}),
        tier=Tier.PASSIVE,
        device=None,
        group=None,
        previous=previous,
        inventory={**INVENTORY, "holders": []},
        limits={},
    )
    items = list(check(context))
    evidence = tuple(item for item in items if isinstance(item, Evidence))
    later = Previous(evidence=evidence, elapsed_seconds=60.0, boot_id=HERE.boot_id())
    return [item for item in items if isinstance(item, Finding)], later


@needs_nvml
@pytest.mark.parametrize("check", [gpu_memory, gpu_throttle, gpu_links], ids=lambda check: check.name)
def test_passive_check_reads_each_gpu_by_the_real_library_twice(check: Check) -> None:
    """On GPUs that are well: a warning may be true, a failure or an unknown is for whoever runs this to look into."""
    findings, before = look(check)
    assert {item.target for item in findings} == set(TARGETS), findings
    assert {item.status for item in findings} <= {Status.PASS, Status.WARN, Status.SKIP}, findings
    assert len(before.evidence) == 1
    findings, _ = look(check, before)
    assert {item.status for item in findings} <= {Status.PASS, Status.WARN, Status.SKIP}, findings
    for finding in findings:
        print(finding.target, finding.status.value, finding.message)


@needs_nvml
def test_driver_tells_its_versions_and_processes() -> None:
    findings, _ = look(gpu_driver)
    assert findings[0].status is Status.PASS
    assert "unknown" not in findings[0].message
    print([(item.target, item.status.value, item.message) for item in findings])
    # In a container the driver may show processes of the host.
    assert all(item.status is Status.PASS or item.reason in ("Busy", "NoData") for item in findings)


@needs_nvml
def test_library_is_found_by_the_child_that_starts_without_site_packages() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parents[2])!r})\n"
        "from checks.host.machine import Host\nfrom checks.host.nvml import opened\n"
        "with opened(Host(None)) as nvml: print(nvml.versions().driver)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() not in ("", "None")


def test_gpus_of_the_inventory_are_known_by_uuid_and_place() -> None:
    assert all(device["serial"] and device["bdf"] and device["minor"] is not None for device in INVENTORY["devices"])
    known = find_type(read_identity(HERE, imds=False)["instance_type"])
    if known is not None and known.chip.accelerator == "cuda":
        assert INVENTORY["device_count"] <= (known.devices or 0)


# --- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(TARGETS) < 2, reason="one GPU is no group")
def test_collectives_pass_by_nccl_over_all_gpus(tmp_path: Path) -> None:
    size, rendezvous = len(TARGETS), f"file://{tmp_path}/group"
    names = [check.name for check in COLLECTIVES]
    said = answers([start("rank", str(number), str(size), rendezvous, *names) for number in range(size)])
    for check in COLLECTIVES:
        evidence = [to_record(Evidence, item) for answer in said for item in answer[check.name] if "data" in item]
        assert len(evidence) == size
        assert check.judge is not None
        findings = list(check.judge(evidence, []))
        assert findings
        assert {item.status for item in findings} == {Status.PASS}, findings
        print(check.name, [item.message for item in findings])
