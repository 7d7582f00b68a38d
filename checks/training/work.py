"""
What a device is asked to do over and over: a step of the built-in model in one dtype, or the step of a user.

Also here:

- loss parity: the loss of many steps on the bundled text, on a device and on the host in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from checks.contract import Device
from checks.training.digests import digest_on_host, join
from checks.training.model import FORMATS, Format, Size, flops_of, make_batch, make_parameters, reference_format
from checks.training.reference import Error, errors_of, longest_sum, reference_step
from checks.training.step import Change, Look, State, Step, first_state, run_step

STEP_REVISION = 2
"""Of the step's arithmetic, data and places: raise it with each change that gives a healthy device other bits."""

SMALL = Size(width=64, heads=4, tokens=32, batch=2)
LARGE = Size(width=512, heads=4, tokens=128, batch=4)

# Of fp32: on a CPU 8e-7 in 200 steps, and the weights of one layer times 1.01 make 2.5e-4 or more. Of the others: the
# 0.1 % that people ask of a port to another device. Of fp8: rounding to four bits is no error of a device, and on a CPU
# it moves the mean by 4e-4 in 200 steps and by 6e-4 in 40; five times that.
EXACT_RATIO, WIDE_RATIO, FP8_RATIO = 1e-4, 1e-3, 3e-3


class Work(Protocol):
    """A training step on a device, always from the same state."""

    name: str
    """In messages: `bf16 step`."""

    label: str
    """Of its measurements, and in the names of its limits."""

    key: str
    """What digests depend on beside the device."""

    start: str
    """Digest of its parameters and its batch. Parameters by chance differ between processors: torch draws them with the
    widest instructions that there are."""

    tokens: int | None
    """In a batch; None: its elements are no tokens."""

    flops: float | None
    """Floating-point operations of a step; None: not known, or too few to say something of the device."""

    def run(self, *, look: Look | None = None, change: Change | None = None) -> Step:
        """Do it once; what is given to the device may not be done yet."""

    def errors(self, step: Step) -> Sequence[Error]:
        """How far a step is from float64 on the host; empty where there is no reference."""


def built_in(device: Device, dtype: str, *, large: bool) -> BuiltIn:
    """The step of a dtype of `FORMATS`."""
    return BuiltIn(device, FORMATS[dtype], LARGE if large else SMALL)


@dataclass
class BuiltIn:
    """A step of the built-in transformer. See `Work`."""

    device: Device
    form: Format
    size: Size

    def __post_init__(self) -> None:
        torch = self.device.torch
        large = self.size == LARGE
        self.name = f"{self.form.name} step"
        self.label = f"{self.form.name}-{'large' if large else 'small'}"
        self.key = f"{self.form.name} | {self.size}"
        self.tokens: int | None = self.size.batch * self.size.tokens
        self.flops = flops_of(self.size) if large else None
        self._parameters = make_parameters(torch, self.size)
        self._batch = make_batch(torch, self.size, 0)
        tokens, following = self._batch
        start = {**self._parameters, "tokens": tokens, "following": following}
        self.start = join(digest_on_host(torch, start).values())
        self._there = on_device(self.device, self._batch)
        self._state: State = first_state(torch, self._parameters, self.form.wide, self.device.torch_device)

    def run(self, *, look: Look | None = None, change: Change | None = None) -> Step:
        """See `Work.run`."""
        torch = self.device.torch
        return run_step(torch, self.size, self.form, self._state, self._there, look=look, change=change)

    def errors(self, step: Step) -> Sequence[Error]:
        """See `Work.errors`."""
        torch = self.device.torch
        places = {name: self.device.read(tensor) for name, tensor in step.places.items()}
        return errors_of(
            torch,
            self._parameters,
            places,
            reference_step(torch, self.size, self.form, self._parameters, self._batch, places),
            read=lambda tensor: tensor,
            scale=self.form.loss_scale,
            roundoff=self.form.roundoff,
            longest=longest_sum(self.size),
        )


def parity_limit(form: Format) -> float:
    """The largest relative difference of the loss: of a step in fp32, of the mean in other formats."""
    if form.products is not None:
        return FP8_RATIO
    return EXACT_RATIO if form.roundoff == FORMATS["fp32"].roundoff else WIDE_RATIO


def run_parity(
    device: Device, size: Size, form: Format, steps: int, scales: Mapping[str, float] | None = None
) -> Parity:
    """
    Train from the same parameters on the same text, on the device and on the host.

    `scales` are factors of parameters on the device alone: a fault, for a drill.
    """
    torch = device.torch
    parameters = make_parameters(torch, size)
    own = {name: tensor * (scales or {}).get(name, 1.0) for name, tensor in parameters.items()}
    state, losses = first_state(torch, own, form.wide, device.torch_device), []
    for step in range(steps):
        batch = on_device(device, make_batch(torch, size, step))
        done = run_step(torch, size, form, state, batch)
        device.synchronize()
        state = done.state
        losses.append(float(device.read(done.loss)))
    return Parity(losses=losses, expected=_expected(torch, size, form, parameters, steps), state=state)


def on_device(device: Device, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """A batch, moved there."""
    tokens, following = batch
    return tokens.to(device.torch_device), following.to(device.torch_device)


@dataclass(frozen=True)
class Parity:
    """The curves of both, the largest relative difference of a step, and that of the means."""

    losses: Sequence[float]
    expected: Sequence[float]
    state: State

    @property
    def worst(self) -> tuple[int, float]:
        """The step with the largest relative difference, from 0, and the difference."""
        found = [abs(a - b) / b for a, b in zip(self.losses, self.expected, strict=True)]
        wrong = [index for index, value in enumerate(found) if value != value]
        index = wrong[0] if wrong else max(range(len(found)), key=found.__getitem__)
        return index, found[index]

    @property
    def mean(self) -> float:
        """The relative difference of the mean losses."""
        return abs(sum(self.losses) - sum(self.expected)) / sum(self.expected)


def _expected(torch: Any, size: Size, form: Format, parameters: Any, steps: int) -> list[float]:
    exact = reference_format(form)
    state = first_state(torch, parameters, exact.wide, "cpu")
    losses = []
    for step in range(steps):
        done = run_step(torch, size, exact, state, make_batch(torch, size, step), look=lambda _: None)
        state = done.state
        losses.append(float(done.loss))
    return losses
