"""The `matmul` probe: matrix products are right and fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Device, Finding, Profile, Series, Status, Tier, check
from checks.device.probes import is_out_of_memory, is_trouble, labelled_limit, new_seed, per_second
from checks.limits import within
from checks.peers import median
from checks.profiling.operations import with_profile

_ALWAYS = ("fp32", "bf16")
_NARROW = "NoData"  # for a product whose sums were rounded on the way: nothing to judge it by
_WHERE_THERE = ("fp16", "fp8")  # from the deep tier on; not every device has them
_U_FP32 = 2.0**-24
_NARROW_RATIO = (
    0.05  # of elements beyond the bound: a fault hits few or is gross, a narrow sum errs a little everywhere
)
_NARROW_STEPS = 2.0  # n u times this is eight standard deviations of a sum that is rounded to the dtype at each step
_EXACT_ROWS = 512  # rows checked one element at a time; the rest by sums (see `_compare`)


@dataclass(frozen=True)
class Format:
    """`roundoff` is u = 2**-p of p significant bits, `tiny` half the distance of the smallest numbers."""

    torch_name: str
    roundoff: float
    tiny: float


# Name of the dtype -> its formats in torch, the first that the device has.
_DTYPES = {
    "fp32": (Format("float32", 2.0**-24, 2.0**-150),),
    "bf16": (Format("bfloat16", 2.0**-8, 2.0**-134),),
    "fp16": (Format("float16", 2.0**-11, 2.0**-25),),
    "fp8": (Format("float8_e4m3fn", 2.0**-4, 2.0**-10), Format("float8_e5m2", 2.0**-3, 2.0**-17)),
}


@dataclass(frozen=True)
class Probed:
    """What one product gave; `operation` does it again and takes `seconds` (None: there is no such product here)."""

    finding: Finding
    operation: Callable[[], object] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Params:
    dtypes: tuple[str, ...] = ()
    """Of: fp32, bf16, fp16, fp8; empty: fp32 and bf16, and from the deep tier on the others where the device has
    them."""
    sizes: tuple[int, ...] = ()
    """Rows of the square matrices, one for each dtype; empty: the device's own size (512 on a CPU, 4096 on a GPU)."""
    repeats: int = 7
    """Timed products; the median counts."""
    warmup: int = 2
    """Products before them that do not count."""
    seed: int | None = None
    """Of the random data; None: a new one each run, shown in the message."""


