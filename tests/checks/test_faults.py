"""Injected faults: how they are written, and that they act below the code that judges."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from checks.contract import Evidence, Finding, Progress, Status
from checks.worker.fault_injection import apply_faults, faulty, flip_bit, write_garbage
from checks.worker.faults import KINDS, Fault, parse_fault, without_missing
from tests.every import every

SCOPES = {
    "matmul": "device",
    "train_step": "device",
    "all_reduce": "group",
    "disk_space": "node",
    "device_count": "node",
}


@every(
    ("text", "fault"),
    [
        ("matmul=crash", Fault("matmul", None, "crash", None)),
        ("matmul@cpu:1=corrupt", Fault("matmul", "cpu:1", "corrupt", None)),
        ("all_reduce@rank:1=hang", Fault("all_reduce", "rank:1", "hang", None)),
        ("all_reduce@rank:12=absent", Fault("all_reduce", "rank:12", "absent", None)),
        ("matmul=slow:2.5", Fault("matmul", None, "slow", 2.5)),
        ("disk_space@node=fail", Fault("disk_space", "node", "fail", None)),
        ("device_count=missing", Fault("device_count", None, "missing", None)),
        ("device_count@cpu:0=missing", Fault("device_count", "cpu:0", "missing", None)),
        ("train_step@cpu:0=corrupt", Fault("train_step", "cpu:0", "corrupt", None)),
        ("train_step.block1.gelu=corrupt", Fault("train_step", None, "corrupt", None, "block1.gelu")),
        (
            "train_step.block0.qkv_weight_grad@cpu:1=corrupt:0.001",
            Fault("train_step", "cpu:1", "corrupt", 0.001, "block0.qkv_weight_grad"),
        ),
        (
            "train_step.block1.gelu=corrupt/10000",
            Fault("train_step", None, "corrupt", None, "block1.gelu", 10_000),
        ),
        (
            "train_step.block1.gelu@cpu:0=corrupt:1e-06/2",
            Fault("train_step", "cpu:0", "corrupt", 1e-6, "block1.gelu", 2),
        ),
        ("train_step.block1.gelu=corrupt:1e-06/1", Fault("train_step", None, "corrupt", 1e-6, "block1.gelu", 1)),
    ],
)
def test_fault_is_read_and_written_the_same(text: str, fault: Fault) -> None:
    assert parse_fault(text, SCOPES) == fault
    assert str(fault) == text


@every(
    ("text", "words"),
    [
        ("matmul", "write CHECK[@TARGET]=KIND[:VALUE]"),
        ("=crash", "write CHECK[@TARGET]=KIND[:VALUE]"),
        ("matmul=", "write CHECK[@TARGET]=KIND[:VALUE]"),
        ("matmul=crush", "no such kind: 'crush'; did you mean 'crash'?"),
        ("matmul=zzz", "no such kind: 'zzz'; choose from: fail, hang"),
        ("matmull=crash", "no such check: 'matmull'; did you mean 'matmul'?"),
        ("matmul@=crash", "'' is not a target"),
        ("matmul@CPU 1=crash", "'CPU 1' is not a target"),
        ("matmul=crash:2", "crash takes no value; only slow does"),
        ("matmul=slow", "slow needs a factor above 1"),
        ("matmul=slow:1", "slow needs a factor above 1"),
        ("matmul=slow:nan", "slow needs a factor above 1"),
        ("matmul=slow:inf", "slow needs a factor above 1"),
        ("matmul=slow:fast", "slow needs a factor above 1"),
        ("matmul=absent", "absent cannot be injected into matmul, a device check"),
        ("train_step.block1.gelo=corrupt", "no such operation of block1: 'gelo'; did you mean 'gelu'?"),
        ("train_step.blok1.gelu=corrupt", "no such layer: 'blok1'; did you mean 'block1'?"),
        ("train_step.block1=corrupt", "no such operation of block1: ''"),
        ("train_step.block1.gelu=hang", "hang affects all of train_step; a place takes only corrupt"),
        ("train_step.block1.gelu=corrupt:0", "corrupt takes a relative error above 0"),
        ("train_step.block1.gelu=corrupt:nan", "corrupt takes a relative error above 0"),
        ("train_step.block1.gelu=corrupt/0", "one step in 1 to 1000000000"),
        ("train_step.block1.gelu=corrupt/", "as in corrupt/10000, not ''"),
        ("train_step.block1.gelu=corrupt:1e-3/1e4", "as in corrupt/10000, not '1e4'"),
        ("train_step.block1.gelu=corrupt/99999999999", "corrupt affects one step in 1 to"),
        ("train_step.block1.gelu=corrupt:/5", "corrupt takes a relative error above 0"),
        (
            "train_step=corrupt/10000",
            "only a place of a training step takes a rate: train_step.block1.gelu=corrupt/10000",
        ),
        ("matmul=slow:2/10", "only a place of a training step takes a rate"),
        ("train_step=corrupt:1", "corrupt takes no value; only slow does"),
        (
            "matmul.block1.gelu=corrupt",
            "matmul has no places; only train_step and data_parallel_step have, as in train_step.block1.gelu",
        ),
        ("disk_space=corrupt", "corrupt cannot be injected into disk_space, a node check"),
        ("disk_space=missing", "missing cannot be injected into disk_space, a node check"),
        ("disk_space@cpu:0=fail", "disk_space runs once for the node"),
    ],
)
def test_slip_in_a_fault_is_one_line_that_says_what_is_right(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="fault") as error:
        parse_fault(text, SCOPES)
    assert words in str(error.value)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


def test_fault_without_target_hits_all_and_a_rank_is_a_device() -> None:
    assert Fault("matmul", None, "crash", None).hits("matmul", ("cpu:1", "rank:1"))
    assert Fault("matmul", "rank:1", "crash", None).hits("matmul", ("cpu:1", "rank:1"))
    assert not Fault("matmul", "cpu:0", "crash", None).hits("matmul", ("cpu:1", "rank:1"))
    assert not Fault("matmul", None, "crash", None).hits("digest", ("cpu:1",))


def inventory() -> dict[str, Any]:
    devices = [{"target": f"cpu:{index}", "cores": 4} for index in range(3)]
    return {"accelerator": "cpu", "device_count": 3, "core_count": 12, "devices": devices}


@pytest.mark.parametrize(
    ("target", "left"),
    [
        (None, ["cpu:0", "cpu:1"]),
        ("node", ["cpu:0", "cpu:1"]),
        ("cpu:0", ["cpu:1", "cpu:2"]),
        ("rank:1", ["cpu:0", "cpu:2"]),
        ("rank:9", ["cpu:0", "cpu:1", "cpu:2"]),
    ],
)
def test_missing_device_is_gone_from_the_inventory(target: str | None, left: list[str]) -> None:
    seen = without_missing(inventory(), [Fault("device_count", target, "missing", None)])
    assert [device["target"] for device in seen["devices"]] == left
    assert (seen["device_count"], seen["core_count"]) == (len(left), 4 * len(left))


def test_unknown_count_stays_unknown_without_the_missing() -> None:
    seen = without_missing({**inventory(), "device_count": None}, [Fault("device_count", None, "missing", None)])
    assert seen["device_count"] is None


# --- on a check's generator -------------------------------------------------------------------------------------------


def items() -> Iterator[Finding | Evidence | Progress]:
    yield Progress(step="rendezvous", event="joined", monotonic_seconds=0.0)
    yield Progress(step="all_reduce/1024", event="entered", monotonic_seconds=0.0)
    yield Finding(status=Status.PASS, reason=None, message="measured", target="rank:0")


def test_failure_comes_after_what_was_really_measured() -> None:
    found = list(apply_faults([Fault("c", None, "fail", None)], items, target="rank:0", group=True, output=-1))
    assert len(found) == 4
    last = found[-1]
    assert isinstance(last, Finding)
    assert (last.status, last.reason, last.target) == (Status.FAIL, "InjectedFault", "rank:0")


def test_no_faults_change_nothing() -> None:
    assert list(apply_faults([], items, target="rank:0", group=True, output=-1)) == list(items())


def test_slow_check_without_a_device_takes_longer_at_every_step() -> None:
    def working() -> Iterator[Finding]:
        time.sleep(0.02)
        yield Finding(status=Status.PASS, reason=None, message="measured", target="node")

    start = time.monotonic()
    list(apply_faults([Fault("c", None, "slow", 4.0)], working, target="node", group=False, output=-1))
    assert time.monotonic() - start >= 0.08


def test_garbage_is_a_line_of_junk_and_a_megabyte_without_an_end() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_garbage(writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    first, rest = text.split(b"\n", 1)
    assert first.startswith(b"\x00\xff")
    assert len(rest) == 1 << 20
    assert b"\n" not in rest


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool"]
)
def test_one_bit_of_one_element_is_flipped_in_a_copy(cpu_device: Any, dtype: str) -> None:
    torch = cpu_device.torch
    tensor = torch.ones(2, 5, dtype=getattr(torch, dtype))
    flipped = flip_bit(torch, tensor)
    assert torch.equal(tensor, torch.ones(2, 5, dtype=getattr(torch, dtype)))
    assert flipped.shape == tensor.shape
    before, after = (list(bytes(t.contiguous().view(torch.uint8).flatten().tolist())) for t in (tensor, flipped))
    assert sum((x ^ y).bit_count() for x, y in zip(before, after, strict=True)) == 1


def test_flipped_float_is_far_from_what_it_was(cpu_device: Any) -> None:
    torch = cpu_device.torch
    tensor = torch.full((9,), 0.37)
    change = (flip_bit(torch, tensor) - tensor).abs()
    assert float(change.max()) > 1e30
    assert int((change > 0).sum()) == 1


def test_only_the_first_tensor_that_is_read_is_corrupt(cpu_device: Any) -> None:
    torch = cpu_device.torch
    device = faulty(cpu_device, [Fault("c", "cpu:0", "corrupt", None)])
    tensor = torch.ones(8)
    assert not torch.equal(device.read(tensor), tensor)
    assert torch.equal(device.read(tensor), tensor)


def test_slow_device_measures_what_it_really_takes(cpu_device: Any) -> None:
    device = faulty(cpu_device, [Fault("c", None, "slow", 4.0)])
    start = time.perf_counter()
    seconds = device.measure(lambda: time.sleep(0.01), repeats=2, warmup=1)
    assert len(seconds) == 2
    assert all(value >= 0.04 for value in seconds)
    assert time.perf_counter() - start >= 0.12
    device.synchronize()
    time.sleep(0.01)
    start = time.perf_counter()
    device.synchronize()
    assert time.perf_counter() - start >= 0.03


def test_device_without_its_kinds_of_fault_is_itself(cpu_device: Any) -> None:
    others = [Fault("c", None, kind, None) for kind in KINDS if kind not in ("slow", "corrupt")]
    assert faulty(cpu_device, others) is cpu_device
    wrapped = faulty(cpu_device, [Fault("c", None, "slow", 2.0)])
    assert (wrapped.target, wrapped.key, wrapped.collective_backend) == (
        cpu_device.target,
        cpu_device.key,
        cpu_device.collective_backend,
    )
    assert wrapped.available_bytes() is not None
