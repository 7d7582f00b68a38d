"""The `train_step` check: does the device train? One real step, repeated, held against float64, and timed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from checks.accelerators import find_descriptor
from checks.contract import (
    NO_LIMIT,
    Context,
    Device,
    Evidence,
    Finding,
    Limit,
    Measurement,
    Profile,
    Status,
    Tier,
    check,
)
from checks.device.probes import labelled_limit, new_seed
from checks.limits import within
from checks.training.digests import AFTER, Digester, fold, join, judge_steps
from checks.training.environment import numeric_settings
from checks.training.model import FORMATS, Format, why_not
from checks.training.own import own_step
from checks.training.probing import Repeats, repeat, right, speed
from checks.training.work import SMALL, STEP_REVISION, Work, built_in, parity_limit, run_parity

_REPEATS = {Tier.QUICK: 3, Tier.DEEP: 20, Tier.SOAK: 200}
_PARITY_STEPS = {Tier.QUICK: 8, Tier.DEEP: 200, Tier.SOAK: 200}
_ALWAYS = ("fp32", "bf16")
# From the deep tier on, in the small size: not every device has them, and a CPU takes minutes for large.
_NARROW = ("fp16", "fp8")
_CURVE_POINTS = 11
_MOST_DIGESTS = 400  # a line of evidence has 64 KiB


@dataclass(frozen=True)
class Params:
    dtypes: tuple[str, ...] = ()
    """Of: fp32, bf16, fp16, fp8; empty: fp32 and bf16, and from the deep tier on the others where the device has
    them."""
    repeats: int | None = None
    """How often the step is done over; None: 3 in the quick tier, 20 in deep, 200 in soak."""
    seconds: float = 0.0
    """How long the step of each dtype is repeated at least: for a soak."""
    parity_steps: int | None = None
    """Steps whose loss is held against the reference; None: 8 in the quick tier, 200 in deep and soak; 0: none."""
    timed: int = 5
    """Timed steps."""
    large: bool = True
    """Whether the deep tier and soak take the large model; the small one fits in the cache of a core."""
    step: str | None = None
    """A step of your own instead of the built-in model: `package.module:make`, `/path/to/file.py:make`, or the name of
    an entry point of the group `healthd.training_steps`."""
    seed: int | None = None
    """Of injected faults that strike one step in so many; None: a new one each run."""
    left_out: tuple[str, ...] = ()
    """Places whose bits this device does not repeat (a back end without a deterministic kernel): not digested."""


@check(tier="quick", interval_seconds=3600, timeout_seconds=180, scope="device", judge=judge_steps)
def train_step(ctx: Context[Params]) -> Iterator[Finding | Evidence | Profile]:
    """
    A training step of a small transformer is the same each time and on each device of a kind, correct, and fast.

    `step` replaces it with a training step of your own: see docs/training_step.md.

    Reads:   the device, by a step of a decoder-only transformer on fixed text: embedding, attention, norms, GELU, cross
             entropy, their gradients, AdamW; in fp32 and bf16, from the deep tier on also larger, and in fp16 and fp8
             (products with weights in e4m3, forward). The output of each operation, each gradient and each parameter
             after the step is digested.
    Judges:  fail SilentCorruption (a repeat differs, or the device is a minority of three or more of one key; the first
             layer and operation that differ are named) | fail DigestMismatch (devices differ and no majority tells
             which) | fail WrongResult (the first layer and operation that are further from float64 than rounding
             explains) | fail ParityLost (the loss leaves that of the reference) | fail SlowDevice
             (`train_step_steps_per_second`, `_tokens_per_second` and `_seconds`, for one model `.../bf16-large`; in
             deep `train_step_flops_per_second`, which is learned and compared between peers; the finding says which
             operations took the time of one more step, by torch's profiler: see docs/profiles.md) | skip NotApplicable
             (fp16 on a device that lacks it; fp8 where the kind of device declares no scaled products, or the device
             refuses one) | pass with the repeats, the peers, the errors and the times.
    Faults:  `train_step.LAYER.OPERATION@DEVICE=corrupt:MAGNITUDE` makes one element wrong by that share of itself, in
             one repeat; without a magnitude a bit of its exponent is flipped. Layers are embed, block0, block1 and
             head, operations as in `block1.gelu` (forward), `block1.gelu_grad` (its gradient), `block1.up_weight_grad`
             and `block1.up_weight_update` (the parameter after the optimizer). A wrong one is refused with the nearest.
             `corrupt:MAGNITUDE/10000`, or `corrupt/10000`, strikes one step in 10,000, by chance; `/1` every step:
             a small one passes here, and other nodes tell.
    Odds:    n repeats miss a fault that strikes one step in m with probability (1 - 1/m)^n, and 3 m repeats miss it
             with 5 %. Of one in 10,000, 3 repeats miss 99.97 %, 20 miss 99.8 %, 30,000 miss 5 %. `seconds`, and the
             time limit of the check, make a soak that long; a pass says its own odds.
    Cost:    quick: under 1 s on one core, after the import of torch. Deep: a minute or two on two cores.
    Source:  own. The bound of the errors is derived in checks/training/reference.py (Higham and Mary, 2019). In fp8
             each product is held against the exact one of the same rounded operands, by the bound of bf16. That
             training finds what single operations do not: SDCHunter (OSDI 2026).
    Unverified: GPUs and Neuron devices, and a device that really corrupts. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("train_step needs a device; run it in a device's worker")
    params, deep = ctx.params, ctx.tier.rank >= Tier.DEEP.rank
    if params.step is not None:
        own = own_step(device, params.step)
        repeated = yield from _questions(ctx, device, own)
        yield _evidence(ctx, device, own, repeated, repeated.common)
        return
    for dtype in params.dtypes:
        if dtype not in FORMATS:
            raise ValueError(f"parameter 'dtypes': no such dtype {dtype!r}; choose from: {', '.join(FORMATS)}")
    for dtype in params.dtypes or (*_ALWAYS, *(_NARROW if deep else ())):
        if (why := _lack(ctx, device, dtype)) is not None:
            text = f"no {dtype} step on this device: {why}"
            yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target=device.target)
            continue
        work = built_in(device, dtype, large=deep and params.large and dtype not in _NARROW)
        repeated = yield from _questions(ctx, device, work)
        digests, form = dict(repeated.common), FORMATS[dtype]
        steps = params.parity_steps if params.parity_steps is not None else _PARITY_STEPS.get(ctx.tier, 8)
        if steps and (deep or form is FORMATS["fp32"]):
            finding, last = _parity(ctx, device, form, steps)
            yield finding
            digests[f"{AFTER}/{steps}"] = last
        yield _evidence(ctx, device, work, repeated, digests)


