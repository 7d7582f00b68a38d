"""Loss parity: the loss of many steps on the bundled text, on a device and on the host in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Device
from checks.training.model import FORMATS, Format, Size, make_batch, make_parameters, reference_format
from checks.training.step import State, first_state, run_step
from checks.training.work import on_device

# Of fp32: on a CPU 8e-7 in 200 steps, and the weights of one layer times 1.01 make 2.5e-4 or more. Of the others: the
# 0.1 % that people ask of a port to another device. Of fp8: rounding to four bits is no error of a device, and on a CPU
# it moves the mean by 4e-4 in 200 steps and by 6e-4 in 40; five times that.
EXACT_RATIO, WIDE_RATIO, FP8_RATIO = 1e-4, 1e-3, 3e-3


def parity_limit(form: Format) -> float:
    """The largest relative difference of the loss: of a step in fp32, of the mean in other formats."""
    if form.products is not None:
        return FP8_RATIO
    return EXACT_RATIO if form.roundoff == FORMATS["fp32"].roundoff else WIDE_RATIO


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


def _expected(torch: Any, size: Size, form: Format, parameters: Any, steps: int) -> list[float]:
    exact = reference_format(form)
    state = first_state(torch, parameters, exact.wide, "cpu")
    losses = []
    for step in range(steps):
        done = run_step(torch, size, exact, state, make_batch(torch, size, step), look=lambda _: None)
        state = done.state
        losses.append(float(done.loss))
    return losses
