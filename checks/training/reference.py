"""
Whether what a step gave is right: the same step in float64 on the host, and how far a device may be from it.

The bound. Each operation rounds its result to u = 2**-p of its dtype, and its sums of at most n products, kept in
float32, err by up to sqrt(n) u32; rounding errors of a chain of k operations add up like sqrt(k). Both square roots
hold with probability 1 - 2 exp(-L**2 / 2) for the factor L (N. Higham and T. Mary, A New Approach to Probabilistic
Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; worst-case bounds grow with n and k and would
let gross errors pass). L is 6: once in 3e7. Errors are taken relative to the largest element of the reference, since
norms and residual connections keep that scale from layer to layer. What was seen on CPUs stays below a tenth of it.

    |x - reference| <= 6 sqrt(k) (u + sqrt(n) u32) max|reference|

The optimizer is held against AdamW in float64 of the device's own gradients: where a gradient is near 0, AdamW's
update is its sign, which no bound on the gradient determines. Its sixteen roundings are in float32, so k is 16 and n 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.training.model import VOCABULARY, Format, Size, reference_format
from checks.training.places import OPTIMIZER, phase_of
from checks.training.step import State, adamw, first_state, run_step

_FACTOR = 6.0
_U_FP32 = 2.0**-24
_OPTIMIZER_ROUNDINGS = 16


@dataclass(frozen=True)
class Error:
    """How far the tensor of a place is from its reference, relative to the largest element there, and may be."""

    place: str
    error: float
    bound: float

    @property
    def share(self) -> float:
        """Of the bound; above 1 is wrong. Infinite for what is no number."""
        return self.error / self.bound if math.isfinite(self.error) else math.inf


def bound_of(place: str, depth: int, size: Size, form: Format) -> float:
    """The largest relative error that rounding explains; `depth` counts the places computed up to this one."""
    if phase_of(place) == OPTIMIZER:
        return _FACTOR * math.sqrt(_OPTIMIZER_ROUNDINGS) * _U_FP32
    longest = max(4 * size.width, VOCABULARY, size.batch * size.tokens)
    return _FACTOR * math.sqrt(depth) * (form.roundoff + math.sqrt(longest) * _U_FP32)


def reference_step(
    torch: Any, size: Size, form: Format, parameters: Mapping[str, Any], batch: Any
) -> Mapping[str, Any]:
    """What every place has to be, on the host in float64."""
    exact = reference_format(form)
    return run_step(torch, size, exact, first_state(torch, parameters, exact.wide, "cpu"), batch).places


def errors_of(
    torch: Any,
    size: Size,
    form: Format,
    parameters: Mapping[str, Any],
    places: Mapping[str, Any],
    read: Callable[[Any], Any],
    reference: Mapping[str, Any],
) -> Sequence[Error]:
    """
    The error of each place of a first step from `parameters`, in the order of computation.

    `read` brings a tensor of the device to the host.
    """
    found: list[Error] = []
    gradients: dict[str, Any] = {}
    updated: Mapping[str, Any] = {}
    for depth, (place, tensor) in enumerate(places.items(), 1):
        got = read(tensor).to(torch.float64)
        name, _, _ = place.rpartition("_")
        if place.endswith("_grad") and name in parameters:
            gradients[name] = got
        if phase_of(place) == OPTIMIZER:
            updated = updated or _updates(torch, parameters, gradients, form)
            wanted = updated[name]
        else:
            wanted = reference[place]
        largest = float(wanted.abs().max())
        error = float((got - wanted).abs().max()) / largest if largest > 0 else float(got.abs().max())
        found.append(Error(place, error, bound_of(place, depth, size, form)))
    return found


def _updates(
    torch: Any, parameters: Mapping[str, Any], gradients: Mapping[str, Any], form: Format
) -> Mapping[str, Any]:
    """AdamW's first step in float64 from these gradients."""
    state: State = first_state(torch, parameters, "float64", "cpu")
    return adamw(torch, state, gradients, form.loss_scale, lambda _, tensor: tensor).parameters
