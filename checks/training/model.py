"""
The model of the training step: a decoder-only transformer, its parameters, its data and its forward pass.

Everything is explicit functions of tensors, so that what each operation gives passes through `tap` and can be looked at
or changed there. All shapes are static: a device that compiles, compiles a step once.

Also here:

- products whose operands are rounded to fp8 (e4m3), with a scale for each operand: `torch._scaled_mm`;
- the names of a step's places: every value that an operation of a layer gives, in forward, backward and optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.device.probes import is_out_of_memory, is_trouble
from checks.training.text import TEXT

_SIDE = 16
"""Sides of operands that devices take are multiples of this."""

FORWARD = "forward"
BACKWARD = "backward"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"

BLOCKS = 2
"""Of every model, small or large, so that a fault's place exists in every tier."""

EMBEDDING = ("token", "position")
BLOCK = ("norm1", "qkv", "scores", "softmax", "context", "output", "add1", "norm2", "up", "gelu", "down", "add2")
HEAD = ("norm", "logits", "loss")
_PARAMETERS = {
    "embed": ("token_weight", "position_weight"),
    "block": ("norm1_weight", "qkv_weight", "output_weight", "norm2_weight", "up_weight", "down_weight"),
    "head": ("norm_weight", "logits_weight"),
}
INPUTS = {
    **{
        f"block{index}.{product}": f"block{index}.{given}"
        for index in range(BLOCKS)
        for product, given in (("qkv", "norm1"), ("output", "context"), ("up", "norm2"), ("down", "gelu"))
    },
    "head.logits": "head.norm",
}
"""The products with weights, and the place that each takes its other operand from."""

OWN = "own."
"""How the places of a step of the user's own begin (see `checks.training.own`)."""

Tap = Callable[[str, Any], Any]
"""Takes the name of a place and its tensor; the step goes on with the tensor that it gives back."""

VOCABULARY = 128  # the text is ASCII, and a token is a byte
_SEED = 20_240_229  # fixed for ever: digests are compared over devices and over time


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
        return f"torch {torch.__version__} does not support it"
    one = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16).to(place)
    try:
        _scaled(torch, one, one, dtype).to("cpu")
    except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        if is_trouble(error) or is_out_of_memory(error):
            raise
        return (str(error) or type(error).__name__).splitlines()[0][:200]
    return None


def all_places() -> Iterator[str]:
    """Every place of a step, layer by layer."""
    for layer, operations, parameters in layers():
        for operation in operations:
            yield f"{layer}.{operation}"
            yield f"{layer}.{operation}_grad"
        for parameter in parameters:
            yield f"{layer}.{parameter}_grad"
            yield f"{layer}.{parameter}_update"


def reduced_places() -> Iterator[str]:
    """The gradients that a step over several ranks has besides: those after the reduction."""
    for layer, _, parameters in layers():
        for parameter in parameters:
            yield f"{layer}.{parameter}_reduced"