def _lack(ctx: Context[Params], device: Device, dtype: str) -> str | None:
    """Why a step of this dtype cannot be judged, or done, on this device; None where it can."""
    products = FORMATS[dtype].products
    if dtype in getattr(device, "narrow_sums", ()) and not ctx.params.dtypes:
        return "its sums are not kept in fp32, so no error bound applies"
    if products is None:
        return None
    accelerator = ctx.inventory.get("accelerator")
    described = find_descriptor(accelerator)
    if described is None or products not in described.scaled_products:
        return f"{accelerator or 'this accelerator'} declares no scaled products of {products}"
    return why_not(device.torch, device.torch_device, products)


def _questions(ctx: Context[Params], device: Device, work: Work) -> Generator[Finding | Profile, None, Repeats]:
    """What is asked of each step; its digests."""
    count = ctx.params.repeats if ctx.params.repeats is not None else _REPEATS.get(ctx.tier, 3)
    repeated, first = repeat(
        device, work, count, ctx.params.left_out, ctx.params.seconds, seed=new_seed(ctx.params.seed)
    )
    yield from repeated.findings(device, work)
    yield from right(device, work, first)
    yield from speed(ctx, device, work, ctx.params.timed)
    return repeated


def _evidence(
    ctx: Context[Params], device: Device, work: Work, repeated: Repeats, digests: Mapping[str, str]
) -> Evidence:
    """For the comparison of devices; threads change the order of sums on a CPU."""
    threads = f" | {device.torch.get_num_threads()} threads" if str(device.torch_device) == "cpu" else ""
    return Evidence(
        target=device.target,
        key=f"{device.key}{threads} | {work.key}",
        data={
            "dtype": work.label.partition("-")[0],
            "digests": fold(digests, _MOST_DIGESTS),
            "repeats": repeated.count,
            "stable": repeated.example is None,
            "left_out": list(ctx.params.left_out),
            # Devices of one node share these; a device that makes another start is to differ from its neighbours.
            "over_nodes": f"revision {STEP_REVISION} | start {work.start} | settings {numeric_settings(os.environ)}",
        },
    )


def _parity(ctx: Context[Params], device: Device, form: Format, steps: int) -> tuple[Finding, str]:
    """The loss of many steps beside that of the host, and the digest of the parameters at the end."""
    done = run_parity(device, SMALL, form, steps)
    exact = form is FORMATS["fp32"]
    step, worst = done.worst
    name = "train_step_loss_error_ratio"
    limit = labelled_limit(ctx, name, form.name, device.target)
    if limit is NO_LIMIT:
        limit = Limit(lower=None, upper=parity_limit(form), origin="default")
    where = f"at most at step {step + 1}" if exact else "of the mean"
    finding = within(
        worst if exact else done.mean,
        name=name,
        target=device.target,
        limit=limit,
        reason="ParityLost",
        subject=(
            f"{form.name} loss after {steps} steps {done.losses[-1]:.4f}, reference {done.expected[-1]:.4f}; "
            f"difference {where}"
        ),
        labels={"dtype": form.name},
    )
    digester = Digester(device)
    left = {name.rpartition("_")[0] for name in ctx.params.left_out}
    kept = {name: value for name, value in done.state.parameters.items() if name not in left}
    points = range(0, steps, -(-steps // _CURVE_POINTS))
    finding = dataclasses.replace(
        finding, measurements=(*finding.measurements, *(_point(form, done.losses[at], at + 1) for at in points))
    )
    ends = digester.finish({name: digester.look(value.detach()) for name, value in kept.items()})
    return finding, join(ends.values())


def _point(form: Format, loss: float, step: int) -> Measurement:
    """One point of the curve of the loss, which is kept as evidence and not judged."""
    labels = {"dtype": form.name, "step": str(step)}
    return Measurement(name="train_step_loss", value=loss, lower=None, upper=None, origin="none", labels=labels)
