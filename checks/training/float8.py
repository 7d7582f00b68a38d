"""
Products whose operands are rounded to fp8 (e4m3), with a scale for each operand: `torch._scaled_mm`.

The scale of an operand is the power of two that brings its largest element to between 128 and 256, of 448 that the
format has. Multiplying by it rounds nothing, so that the operands of a product are the same numbers on every device.
Sums are kept in fp32, the result is rounded to bf16. The gradients are products of bf16, as if nothing had been
rounded.

Source: P. Micikevicius and others, FP8 Formats for Deep Learning (2022): e4m3 forward, a scale per tensor.
"""

from __future__ import annotations

import functools
from typing import Any

from checks.device.trouble import is_out_of_memory, is_trouble

_SIDE = 16
"""Sides of operands that devices take are multiples of this."""


def scaled_product(torch: Any, x: Any, weight: Any, dtype: str) -> Any:
    """The product x @ weight.T  # [..., outputs] bf16; of x [..., inputs] and weight [outputs, inputs], both bf16."""
    return _function(torch).apply(x, weight, dtype)


def exact_product(torch: Any, x: Any, weight: Any, dtype: str) -> Any:
    """The same of host tensors in float64, from operands that are rounded alike."""
    rounded, scale = _rounded(torch, x.reshape(-1, x.shape[-1]), dtype)
    rounded_weight, scale_weight = _rounded(torch, weight, dtype)
    product = (rounded.to(torch.float64) * scale) @ (rounded_weight.to(torch.float64) * scale_weight).t()
    return product.reshape(*x.shape[:-1], weight.shape[0])


def why_not(torch: Any, place: Any, dtype: str) -> str | None:
    """
    Why the device `place` has no such products, found out by asking for one; None where it has them.

    Raises what a device in trouble raises.
    """
    if not hasattr(torch, dtype) or not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} does not know it"
    one = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16).to(place)
    try:
        _scaled(torch, one, one, dtype).to("cpu")
    except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        if is_trouble(error) or is_out_of_memory(error):
            raise
        return (str(error) or type(error).__name__).splitlines()[0][:200]
    return None


def _rounded(torch: Any, tensor: Any, dtype: str) -> tuple[Any, Any]:
    """The tensor times a scale, rounded, and what to multiply it with again  # [] fp32."""
    kind = getattr(torch, dtype)
    wide = tensor.to(torch.float32)
    # amax = m 2**e with m in 0.5..1, so that amax 2**(top - e) is within 2**top, the largest power that the format has.
    _, exponent = torch.frexp(wide.abs().amax().clamp(min=2.0**-100))
    top = int(torch.finfo(kind).max).bit_length() - 1
    shift = top - exponent
    scaled = torch.ldexp(wide, shift)
    return scaled.to(kind), torch.ldexp(torch.ones((), dtype=torch.float32, device=tensor.device), -shift)


def _scaled(torch: Any, x: Any, weight: Any, dtype: str) -> Any:
    rounded, scale = _rounded(torch, x.reshape(-1, x.shape[-1]), dtype)
    rounded_weight, scale_weight = _rounded(torch, weight, dtype)
    product = torch._scaled_mm(
        rounded, rounded_weight.t(), scale_a=scale, scale_b=scale_weight, out_dtype=torch.bfloat16
    )
    return product.reshape(*x.shape[:-1], weight.shape[0])


@functools.cache
def _function(torch: Any) -> Any:
    class ScaledProduct(torch.autograd.Function):  # type: ignore[misc]
        """Rounded operands forward, bf16 backward."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, dtype: str) -> Any:
            ctx.save_for_backward(x, weight)
            return _scaled(torch, x, weight, dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None]:
            x, weight = ctx.saved_tensors
            flat = gradient.reshape(-1, gradient.shape[-1])
            return gradient @ weight, flat.t() @ x.reshape(-1, x.shape[-1]), None

    return ScaledProduct
