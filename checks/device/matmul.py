"""The `matmul` probe: matrix products are right and fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Device, Finding, Status, check
from checks.device.sampling import labelled_limit, median, new_seed, per_second
from checks.limits import within

# Name of the dtype -> torch's name, and the unit roundoff u = 2**-p of p significant bits.
_DTYPES = {"fp32": ("float32", 2.0**-24), "bf16": ("bfloat16", 2.0**-8), "fp16": ("float16", 2.0**-11)}
_U_FP32 = 2.0**-24
_EXACT_ROWS = 512  # rows checked one element at a time; the rest by sums (see `_compare`)


@dataclass(frozen=True)
class Params:
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Of: fp32, bf16, fp16."""
    sizes: tuple[int, ...] = ()
    """Rows of the square matrices, one for each dtype; empty: the device's own size (512 on a CPU, 4096 on a GPU)."""
    repeats: int = 7
    """Timed products; the median counts."""
    warmup: int = 2
    """Products before them that do not count."""
    seed: int | None = None
    """Of the random data; None: a new one each run, shown in the message."""


@check(tier="quick", interval_seconds=3600, timeout_seconds=60, scope="device")
def matmul(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Matrix products of random data are right to the last bit that rounding allows, and fast.

    Reads:   the device, by one square product per dtype (fp32, bf16).
    Judges:  fail WrongResult | fail SlowDevice (below `matmul_flops_per_second`, or `matmul_flops_per_second/bf16` for
             one dtype) | pass with the achieved FLOP/s, 2 n^3 over the median time.
    Cost:    under 0.1 s on one core; the device is busy meanwhile.
    Source:  the bound is that of N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.5, for any order
             of summation: |C' - C| <= gamma_n |A||B| + u |C|, with gamma_n = n u32 / (1 - n u32). Inputs are exact (the
             reference takes their rounded values), sums are kept in fp32, and the last term is the rounding to the
             dtype of the result. |A||B| is bounded from above by the norms of row and column (Cauchy-Schwarz). The
             reference is a float64 product on the host, whose own error is 2^-29 of the bound.
    """
    device = ctx.device
    if device is None:
        raise ValueError("matmul needs a device; run it in a device's worker")
    params = ctx.params
    seed = new_seed(params.seed)
    if params.sizes and len(params.sizes) != len(params.dtypes):
        raise ValueError(
            f"parameter 'sizes' must have one number per dtype ({len(params.dtypes)}), not {params.sizes!r}"
        )
    for index, dtype in enumerate(params.dtypes):
        if dtype not in _DTYPES:
            raise ValueError(f"parameter 'dtypes': no such dtype {dtype!r}; known are {', '.join(_DTYPES)}")
        size = params.sizes[index] if params.sizes else device.matmul_rows
        yield _probe(ctx, device, dtype, size, seed)


def _probe(ctx: Context[Params], device: Device, dtype: str, size: int, seed: int) -> Finding:
    """One product of one dtype: timed, and the last timed result judged."""
    torch = device.torch
    torch_dtype = getattr(torch, _DTYPES[dtype][0])
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(size, size, generator=generator).mul_(2).sub_(1).to(torch_dtype) for _ in range(2))
    device_a, device_b = a.to(device.torch_device), b.to(device.torch_device)
    product = torch.empty(size, size, dtype=torch_dtype, device=device.torch_device)
    seconds = device.measure(
        lambda: torch.matmul(device_a, device_b, out=product), repeats=ctx.params.repeats, warmup=ctx.params.warmup
    )
    wrong = _compare(torch, a, b, device.read(product), _DTYPES[dtype][1], generator)
    name = "matmul_flops_per_second"
    shape = f"{dtype} {size}x{size}x{size}"
    finding = within(
        per_second(2 * size**3, median(seconds)),
        name=name,
        target=device.target,
        limit=labelled_limit(ctx, name, dtype, device.target),
        reason="SlowDevice",
        subject=f"{shape} product exact to rounding (seed {seed}),",
        labels={"dtype": dtype},
    )
    if wrong is None:
        return finding
    text = f"{shape} product is wrong (seed {seed}): {wrong}"
    return dataclasses.replace(finding, status=Status.FAIL, reason="WrongResult", message=text, blame=None, action=None)


def _compare(torch: Any, a: Any, b: Any, product: Any, roundoff: float, generator: Any) -> str | None:
    """
    What is wrong with a product of host matrices a and b  # all [n, n]; None when nothing is.

    Up to 512 rows each element is compared. Of larger products 512 random rows are, and every row as a whole by its
    inner product with a random vector of signs, which costs n^2: |sum s_j (C'_ij - C_ij)| <= sum of the bounds.
    """
    size = a.shape[0]
    if product.shape != a.shape:
        return f"its shape is {tuple(product.shape)}"
    gamma = size * _U_FP32 / (1 - size * _U_FP32)
    columns = b.double()
    norms = columns.norm(dim=0)
    rows = torch.arange(size) if size <= _EXACT_ROWS else torch.randperm(size, generator=generator)[:_EXACT_ROWS]
    some = a[rows].double()
    expected = some @ columns
    bound = gamma * (1 + roundoff) * torch.outer(some.norm(dim=1), norms) + roundoff * expected.abs()
    found = product[rows].double()
    bad = ~((found - expected).abs() <= bound)  # this way round NaN is bad
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        return (
            f"{int(bad.sum())} of {bad.numel()} elements, the first at [{int(rows[row])}, {column}]: "
            f"{float(found[row, column]):.9g} instead of {float(expected[row, column]):.9g} "
            f"+- {float(bound[row, column]):.3g}"
        )
    if size > _EXACT_ROWS:
        everything, signs = a.double(), torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        actual = product.double()
        slack = gamma * everything.norm(dim=1) * norms.sum() + roundoff * actual.abs().sum(dim=1) * (1 + 2 * roundoff)
        # An infinite element makes its own slack infinite, so the sums must be finite as well.
        sums = actual @ signs
        bad = ~((sums - everything @ (columns @ signs)).abs() <= slack) | ~sums.isfinite()
        if bad.any():
            return f"{int(bad.sum())} of {size} rows, the first is row {int(bad.nonzero()[0])}"
    return None
