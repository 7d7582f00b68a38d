"""
The model of the training step: a decoder-only transformer, its parameters, its data and its forward pass.

Everything is explicit functions of tensors, so that what each operation gives passes through `tap` and can be looked at
or changed there. All shapes are static: a device that compiles, compiles a step once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checks.training.float8 import scaled_product
from checks.training.places import BLOCKS
from checks.training.text import TEXT

Tap = Callable[[str, Any], Any]
"""Takes the name of a place and its tensor; the step goes on with the tensor that it gives back."""

VOCABULARY = 128  # the text is ASCII, and a token is a byte
_SEED = 20_240_229  # fixed for ever: digests are compared over devices and over time


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


FORMATS: Mapping[str, Format] = {
    "fp32": Format("fp32", "float32", "float32", 2.0**-24, 1.0),
    "bf16": Format("bf16", "bfloat16", "float32", 2.0**-8, 1.0),
    "fp16": Format("fp16", "float16", "float32", 2.0**-11, 1024.0),
    "fp8": Format("fp8", "bfloat16", "float32", 2.0**-8, 1.0, products="float8_e4m3fn"),
}


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
