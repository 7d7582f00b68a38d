"""
What an injected fault does to the tensor of a place, on the device: one element becomes wrong, and the step goes on.

It is the element of the largest absolute value, so that zeros, which no factor changes, are not hit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from checks.contract import Device

STRUCK = 1
"""The repeat in which a fault strikes that is not one of chance, from 0."""


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


def _corrupt(torch: Any, tensor: Any, magnitude: float | None) -> Any:
    kind = torch.finfo(tensor.dtype)
    exponent_bit = 2.0**8 if kind.max < 2.0**64 else 2.0**64
    factor = exponent_bit if magnitude is None else 1.0 + max(magnitude, kind.eps)
    return spoil(torch, tensor, factor)


def spoil(torch: Any, tensor: Any, factor: Any) -> Any:
    """The tensor with its largest element times `factor`, a number or a tensor of one; gradients pass unchanged."""
    flat = tensor.reshape(-1)
    # A branch for each element, not one in Python: the value is not known while a step is only recorded.
    chosen = torch.arange(flat.numel(), device=tensor.device) == flat.detach().abs().argmax()
    return torch.where(chosen, flat + (flat * factor - flat).detach(), flat).reshape(tensor.shape)
