"""
The names of a step's places: every value that an operation of a layer gives, in forward, backward and optimizer.

Pure and without torch, because an injected fault names a place and is parsed where torch is not.

    block1.gelu                what the operation gives, forward
    block1.gelu_grad           the gradient with respect to that
    block1.up_weight_grad      the gradient of a parameter
    block1.up_weight_reduced   its mean over all ranks, where ranks train together
    block1.up_weight_update    the parameter after the optimizer's step
"""

from __future__ import annotations

from collections.abc import Iterator

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


def layers() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Each layer with its operations and its parameters, in the order of the forward pass."""
    found: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [("embed", EMBEDDING, _PARAMETERS["embed"])]
    found += [(f"block{index}", BLOCK, _PARAMETERS["block"]) for index in range(BLOCKS)]
    return [*found, ("head", HEAD, _PARAMETERS["head"])]


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


def phase_of(place: str) -> str:
    """Forward, backward, reduction or optimizer."""
    if place.endswith("_update"):
        return OPTIMIZER
    if place.endswith("_reduced"):
        return REDUCTION
    return BACKWARD if place.endswith("_grad") else FORWARD


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
