"""The `train_step` check: does the device train? One real step, repeated, held against float64, and timed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import NO_LIMIT, Context, Device, Evidence, Finding, Limit, Measurement, Status, Tier, check
from checks.device.sampling import labelled_limit, median, per_second
from checks.limits import within
from checks.training.corruption import corrupting
from checks.training.digests import Digester
from checks.training.judge import AFTER, first_difference, judge_steps
from checks.training.model import FORMATS, Format, Size, flops_of, make_batch, make_parameters
from checks.training.parity import EXACT_RATIO, WIDE_RATIO, on_device, run_parity
from checks.training.places import all_places, describe
from checks.training.reference import errors_of, reference_step
from checks.training.step import State, Step, first_state, run_step

SMALL = Size(width=64, heads=4, tokens=32, batch=2)
LARGE = Size(width=512, heads=4, tokens=128, batch=4)
_REPEATS = {Tier.QUICK: 3, Tier.DEEP: 20, Tier.SOAK: 1000}
_PARITY_STEPS = {Tier.QUICK: 8, Tier.DEEP: 200, Tier.SOAK: 200}
_ALWAYS = ("fp32", "bf16")
_NARROW = "fp16"  # from the deep tier on, in the small size: not every device has it, and a CPU takes minutes for large
_STRUCK = 1  # the repeat in which an injected fault strikes
_CURVE_POINTS = 11


@dataclass(frozen=True)
class Params:
    dtypes: tuple[str, ...] = ()
    """Of: fp32, bf16, fp16; empty: fp32 and bf16, and from the deep tier on fp16 where the device has it."""
    repeats: int | None = None
    """How often the step is done over; None: 3 in the quick tier, 20 in deep, 1000 in soak."""
    parity_steps: int | None = None
    """Steps whose loss is held against the reference; None: 8 in the quick tier, 200 in deep and soak; 0: none."""
    timed: int = 5
    """Timed steps."""
    large: bool = True
    """Whether the deep tier and soak take the large model; the small one fits in the cache of a core."""
    left_out: tuple[str, ...] = ()
    """Places whose bits this device does not repeat (a back end without a deterministic kernel): not digested."""


@check(tier="quick", interval_seconds=3600, timeout_seconds=600, scope="device", judge=judge_steps)
def train_step(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    A training step of a small transformer is the same each time and on each device of a kind, is right, and is fast.

    Reads:   the device, by a step of a decoder-only transformer on fixed text: embedding, attention, norms, GELU, cross
             entropy, their gradients, AdamW; in fp32 and bf16, from the deep tier on also in fp16, and larger. The
             output of each operation, each gradient and each parameter after the step is digested.
    Judges:  fail SilentCorruption (a repeat differs, or the device is a minority of three or more of one key; the first
             layer and operation that differ are named) | fail DigestMismatch (devices differ and no majority tells
             which) | fail WrongResult (the first layer and operation that are further from float64 than rounding
             explains) | fail ParityLost (the loss leaves that of the reference) | fail SlowDevice
             (`train_step_steps_per_second`, `_tokens_per_second` and `_seconds`, for one model `.../bf16-large`; in
             deep `train_step_flops_per_second`, which is learned and compared between peers) | skip NotApplicable (fp16
             on a device that lacks it) | pass with the repeats, the peers, the errors and the times.
    Cost:    quick: under 1 s on one core, after the import of torch. Deep: a minute or two on two cores.
    Source:  own. The bound of the errors is derived in checks/training/reference.py (Higham and Mary, 2019). That
             training finds what single operations do not: SDCHunter (OSDI 2026).
    Unverified: GPUs and Neuron devices, and a device that really corrupts. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("train_step needs a device; run it in a device's worker")
    for dtype in ctx.params.dtypes:
        if dtype not in FORMATS:
            raise ValueError(f"parameter 'dtypes': no such dtype {dtype!r}; known are {', '.join(FORMATS)}")
    _check_places(ctx.params.left_out)
    deep = ctx.tier.rank >= Tier.DEEP.rank
    for dtype in ctx.params.dtypes or _ALWAYS:
        size = LARGE if deep and ctx.params.large and dtype != _NARROW else SMALL
        yield from _probe(ctx, device, FORMATS[dtype], size)
    if deep and not ctx.params.dtypes:
        if _NARROW in getattr(device, "narrow_sums", ()):
            text = f"no {_NARROW} step on this device: its sums are not kept in fp32, so no bound holds"
            yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target=device.target)
        else:
            yield from _probe(ctx, device, FORMATS[_NARROW], SMALL)


def _check_places(names: Sequence[str]) -> None:
    known = list(all_places())
    for name in names:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"parameter 'left_out': no such place: {name!r}; did you mean {near!r}?")


def _probe(ctx: Context[Params], device: Device, form: Format, size: Size) -> Iterator[Finding | Evidence]:
    """All that is asked of the steps of one dtype."""
    torch, deep = device.torch, ctx.tier.rank >= Tier.DEEP.rank
    parameters, batch = make_parameters(torch, size), make_batch(torch, size, 0)
    state, there = first_state(torch, parameters, form.wide, device.torch_device), on_device(device, batch)
    repeated, first = _repeat(ctx, device, form, size, state, there)
    yield from repeated.findings(device, form)
    yield _right(device, form, size, parameters, batch, first)
    yield from _speed(ctx, device, form, size, state, there)
    steps = ctx.params.parity_steps if ctx.params.parity_steps is not None else _PARITY_STEPS.get(ctx.tier, 8)
    digests = dict(repeated.common)
    if steps and (deep or form is FORMATS["fp32"]):
        finding, last = _parity(ctx, device, form, steps)
        yield finding
        digests[f"{AFTER}/{steps}"] = last
    threads = f" | {torch.get_num_threads()} threads" if str(device.torch_device) == "cpu" else ""
    yield Evidence(
        target=device.target,
        key=f"{device.key}{threads} | {form.name} | {size}",
        data={
            "dtype": form.name,
            "digests": digests,
            "repeats": repeated.count,
            "stable": not repeated.different,
            "left_out": list(ctx.params.left_out),
        },
    )


@dataclass
class _Repeats:
    """The digests of repeats: the most frequent ones, and for each repeat that differs its number and digests."""

    common: Mapping[str, str]
    count: int
    different: list[tuple[int, Mapping[str, str]]]

    def findings(self, device: Device, form: Format) -> Iterator[Finding]:
        """One finding where repeats differ."""
        if not self.different:
            return
        number, digests = self.different[0]
        place, _ = first_difference(self.common, digests)
        text = (
            f"{form.name} step repeated {self.count} times from one state: {place} has other bits in repeat "
            f"{number + 1} ({len(self.different)} of {self.count} differ)"
        )
        yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)


def _repeat(
    ctx: Context[Params], device: Device, form: Format, size: Size, state: State, batch: Any
) -> tuple[_Repeats, Step]:
    """Do the same step over and over; its digests, and the first one with its tensors."""
    torch, digester = device.torch, Digester(device)
    wanted = ctx.params.repeats if ctx.params.repeats is not None else _REPEATS.get(ctx.tier, 3)
    faults: Mapping[str, float | None] = getattr(device, "places", {})
    tables: list[Mapping[str, str]] = []
    first: Step | None = None
    for number in range(max(2, wanted)):
        change = corrupting(torch, faults) if faults and number == _STRUCK else None
        look = None if first is None else digester.look
        done = run_step(torch, size, form, state, batch, look=look, change=change)
        device.synchronize()
        kept = {name: value for name, value in done.places.items() if name not in ctx.params.left_out}
        if first is None:
            first, kept = done, {name: digester.look(value) for name, value in kept.items()}
        tables.append(digester.finish(kept))
    assert first is not None
    common = Counter(tuple(table.items()) for table in tables).most_common(1)[0][0]
    different = [(number, table) for number, table in enumerate(tables) if tuple(table.items()) != common]
    return _Repeats(dict(common), len(tables), different), first


def _right(device: Device, form: Format, size: Size, parameters: Any, batch: Any, first: Step) -> Finding:
    """The first repeat against float64, place by place."""
    torch = device.torch
    reference = reference_step(torch, size, form, parameters, batch)
    errors = errors_of(torch, size, form, parameters, first.places, device.read, reference)
    worst = max(errors, key=lambda error: error.share)
    finding = within(
        worst.share,
        name="train_step_error_ratio",
        target=device.target,
        limit=Limit(lower=None, upper=1.0, origin="derived"),
        reason="WrongResult",
        subject=f"{form.name} step right in {len(errors)} places; of the error that rounding explains, at most",
        labels={"dtype": form.name},
    )
    if finding.status is Status.PASS:
        return finding
    wrong = next(error for error in errors if error.share > 1.0)
    text = (
        f"{form.name} step is wrong from {describe(wrong.place)} on: off by {wrong.error:.3g} of its largest element, "
        f"rounding explains {wrong.bound:.3g}; {sum(e.share > 1.0 for e in errors)} of {len(errors)} places are wrong"
    )
    return dataclasses.replace(finding, message=text)


def _speed(
    ctx: Context[Params], device: Device, form: Format, size: Size, state: State, batch: Any
) -> Iterator[Finding]:
    """Steps and tokens per second, and how long the median and the longest step took."""
    kept: list[
        Step
    ] = []  # what a step gave has to be wanted until it is done, as in the repeats: else it is other work

    def operation() -> None:
        kept[:] = [run_step(device.torch, size, form, state, batch)]

    seconds = sorted(device.measure(operation, repeats=max(1, ctx.params.timed), warmup=1))
    middle = median(seconds)
    model = f"{form.name}-{'large' if size == LARGE else 'small'}"

    def judge(name: str, value: float, subject: str, label: str, labels: Mapping[str, str]) -> Finding:
        limit = labelled_limit(ctx, name, label, device.target)
        return within(
            value, name=name, target=device.target, limit=limit, reason="SlowDevice", subject=subject, labels=labels
        )

    labels, rate = {"model": model}, per_second(1, middle)
    tokens = size.batch * size.tokens
    judged = [
        judge("train_step_steps_per_second", rate, f"{form.name} steps per second ({size})", model, labels),
        judge("train_step_tokens_per_second", tokens * rate, f"{form.name} tokens per second", model, labels),
    ]
    for quantile, value in (("0.5", middle), ("1", seconds[-1])):
        said = f"{form.name} step, quantile {quantile} of {len(seconds)},"
        judged.append(judge("train_step_seconds", value, said, model, {**labels, "quantile": quantile}))
    if size == LARGE:  # alone is it long enough to say something of the device: limits are learned of this one
        name, flops = "train_step_flops_per_second", flops_of(size) * rate
        judged.append(judge(name, flops, f"{form.name} step, achieved", form.name, {"dtype": form.name}))
    # One line while all is well; each number that is not has one of its own.
    slow = [one for one in judged if one.status is not Status.PASS]
    everything = tuple(measured for one in judged for measured in one.measurements)
    yield from slow or [dataclasses.replace(judged[0], measurements=everything)]


def _parity(ctx: Context[Params], device: Device, form: Format, steps: int) -> tuple[Finding, str]:
    """The loss of many steps beside that of the host, and the digest of the parameters at the end."""
    done = run_parity(device, SMALL, form, steps)
    exact = form is FORMATS["fp32"]
    step, worst = done.worst
    name = "train_step_loss_error_ratio"
    limit = labelled_limit(ctx, name, form.name, device.target)
    if limit is NO_LIMIT:
        limit = Limit(lower=None, upper=EXACT_RATIO if exact else WIDE_RATIO, origin="default")
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
    return finding, _join(ends)


def _point(form: Format, loss: float, step: int) -> Measurement:
    """One point of the curve of the loss, which is kept as evidence and not judged."""
    labels = {"dtype": form.name, "step": str(step)}
    return Measurement(name="train_step_loss", value=loss, lower=None, upper=None, origin="none", labels=labels)


def _join(digests: Mapping[str, str]) -> str:
    """One digest of several."""
    import hashlib

    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16]
