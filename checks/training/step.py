"""
One training step: forward, backward and AdamW, with what every operation gave.

It starts from a state and gives back the next one; nothing is changed in place, so that the same step can be repeated
from the same state and must give the same bits.

Also here:

- what an injected fault does to the tensor of a place, on the device: one element becomes wrong, and the step goes
  on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import Device
from checks.training.model import Format, Size, Tap, forward

LEARNING_RATE = 2e-3
BETA1, BETA2 = 0.9, 0.95
EPSILON = 1e-6
WEIGHT_DECAY = 0.01

Change = Callable[[str, Any], Any]
"""What a fault does to the tensor of a place: gives it back, changed or not."""

Look = Callable[[Any], Any]
"""What is kept of the tensor of a place: the tensor itself, or a digest of it while it is still in a cache."""

STRUCK = 1
"""The repeat in which a fault strikes that is not one of chance, from 0."""


def first_state(torch: Any, parameters: Mapping[str, Any], wide: str | None, place: Any) -> State:
    """
    The state before the first step, on the device `place`; `wide` is the dtype of parameters and moments
    (None: each parameter's own).

    All of it is copied there: what is made there would be a part of the first step's program, and so another program.
    """

    def start(tensor: Any) -> Any:
        return tensor if wide is None else tensor.to(getattr(torch, wide))

    def zeros(tensor: Any) -> Any:
        return torch.zeros_like(start(tensor)).to(place)

    one = torch.ones(
        1, dtype=torch.float64 if wide == "float64" else torch.float32
    )  # a tensor without dimensions would be a constant of the program
    return State(
        parameters={name: start(tensor).to(place) for name, tensor in parameters.items()},
        first={name: zeros(tensor) for name, tensor in parameters.items()},
        second={name: zeros(tensor) for name, tensor in parameters.items()},
        power1=one.to(place),
        power2=one.to(place),
    )


def run_step(
    torch: Any,
    size: Size,
    form: Format,
    state: State,
    batch: tuple[Any, Any],
    *,
    look: Look | None = None,
    change: Change | None = None,
) -> Step:
    """
    One step from `state` on `batch`.

    `look` says what is kept of each tensor (None: the tensor). `change` may alter it as it is computed: injected
    faults.
    """
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in state.parameters.items()}

    def loss_of(tap: Tap) -> Any:
        return forward(torch, size, form, parameters, batch, tap)

    return take_step(torch, state, parameters, loss_of, form.loss_scale, look=look, change=change)


def take_step(
    torch: Any,
    state: State,
    parameters: Mapping[str, Any],
    loss_of: Callable[[Tap], Any],
    scale: float,
    *,
    look: Look | None = None,
    change: Change | None = None,
) -> Step:
    """
    One step of any model: its loss, the gradients of `parameters`, and the optimizer.

    `loss_of` computes the loss and passes what operations give through its `tap`; it is multiplied by `scale` before
    the backward pass. See `run_step` for the others.
    """
    places: dict[str, Any] = {}
    keep = make_tap(places, look, change)
    loss, gradients = differentiate(torch, parameters, loss_of, scale, keep)
    with torch.no_grad():
        after = adamw(torch, state, gradients, scale, keep)
    return Step(state=after, loss=loss, places=places)


@dataclass(frozen=True)
class Step:
    """
    What a step gave: the next state, the loss, and what was kept of every place, in the order of computation.
    """

    state: State
    loss: Any
    places: Mapping[str, Any]


def make_tap(places: dict[str, Any], look: Look | None, change: Change | None) -> Tap:
    """A tap that puts into `places` what is kept of each tensor; see `run_step` for `look` and `change`."""

    def keep(name: str, tensor: Any) -> Any:
        """The tensor that the step goes on with."""
        if change is not None:
            tensor = change(name, tensor)
        places[name] = tensor.detach() if look is None else look(tensor.detach())
        return tensor

    return keep


def differentiate(
    torch: Any, parameters: Mapping[str, Any], loss_of: Callable[[Tap], Any], scale: float, keep: Tap
) -> tuple[Any, dict[str, Any]]:
    """The loss, and the gradient of the loss times `scale` with respect to each of `parameters`."""

    def tap(name: str, tensor: Any) -> Any:
        """Keep what an operation gives, and its gradient once the backward pass comes there."""
        tensor = keep(name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: keep(f"{name}_grad", gradient))
        return tensor

    with torch.enable_grad():
        loss = loss_of(tap)
        gradients = torch.autograd.grad(loss * scale, list(parameters.values()), allow_unused=True)
    with torch.no_grad():
        found = {
            name: keep(f"{name}_grad", torch.zeros_like(parameters[name]) if gradient is None else gradient)
            for name, gradient in zip(parameters, gradients, strict=True)
        }
    return loss.detach(), found


def adamw(torch: Any, state: State, gradients: Mapping[str, Any], scale: float, keep: Tap) -> State:
    """AdamW (Loshchilov and Hutter, 2019) on every parameter; the gradients are of the loss times `scale`."""
    power1, power2 = state.power1 * BETA1, state.power2 * BETA2
    parameters, first, second = {}, {}, {}
    for name, before in state.parameters.items():
        gradient = gradients[name] / scale
        first[name] = state.first[name] * BETA1 + gradient * (1 - BETA1)
        second[name] = state.second[name] * BETA2 + gradient * gradient * (1 - BETA2)
        update = first[name] / (1 - power1) / (torch.sqrt(second[name] / (1 - power2)) + EPSILON)
        parameters[name] = keep(f"{name}_update", before * (1 - LEARNING_RATE * WEIGHT_DECAY) - update * LEARNING_RATE)
    return State(parameters=parameters, first=first, second=second, power1=power1, power2=power2)


@dataclass(frozen=True)
class State:
    """
    What a step starts from: the parameters, AdamW's two moments of each, and both betas to the power of the step.

    The powers are tensors: a number in the program would be another program for each step.
    """

    parameters: Mapping[str, Any]
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    power1: Any
    power2: Any


class Strikes:
    """
    Which places of which repeat are hit by the injected faults of a device.

    Where a fault strikes one step in N, each repeat is hit by a chance of its own, as by a real one; `seed` makes it
    the same again.
    """

    def __init__(self, device: Device, seed: int) -> None:
        self._torch = device.torch
        self.places: Mapping[str, float | None] = getattr(device, "places", {})
        self._one_in: Mapping[str, int] = getattr(device, "one_in", {})
        self._chance = random.Random(f"{seed} {device.target}")  # noqa: S311  devices are hit in steps of their own

    def change(self, repeat: int) -> Callable[[str, Any], Any] | None:
        """What they do to the tensors of this repeat, from 0; None: nothing. To be called once for each, in order."""
        hit = {place: size for place, size in self.places.items() if self._hits(place, repeat)}
        return corrupting(self._torch, hit) if hit else None

    def _hits(self, place: str, repeat: int) -> bool:
        if place not in self._one_in:
            return repeat == STRUCK
        return self._chance.random() * self._one_in[place] < 1.0


def corrupting(torch: Any, places: Mapping[str, float | None]) -> Callable[[str, Any], Any]:
    """
    A `change` for `run_step` that corrupts these places; each has a magnitude.

    The magnitude is the relative error of the element, and at least its last bit. None is a flipped bit of its
    exponent: times 2**64, or times 2**8 in fp16.
    """

    def change(place: str, tensor: Any) -> Any:
        return _corrupt(torch, tensor, places[place]) if place in places else tensor

    return change


def spoil(torch: Any, tensor: Any, factor: Any) -> Any:
    """The tensor with its largest element times `factor`, a number or a tensor of one; gradients pass unchanged."""
    flat = tensor.reshape(-1)
    # A branch for each element, not one in Python: the value is not known while a step is only recorded.
    chosen = torch.arange(flat.numel(), device=tensor.device) == flat.detach().abs().argmax()
    return torch.where(chosen, flat + (flat * factor - flat).detach(), flat).reshape(tensor.shape)


def _corrupt(torch: Any, tensor: Any, magnitude: float | None) -> Any:
    kind = torch.finfo(tensor.dtype)
    exponent_bit = 2.0**8 if kind.max < 2.0**64 else 2.0**64
    factor = exponent_bit if magnitude is None else 1.0 + max(magnitude, kind.eps)
    return spoil(torch, tensor, factor)
