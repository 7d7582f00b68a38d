"""
What an injected fault does to the tensor of a place, on the device: one element becomes wrong, and the step goes on.

It is the element of the largest absolute value, so that zeros, which no factor changes, are not hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


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