@check(
    tier="quick",
    interval_seconds=3600,
    timeout_seconds=60,
    scope="device",
    series=(
        Series(
            measurement="matmul_flops_per_second",
            help="Achieved speed of matrix multiplication in the last run.",
            labels=("dtype",),
        ),
    ),
)
def matmul(ctx: Context[Params]) -> Iterator[Finding | Profile]:
    """
    Matrix products of random data are correct to the last bit that rounding allows, and fast.

    Reads:   the device, by one square product per dtype (fp32, bf16; from the deep tier on fp16 and fp8).
    Judges:  fail WrongResult | fail SlowDevice (below `matmul_flops_per_second`, or `matmul_flops_per_second/bf16` for
             one dtype) | warn SlowDevice (below half of the published peak) | skip NotApplicable (fp16 or fp8 that the
             device cannot do, or whose sums it does not keep in fp32, as XLA on CPUs; GPUs keep those of fp16) | pass
             with the achieved FLOP/s, 2 n^3 over the median time.
    Cost:    under 0.1 s on one core; the device is busy meanwhile.
    Source:  the bound comes from N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.5, for any order
             of summation: |C' - C| <= gamma_n |A||B| + u |C|, with gamma_n = n u32 / (1 - n u32). Inputs are exact (the
             reference takes their rounded values), sums are kept in fp32, and the last term is the rounding to the
             dtype of the result, or half of its smallest step. |A||B| is bounded from above by the norms of row and
             column (Cauchy-Schwarz). The reference is a float64 product on the host, whose own error is 2^-29 of the
             bound.
    Unverified: GPUs and Neuron devices, and fp8 on any device. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("matmul needs a device; run it in a device's worker")
    params = ctx.params
    seed = new_seed(params.seed)
    dtypes = params.dtypes or _ALWAYS
    if params.sizes and len(params.sizes) != len(dtypes):
        raise ValueError(f"parameter 'sizes' must have one number per dtype ({len(dtypes)}), not {params.sizes!r}")
    for index, dtype in enumerate(dtypes):
        if dtype not in _DTYPES:
            raise ValueError(f"parameter 'dtypes': no such dtype {dtype!r}; choose from: {', '.join(_DTYPES)}")
        size = params.sizes[index] if params.sizes else device.matmul_rows
        yield from _shown(ctx, device, dtype, _probe(ctx, device, dtype, _DTYPES[dtype][0], size, seed))
    if not params.dtypes and ctx.tier.rank >= Tier.DEEP.rank:
        for dtype in _WHERE_THERE:
            yield from _shown(ctx, device, dtype, _where_there(ctx, device, dtype, device.matmul_rows, seed))


def _shown(ctx: Context[Params], device: Device, dtype: str, probed: Probed) -> Iterator[Finding | Profile]:
    """The finding on a product, with a profile of it where it is slow."""
    if probed.operation is None:
        yield probed.finding
        return
    yield from with_profile(ctx, device, f"matmul {dtype}", probed.operation, probed.seconds, [probed.finding])


def _where_there(ctx: Context[Params], device: Device, dtype: str, size: int, seed: int) -> Probed:
    """The product of a dtype that the device may not have: found out by asking for it."""
    why = f"torch {device.torch.__version__} does not support it"
    if dtype in getattr(device, "narrow_sums", ()):
        text = f"no {dtype} products on this device: its sums are not kept in fp32, so no error bound applies"
        return Probed(Finding(status=Status.SKIP, reason="NotApplicable", message=text, target=device.target))
    fallbacks = getattr(device, "fallbacks", tuple)
    for form in _DTYPES[dtype]:
        if not hasattr(device.torch, form.torch_name):
            continue
        try:
            probed = _probe(ctx, device, dtype, form, size, seed)
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            if is_trouble(error) or is_out_of_memory(error):
                raise  # no lack of the dtype
            why = (str(error) or type(error).__name__).splitlines()[0][:200]
            continue
        left: tuple[str, ...] = fallbacks()
        if not left and probed.finding.reason != _NARROW:
            return probed
        why = f"the host would compute {', '.join(left[:4])}" if left else probed.finding.message
        if not left:
            break
    text = f"no {dtype} products on this device: {why}"
    return Probed(Finding(status=Status.SKIP, reason="NotApplicable", message=text, target=device.target))


def _probe(ctx: Context[Params], device: Device, dtype: str, form: Format, size: int, seed: int) -> Probed:
    """One product of one dtype: timed, and the last timed result judged."""
    torch = device.torch
    torch_dtype = getattr(torch, form.torch_name)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(size, size, generator=generator).mul_(2).sub_(1).to(torch_dtype) for _ in range(2))
    device_a, device_b = a.to(device.torch_device), b.to(device.torch_device)
    product = torch.empty(size, size, dtype=torch_dtype, device=device.torch_device)

    def multiply() -> object:
        return torch.matmul(device_a, device_b, out=product)

    seconds = device.measure(multiply, repeats=ctx.params.repeats, warmup=ctx.params.warmup)
    wrong, narrow = _compare(torch, a, b, device.read(product), form, generator)
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
        return Probed(finding, multiply, median(seconds))
    text = f"{shape} product is wrong (seed {seed}): {wrong}"
    if narrow and dtype in _WHERE_THERE and dtype not in getattr(device, "wide_sums", ()):
        text = f"its sums are not kept in fp32, so no error bound applies ({wrong})"
        return Probed(dataclasses.replace(finding, status=Status.UNKNOWN, reason=_NARROW, message=text))
    return Probed(
        dataclasses.replace(finding, status=Status.FAIL, reason="WrongResult", message=text, blame=None, action=None)
    )


def _compare(torch: Any, a: Any, b: Any, product: Any, form: Format, generator: Any) -> tuple[str | None, bool]:
    """
    What is wrong with a product of host matrices a and b  # all [n, n]; None when nothing is. And whether it looks like
    sums in the dtype of the result instead of in fp32: very many elements are off, and none by much.

    Up to 512 rows each element is compared. Of larger products 512 random rows are, and every row as a whole by its
    inner product with a random vector of signs, which costs n^2: |sum s_j (C'_ij - C_ij)| <= sum of the bounds.
    """
    size, roundoff = a.shape[0], form.roundoff
    if product.shape != a.shape:
        return f"its shape is {tuple(product.shape)}", False
    gamma = size * _U_FP32 / (1 - size * _U_FP32)
    everything, columns, actual = a.double(), b.double(), product.double()
    norms = columns.norm(dim=0)
    rows = torch.arange(size) if size <= _EXACT_ROWS else torch.randperm(size, generator=generator)[:_EXACT_ROWS]
    some = everything[rows]
    expected = some @ columns
    bound = gamma * (1 + roundoff) * torch.outer(some.norm(dim=1), norms) + roundoff * expected.abs()
    bound += form.tiny
    found = actual[rows]
    bad = ~((found - expected).abs() <= bound)  # this way round NaN is bad
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        loose = (found - expected).abs() <= _NARROW_STEPS * size * roundoff
        narrow = bool(loose.all()) and float(bad.double().mean()) > _NARROW_RATIO
        return (
            f"{int(bad.sum())} of {bad.numel()} elements, the first at [{int(rows[row])}, {column}]: "
            f"{float(found[row, column]):.9g} instead of {float(expected[row, column]):.9g} "
            f"+- {float(bound[row, column]):.3g}"
        ), narrow
    if size > _EXACT_ROWS:
        signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        slack = gamma * everything.norm(dim=1) * norms.sum() + roundoff * actual.abs().sum(dim=1) * (1 + 2 * roundoff)
        slack += size * form.tiny
        # An infinite element makes its own slack infinite, so the sums must be finite as well.
        sums = actual @ signs
        bad = ~((sums - everything @ (columns @ signs)).abs() <= slack) | ~sums.isfinite()
        if bad.any():
            return f"{int(bad.sum())} of {size} rows, the first is row {int(bad.nonzero()[0])}", False
    return None, False