def layers() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Each layer with its operations and its parameters, in the order of the forward pass."""
    found: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [("embed", EMBEDDING, _PARAMETERS["embed"])]
    found += [(f"block{index}", BLOCK, _PARAMETERS["block"]) for index in range(BLOCKS)]
    return [*found, ("head", HEAD, _PARAMETERS["head"])]


def describe(place: str) -> str:
    """A place in words: its layer, its operation and the phase."""
    layer, _, name = place.rpartition(".")  # layers of a user's model have dots in their names
    phase = phase_of(place)
    if phase == OPTIMIZER:
        return f"layer {layer}, {name.removesuffix('_update')} after the optimizer"
    if phase == REDUCTION:
        return f"layer {layer}, reduced gradient of {name.removesuffix('_reduced')}"
    if phase == BACKWARD:
        return f"layer {layer}, gradient of {name.removesuffix('_grad')}"
    return f"layer {layer}, operation {name}"


def phase_of(place: str) -> str:
    """Forward, backward, reduction or optimizer."""
    if place.endswith("_update"):
        return OPTIMIZER
    if place.endswith("_reduced"):
        return REDUCTION
    return BACKWARD if place.endswith("_grad") else FORWARD


def flops_of(size: Size) -> float:
    """
    Floating-point operations of the products of one step: forward, and twice as many backward.

    Two for each weight and token, and four for each pair of tokens, width and block in attention (Kaplan and others,
    Scaling Laws for Neural Language Models, 2020, section 2.1, counts the same).
    """
    tokens = size.batch * size.tokens
    weights = BLOCKS * 12 * size.width**2 + VOCABULARY * size.width
    attention = BLOCKS * 4 * size.batch * size.tokens**2 * size.width
    return 3.0 * (2 * tokens * weights + attention)


def reference_format(form: Format) -> Format:
    """The same step in float64, with the loss scaled as there, so that gradients can be compared."""
    return Format(form.name, "float64", "float64", 2.0**-53, form.loss_scale)


def make_parameters(torch: Any, size: Size) -> dict[str, Any]:
    """
    The parameters at the start, on the host, float32; the same on machines whose torch uses the same instructions.

    `randn` gives other last bits with AVX2 than with AVX-512, so that digests are compared only where those of the
    start agree.
    Products have the scale 1/sqrt(inputs), so that what a layer passes on neither grows nor vanishes.
    """
    generator = torch.Generator().manual_seed(_SEED)

    def normal(rows: int, columns: int, scale: float) -> Any:
        return torch.randn(rows, columns, generator=generator).mul_(scale)

    width, found = size.width, {}
    found["embed.token_weight"] = normal(VOCABULARY, width, 0.7)
    found["embed.position_weight"] = normal(size.tokens, width, 0.7)
    for index in range(BLOCKS):
        layer = f"block{index}"
        found[f"{layer}.norm1_weight"] = torch.ones(width)
        found[f"{layer}.qkv_weight"] = normal(3 * width, width, width**-0.5)
        found[f"{layer}.output_weight"] = normal(width, width, width**-0.5)
        found[f"{layer}.norm2_weight"] = torch.ones(width)
        found[f"{layer}.up_weight"] = normal(4 * width, width, width**-0.5)
        found[f"{layer}.down_weight"] = normal(width, 4 * width, (4 * width) ** -0.5)
    found["head.norm_weight"] = torch.ones(width)
    found["head.logits_weight"] = normal(VOCABULARY, width, width**-0.5)
    return found


def make_batch(torch: Any, size: Size, step: int) -> tuple[Any, Any]:
    """The tokens and the tokens that follow them, of one step  # two of [batch, tokens] int64, on the host."""
    data = torch.frombuffer(bytearray(TEXT.encode("ascii")), dtype=torch.uint8).to(torch.int64)
    length = size.tokens + 1
    # Sequences begin at multiples of a number that has no factor in common with most lengths: all of the text is seen.
    starts = [(step * size.batch + row) * 997 % (len(data) - length) for row in range(size.batch)]
    rows = torch.stack([data[start : start + length] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def forward(torch: Any, size: Size, form: Format, parameters: Mapping[str, Any], batch: Any, tap: Tap) -> Any:
    """The loss of a batch, unscaled  # [] wide."""
    functional = torch.nn.functional
    low, wide = getattr(torch, form.low), getattr(torch, form.wide)
    tokens, following = batch
    mask = torch.full((size.tokens, size.tokens), float("-inf"), dtype=wide, device=tokens.device).triu(1)

    def product(x: Any, name: str) -> Any:
        """With the weights of this name, of [outputs, inputs]."""
        weight = parameters[name].to(low)
        return x @ weight.t() if form.products is None else scaled_product(torch, x, weight, form.products)

    def norm(x: Any, name: str) -> Any:
        x = x.to(wide)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * parameters[name]).to(low)

    def heads(x: Any) -> Any:
        return x.reshape(size.batch, size.tokens, size.heads, -1).transpose(1, 2)

    x = tap("embed.token", functional.embedding(tokens, parameters["embed.token_weight"]))
    x = tap("embed.position", (x + parameters["embed.position_weight"]).to(low))
    for index in range(BLOCKS):
        at = f"block{index}"
        h = tap(f"{at}.norm1", norm(x, f"{at}.norm1_weight"))
        qkv = tap(f"{at}.qkv", product(h, f"{at}.qkv_weight"))
        q, k, v = (heads(part) for part in qkv.split(size.width, -1))
        scores = tap(f"{at}.scores", q @ k.transpose(2, 3) * (size.width // size.heads) ** -0.5)
        shares = tap(f"{at}.softmax", torch.softmax(scores.to(wide) + mask, -1).to(low))
        context = tap(f"{at}.context", (shares @ v).transpose(1, 2).reshape(size.batch, size.tokens, size.width))
        x = tap(f"{at}.add1", x + tap(f"{at}.output", product(context, f"{at}.output_weight")))
        h = tap(f"{at}.norm2", norm(x, f"{at}.norm2_weight"))
        h = tap(f"{at}.up", product(h, f"{at}.up_weight"))
        h = tap(f"{at}.gelu", functional.gelu(h.to(wide)).to(low))
        x = tap(f"{at}.add2", x + tap(f"{at}.down", product(h, f"{at}.down_weight")))
    x = tap("head.norm", norm(x, "head.norm_weight"))
    logits = tap("head.logits", product(x, "head.logits_weight"))
    loss = functional.cross_entropy(logits.to(wide).reshape(-1, VOCABULARY), following.reshape(-1))
    return tap("head.loss", loss)


def scaled_product(torch: Any, x: Any, weight: Any, dtype: str) -> Any:
    """The product x @ weight.T  # [..., outputs] bf16; of x [..., inputs] and weight [outputs, inputs], both bf16."""
    return _function(torch).apply(x, weight, dtype)


@dataclass(frozen=True)
class Size:
    """Of the model and its batch: `width` is that of a token, `tokens` the length of a sequence."""

    width: int
    heads: int
    tokens: int
    batch: int

    def __str__(self) -> str:
        """For keys and messages."""
        return f"{BLOCKS} blocks x {self.width} wide, {self.batch} x {self.tokens} tokens"


@dataclass(frozen=True)
class Format:
    """
    How a step computes: `low` for products and what layers pass on, `wide` for norms, softmax, loss and parameters.

    `roundoff` is u = 2**-p of p significant bits of `low`. The loss is multiplied by `loss_scale`, a power of two,
    before the backward pass, so that small gradients are not lost in fp16.
    """

    name: str
    low: str
    wide: str
    roundoff: float
    loss_scale: float
    products: str | None = None
    """The dtype that the operands of the products with weights are rounded to, forward; None: `low`."""


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


FORMATS: Mapping[str, Format] = {
    "fp32": Format("fp32", "float32", "float32", 2.0**-24, 1.0),
    "bf16": Format("bf16", "bfloat16", "float32", 2.0**-8, 1.0),
    "fp16": Format("fp16", "float16", "float32", 2.0**-11, 1024.0),
    "fp8": Format("fp8", "bfloat16", "float32", 2.0**-8, 1.0, products="float8_e4m3fn"),
}
