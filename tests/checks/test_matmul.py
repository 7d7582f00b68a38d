"""The matmul probe, with real products."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from checks.contract import Finding, Limit, Status, Tier
from checks.device.matmul import matmul

# The deep tier with one product of each dtype, and devices that ask for small ones: a CPU is slow at narrow dtypes.
DEEP: Mapping[str, Any] = {"tier": Tier.DEEP, "repeats": 1, "warmup": 0}
ROWS = 64


def run(ctx: Any) -> list[Finding]:
    return [item for item in matmul(ctx) if isinstance(item, Finding)]


def test_right_products_pass_with_a_number_for_each_dtype(context: Any, cpu_device: Any) -> None:
    findings = run(context(matmul, device=cpu_device, repeats=2, warmup=1))
    assert [f.status for f in findings] == [Status.PASS, Status.PASS]
    assert [f.measurements[0].labels["dtype"] for f in findings] == ["fp32", "bf16"]
    for finding in findings:
        (measured,) = finding.measurements
        assert finding.target == "cpu:0"
        assert measured.name == "matmul_flops_per_second"
        assert measured.value is not None
        assert measured.value > 1e6
        assert measured.origin == "none"
        assert "exact to rounding (seed " in finding.message


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 3, 64, 600])
def test_bound_holds_for_any_seed_and_size(context: Any, cpu_device: Any, dtype: str, size: int) -> None:
    for seed in range(5 if size < 600 else 2):
        (finding,) = run(
            context(matmul, device=cpu_device, dtypes=[dtype], sizes=[size], seed=seed, repeats=1, warmup=0)
        )
        assert finding.status is Status.PASS, finding.message


@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1.001), ("bf16", 1.03)])
@pytest.mark.parametrize("size", [64, 700])
def test_small_error_in_the_largest_element_is_a_wrong_result(
    context: Any, tampering: Any, dtype: str, factor: float, size: int
) -> None:
    def scale_largest(tensor: Any, _: int) -> Any:
        place = tensor.abs().argmax()
        tensor.view(-1)[place] *= factor
        return tensor

    def flat(tensor: Any, _: int) -> Any:
        return scale_largest(tensor, 0) if size <= 512 else tensor.mul_(factor)  # of many rows some are only summed

    device = tampering(flat)
    (finding,) = run(context(matmul, device=device, dtypes=[dtype], sizes=[size], seed=11, repeats=1, warmup=0))
    assert (finding.status, finding.reason) == (Status.FAIL, "WrongResult")
    assert "seed 11" in finding.message
    assert finding.measurements[0].value is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_value_that_cannot_be_is_found_in_every_row_of_a_large_product(
    context: Any, tampering: Any, value: float
) -> None:
    for row in (0, 350, 699):

        def spoil(tensor: Any, _: int, row: int = row) -> Any:
            tensor[row, 5] = value
            return tensor

        (finding,) = run(context(matmul, device=tampering(spoil), dtypes=["fp32"], sizes=[700], repeats=1, warmup=0))
        assert finding.reason == "WrongResult"


def test_wrong_element_is_named_with_what_it_should_be(context: Any, tampering: Any) -> None:
    def spoil(tensor: Any, _: int) -> Any:
        tensor[2, 3] = 77.0
        return tensor

    (finding,) = run(context(matmul, device=tampering(spoil), dtypes=["fp32"], sizes=[8]))
    assert "1 of 64 elements, the first at [2, 3]: 77 instead of " in finding.message


def test_slow_device_fails_at_its_limit_and_the_origin_is_shown(context: Any, cpu_device: Any) -> None:
    """Rival fault 5: the limit of each dtype can be tripped."""
    limits = {
        "matmul_flops_per_second": Limit(lower=1.0, upper=None, origin="catalogue"),
        "matmul_flops_per_second/bf16@cpu:0": Limit(lower=1e18, upper=None, origin="config"),
    }
    fp32, bf16 = run(context(matmul, device=cpu_device, sizes=[64, 64], limits=limits))
    assert (fp32.status, fp32.measurements[0].origin) == (Status.PASS, "catalogue")
    assert (bf16.status, bf16.reason, bf16.measurements[0].origin) == (Status.FAIL, "SlowDevice", "config")


def test_time_that_was_not_measured_is_no_pass(context: Any, cpu_device: Any, tampering: Any) -> None:
    """Rival fault 2: a probe that ends well without a number is no evidence."""

    def measure(operation: Any, *, repeats: int, warmup: int) -> list[float]:
        operation()
        return [0.0] * repeats

    device = tampering(measure=measure)
    assert {f.status for f in run(context(matmul, device=device, sizes=[8, 8]))} == {Status.FAIL}
    assert {f.status for f in run(context(matmul, device=cpu_device, sizes=[8, 8], repeats=0))} == {Status.FAIL}


def test_data_is_new_each_run_and_the_same_for_the_same_seed(context: Any, tampering: Any) -> None:
    seen: list[bytes] = []

    def keep(tensor: Any, _: int) -> Any:
        seen.append(str(tensor.tolist()).encode())
        return tensor

    for seed in (None, None, 5, 5):
        run(context(matmul, device=tampering(keep), dtypes=["fp32"], sizes=[4], seed=seed))
    assert seen[0] != seen[1]
    assert seen[2] == seen[3]


def test_parameters_that_make_no_sense_are_named(context: Any, cpu_device: Any) -> None:
    with pytest.raises(ValueError, match="no such dtype 'fp9'; choose from: fp32, bf16, fp16, fp8"):
        run(context(matmul, device=cpu_device, dtypes=["fp9"]))
    with pytest.raises(ValueError, match="'sizes' must have one number per dtype"):
        run(context(matmul, device=cpu_device, sizes=[1, 2, 3]))


def test_deep_tier_adds_what_the_device_has_and_leaves_out_what_it_has_not(
    context: Any, cpu_device: Any, tampering: Any
) -> None:
    measured = []

    def measure(operation: Any, *, repeats: int, warmup: int) -> list[float]:
        measured.append(1)
        if len(measured) > 3:
            raise RuntimeError("\"addmm\" not implemented for 'Float8'\nand a stack")
        seconds: list[float] = cpu_device.measure(operation, repeats=repeats, warmup=warmup)
        return seconds

    findings = run(context(matmul, device=tampering(measure=measure, matmul_rows=ROWS), **DEEP))
    assert [finding.status for finding in findings] == [Status.PASS, Status.PASS, Status.PASS, Status.SKIP]
    assert findings[2].measurements[0].labels["dtype"] == "fp16"
    assert findings[3].reason == "NotApplicable"
    assert "no fp8 products on this device" in findings[3].message


def test_device_that_rounds_its_sums_on_the_way_is_not_accused_for_a_dtype_that_need_not_be_there(
    context: Any, tampering: Any
) -> None:
    """XLA on CPUs adds fp16 in fp16: most elements are off by a little. The dtypes of every run stay strict."""

    def blur(tensor: Any, _: int) -> Any:
        return tensor + tensor.abs().max() * 0.003

    *strict, fp16, fp8 = run(context(matmul, device=tampering(blur, matmul_rows=ROWS), **DEEP))
    assert {finding.reason for finding in strict} == {"WrongResult"}
    assert (fp16.status, fp8.status) == (Status.SKIP, Status.SKIP)
    assert "its sums are not kept in fp32" in fp16.message
    *_, fp16, fp8 = run(context(matmul, device=tampering(blur, matmul_rows=ROWS, wide_sums=("fp16",)), **DEEP))
    assert (fp16.reason, fp8.status) == ("WrongResult", Status.SKIP)  # a GPU keeps its sums: this is a fault
    known = run(context(matmul, device=tampering(narrow_sums=("fp16", "fp8"), matmul_rows=ROWS), **DEEP))
    assert [finding.status for finding in known] == [Status.PASS, Status.PASS, Status.SKIP, Status.SKIP]


@pytest.mark.parametrize("size", [16, 512])
def test_fp8_products_are_judged_by_their_own_rounding(context: Any, tampering: Any, size: int) -> None:
    """The device rounds fp32 sums to fp8; one step more is an error."""

    def make(wrong: bool) -> Any:
        import torch

        def measure(operation: Any, *, repeats: int, warmup: int) -> list[float]:
            return [1.0] * repeats

        def matmul_of(tensor: Any, _: int) -> Any:
            generator = torch.Generator().manual_seed(3)
            a, b = (torch.rand(size, size, generator=generator).mul_(2).sub_(1) for _ in range(2))
            product = a.to(torch.float8_e4m3fn).float() @ b.to(torch.float8_e4m3fn).float()
            if wrong:
                product.view(-1)[product.abs().argmax()] *= 1.4
            return product.to(torch.float8_e4m3fn)

        return tampering(matmul_of, measure=measure)

    def judged(wrong: bool) -> Finding:
        (finding,) = run(context(matmul, device=make(wrong), dtypes=["fp8"], sizes=[size], seed=3))
        return finding

    assert judged(False).status is Status.PASS, judged(False).message
    assert judged(True).reason == "WrongResult"


def test_dtype_that_the_host_would_do_is_left_out_and_trouble_of_the_device_is_not(
    context: Any, tampering: Any
) -> None:
    *_, fp16, fp8 = run(context(matmul, device=tampering(fallbacks=lambda: ("aten::mm",), matmul_rows=ROWS), **DEEP))
    assert (fp16.status, fp8.status) == (Status.SKIP, Status.SKIP)
    assert "the host would compute aten::mm" in fp16.message

    def fail(tensor: Any, read: int) -> Any:
        if read > 2:
            raise RuntimeError("nrt_execute failed: status=1202")
        return tensor

    with pytest.raises(RuntimeError, match="1202"):
        run(context(matmul, device=tampering(fail, matmul_rows=ROWS), **DEEP))


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "CUDA driver error: unknown error",
        "CUDA out of memory. Tried to allocate 32.00 MiB",
    ],
)
def test_gpu_that_fails_in_a_dtype_that_need_not_be_there_is_never_skipped(
    context: Any, tampering: Any, words: str
) -> None:
    def fail(tensor: Any, read: int) -> Any:
        if read > 2:
            raise RuntimeError(words)
        return tensor

    with pytest.raises(RuntimeError, match=re.escape(words.splitlines()[0])):
        run(context(matmul, device=tampering(fail, matmul_rows=ROWS), **DEEP))


@pytest.mark.parametrize(
    "words", ["CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`", "CUDA error: no kernel image is"]
)
def test_gpu_that_says_that_it_lacks_a_dtype_is_not_accused(context: Any, tampering: Any, words: str) -> None:
    def fail(tensor: Any, read: int) -> Any:
        if read > 2:
            raise RuntimeError(words)
        return tensor

    *_, fp16, fp8 = run(context(matmul, device=tampering(fail, matmul_rows=ROWS), **DEEP))
    assert (fp16.status, fp8.status) == (Status.SKIP, Status.SKIP)
    assert words in fp16.message
