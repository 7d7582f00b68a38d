"""
Whether what a step gave is right: the same step in float64 on the host, and how far a device may be from it.

The bound. Each operation rounds its result to u = 2**-p of its dtype, and its sums of at most n products, kept in
float32, err by up to sqrt(n) u32; rounding errors of a chain of k operations add up like sqrt(k). Both square roots
hold with probability 1 - 2 exp(-L**2 / 2) for the factor L (N. Higham and T. Mary, A New Approach to Probabilistic
Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; worst-case bounds grow with n and k and would
let gross errors pass). L is 6: once in 3e7. Errors are taken relative to the largest element of the reference, since
norms and residual connections keep that scale from layer to layer; gradients of parameters that cancel to nothing,
relative to those of the layer's output. What was seen on CPUs stays below a fifth of it.

    |x - reference| <= 6 sqrt(k) (u + sqrt(n) u32) max|reference|

In fp8 that would be no bound at all: of sixteen steps of a number's size, rounding explains anything. So each product
whose operands are rounded to fp8 is held against the exact product of the device's own operands, rounded as it has to
round them, and the reference goes on with what the device gave. What is left is the error of `low`, and the same bound.

The optimizer is held against AdamW in float64 of the device's own gradients: where a gradient is near 0, AdamW's
update is its sign, which no bound on the gradient determines. It has sixteen roundings, so k is 16 and n 0, and u is
that of the dtype in which parameters are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.training.model import INPUTS, OPTIMIZER, VOCABULARY, Format, Size, exact_product, phase_of, reference_format
from checks.training.step import State, adamw, first_state, run_step

_FACTOR = 6.0
U_FP32 = 2.0**-24
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


def bound_of(place: str, depth: int, roundoff: float, longest: int, stored: float) -> float:
    """
    The largest relative error that rounding explains.

    `depth` counts the places computed up to this one, `roundoff` is u of the dtype, `longest` the terms of the longest
    sum, and `stored` u of the parameters.
    """
    if phase_of(place) == OPTIMIZER:
        return _FACTOR * math.sqrt(_OPTIMIZER_ROUNDINGS) * stored
    return _FACTOR * math.sqrt(depth) * (roundoff + math.sqrt(longest) * U_FP32)


def longest_sum(size: Size) -> int:
    """The terms of the longest sum in a step of the built-in model."""
    return max(4 * size.width, VOCABULARY, size.batch * size.tokens)


def reference_step(
    torch: Any, size: Size, form: Format, parameters: Mapping[str, Any], batch: Any, places: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What every place has to be, on the host in float64; `places` are those of the device, read."""
    exact, products = reference_format(form), {}

    def own(place: str, tensor: Any) -> Any:
        """Go on with the device's product, and remember what it had to be; gradients pass unchanged."""
        if form.products is None or place not in INPUTS:
            return tensor
        weight = parameters[f"{place}_weight"].to(getattr(torch, form.low))
        products[place] = exact_product(torch, places[INPUTS[place]], weight, form.products)
        return tensor + (places[place].to(torch.float64) - tensor).detach()

    done = run_step(torch, size, exact, first_state(torch, parameters, exact.wide, "cpu"), batch, change=own)
    return {**done.places, **products}


def errors_of(
    torch: Any,
    parameters: Mapping[str, Any],
    places: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    read: Callable[[Any], Any],
    scale: float,
    roundoff: float,
    longest: int,
    stored: float = U_FP32,
) -> Sequence[Error]:
    """
    The error of each place of a first step from `parameters`, in the order of computation.

    `read` brings a tensor of the device to the host; `scale` is that of the loss; see `bound_of` for the others.
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
            updated = updated or _updates(torch, parameters, gradients, scale)
            wanted = updated[name]
        else:
            wanted = reference[place]
        largest = float(wanted.abs().max())
        if name in gradients and place.endswith("_grad"):
            # Some cancel to nothing, as that of a bias before a batch norm: their terms do not.
            terms = reference.get(f"{name.rpartition('.')[0]}.output_grad")
            largest = max(largest, float(terms.abs().max())) if terms is not None else largest
        error = float((got - wanted).abs().max()) / largest if largest > 0 else float(got.abs().max())
        found.append(Error(place, error, bound_of(place, depth, roundoff, longest, stored)))
    return found


def _updates(
    torch: Any, parameters: Mapping[str, Any], gradients: Mapping[str, Any], scale: float
) -> Mapping[str, Any]:
    """AdamW's first step in float64 from these gradients."""
    state: State = first_state(torch, parameters, "float64", "cpu")
    return adamw(torch, state, gradients, scale, lambda _, tensor: tensor).parameters
