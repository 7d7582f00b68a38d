"""
What one rank computes in data-parallel steps: the gradients of its own part of the batch, and the parameters after it.

Nothing is judged against other ranks here. What the rank can see alone it says as its own fault: gradients that differ
between two computations, or that are further from float64 than rounding explains.

Also here:

- what a rank tells of its steps, in few bytes: a node has up to 64 ranks, and all of them report at once.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from checks.contract import Device, Group
from checks.training.digests import Digester, join
from checks.training.digests import first_difference as first_different_place
from checks.training.model import FORMATS, OPTIMIZER, REDUCTION, Size, describe, forward, make_batch, make_parameters
from checks.training.probing import check_places
from checks.training.reference import errors_of, longest_sum, reference_step
from checks.training.step import State, Strikes, adamw, differentiate, first_state, make_tap
from checks.training.work import on_device

ENDS: Mapping[str, str] = {REDUCTION: "_reduced", OPTIMIZER: "_update"}
"""What ranks must share, and how its places end."""

MOST_MESSAGE = 400
"""Characters of what a rank saw in itself."""

_ROOT, _SHORT = 11, 3  # characters
_DIGITS = 8  # of sums, relative to the sum of absolute values; rounding in fp32 explains more

FORM = FORMATS["fp32"]  # reduced as they are computed: in a narrower format the order of summation would matter


def is_digests_text(text: object, count: int) -> bool:
    """Whether it is one of so many digests."""
    return isinstance(text, str) and len(text) == _ROOT + _SHORT * count and text.isascii()


def first_difference(one: str, other: str, places: str, phase: str) -> str | None:
    """The first place at which two texts differ; None: their roots alone do."""
    for index, name in enumerate(names_of(places)):
        begin = _ROOT + _SHORT * index
        if one[begin : begin + _SHORT] != other[begin : begin + _SHORT]:
            return name + ENDS[phase]
    return None


def names_of(text: str) -> list[str]:
    """What `names_text` was given."""
    found: list[str] = []
    layer = ""
    for word in text.split():
        if word.endswith(":"):
            layer = word[:-1]
        else:
            found.append(f"{layer}.{word}" if layer else word)
    return found


class Shard:
    """
    The work of one rank: for each step `compute`, `reduce`, `update`; at the end `told` says what came of it.

    All ranks start from the same parameters; the batch of a rank is that of its number.
    """

    def __init__(self, device: Device, group: Group, size: Size) -> None:
        torch = device.torch
        self._device, self._group, self._size = device, group, size
        self._digester = Digester(device)
        self._start = make_parameters(torch, size)
        self._state: State = first_state(torch, self._start, FORM.wide, device.torch_device)
        self._strikes = Strikes(device, group.rank)
        self._change: Callable[[str, Any], Any] | None = None
        self._number = 0
        self._gradients: dict[str, Any] = {}
        self.flat: Any = None
        """The gradients of all parameters in one buffer, summed over the ranks by `reduce`  # [elements] fp32."""
        self._sums: dict[str, tuple[float, float]] = {}
        self._digests: dict[str, list[str]] = {phase: [] for phase in ENDS}
        self._layers: dict[str, list[list[float | None]]] = {}
        self._faults: list[dict[str, Any]] = []
        self.key = f"{device.key} | {FORM.name} | {size}"
        """Parameters are compared with ranks of the same key alone: others may round differently."""
        self.gradient_bytes = sum(4 * tensor.numel() for tensor in self._start.values())

    def compute(self, number: int) -> None:
        """The gradients of step `number`, from 0, computed twice and in the first step held against float64."""
        device, torch = self._device, self._device.torch
        batch = make_batch(torch, self._size, number * self._group.size + self._group.rank)
        there = on_device(device, batch)
        first, _ = self._differentiate(there, exact=number == 0)
        if number == 0:
            self._hold_against_reference(batch, first)
            first = {place: self._digester.look(tensor) for place, tensor in first.items()}
            known = [*first, *(f"{name}{end}" for name in self._start for end in ("_reduced", "_update"))]
            check_places(self._strikes.places, known)
        self._change = self._strikes.change(number)
        again, self._gradients = self._differentiate(there, strikes=True)
        one, other = self._digester.finish(first), self._digester.finish(again)
        if one != other:
            place, _ = first_different_place(one, other)
            text = f"gradients computed twice from the same state differ: first at {place}"
            self._fault("SilentCorruption", number, text)
        self._number = number
        self.flat = self._joined(self._gradients)
        self._sums = dict(self._sums_of(self.flat))

    def _differentiate(
        self, batch: tuple[Any, Any], *, exact: bool = False, strikes: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is kept of each place, and the gradients. `exact`: the tensors themselves; `strikes`: a fault may."""
        torch = self._device.torch
        parameters = {name: tensor.detach().requires_grad_() for name, tensor in self._state.parameters.items()}
        places: dict[str, Any] = {}
        keep = make_tap(places, None if exact else self._digester.look, self._change if strikes else None)

        def loss_of(tap: Any) -> Any:
            return forward(torch, self._size, FORM, parameters, batch, tap)

        _, gradients = differentiate(torch, parameters, loss_of, FORM.loss_scale, keep)
        self._device.synchronize()
        return places, gradients

    def _hold_against_reference(self, batch: tuple[Any, Any], places: Mapping[str, Any]) -> None:
        torch = self._device.torch
        errors = errors_of(
            torch,
            self._start,
            places,
            reference_step(torch, self._size, FORM, self._start, batch, places),
            read=self._device.read,
            scale=FORM.loss_scale,
            roundoff=FORM.roundoff,
            longest=longest_sum(self._size),
        )
        wrong = next((error for error in errors if error.share > 1.0), None)
        if wrong is not None:
            text = (
                f"wrong from {describe(wrong.place)} on: off by {wrong.error:.3g} of its largest element; rounding "
                f"explains {wrong.bound:.3g}"
            )
            self._fault("WrongResult", 0, text)

    def reduce(self, distributed: Any) -> None:
        """Sum the gradients of all ranks, on each of them. Raises RuntimeError where the group is broken."""
        distributed.all_reduce(self.flat)

    def update(self) -> None:
        """The parameters after the step, and the digests that all ranks must share."""
        torch, places = self._device.torch, dict[str, Any]()
        keep = make_tap(places, self._digester.look, self._change)
        mean, begin, reduced = self.flat / self._group.size, 0, {}
        for name, gradient in self._gradients.items():
            end = begin + gradient.numel()
            reduced[name] = keep(f"{name}_reduced", mean[begin:end].reshape(gradient.shape))
            begin = end
        with torch.no_grad():
            self._state = adamw(torch, self._state, reduced, FORM.loss_scale, keep)
        self._device.synchronize()
        digests = self._digester.finish(places)
        for phase, end in ENDS.items():
            self._digests[phase].append(digests_text([digests[f"{name}{end}"] for name in self._start]))
        for layer, (whole, _) in self._sums_of(self._joined(reduced)):
            self._layers.setdefault(layer, []).append(rounded(*self._sums[layer], whole))

    def _joined(self, tensors: Mapping[str, Any]) -> Any:
        """One buffer, as in a bucket of gradients  # [elements] fp32."""
        return self._device.torch.cat([tensor.reshape(-1) for tensor in tensors.values()])

    def _sums_of(self, flat: Any) -> Iterator[tuple[str, tuple[float, float]]]:
        """Of each layer: the sum of its gradients and that of their absolute values, in float64."""
        exact, begin = self._device.read(flat).double(), 0
        layers: dict[str, int] = {}
        for name, tensor in self._start.items():
            layer = name.partition(".")[0]
            layers[layer] = layers.get(layer, 0) + tensor.numel()
        for layer, count in layers.items():
            part = exact[begin : begin + count]
            yield layer, (float(part.sum()), float(part.abs().sum()))
            begin += count

    def _fault(self, reason: str, number: int, text: str) -> None:
        self._faults.append({"reason": reason, "step": number, "message": text[:MOST_MESSAGE]})

    def told(self) -> dict[str, Any]:
        """
        For the comparison of ranks.

        `places`: the names of the parameters; `digests`: of reduced gradients and of parameters, a text of each step
        (see `told`); `sums`: layer -> for each step the sum of its own gradients, that of their absolute values, and
        the sum of the reduced ones; `faults`: what the rank saw in itself, by step.
        """
        return {
            "steps": self._number + 1,
            "places": names_text(self._start),
            "digests": self._digests,
            "sums": self._layers,
            "faults": self._faults[:1],  # what follows is of the same cause
        }


def names_text(parameters: Iterable[str]) -> str:
    """The names of parameters, the layer before its first one: `head: norm_weight logits_weight`."""
    words: list[str] = []
    before = None
    for name in parameters:
        layer, _, own = name.rpartition(".")
        if layer != before:
            words.append(f"{layer}:")
            before = layer
        words.append(own)
    return " ".join(words)


def digests_text(digests: Sequence[str]) -> str:
    """Of digests of 16 hexadecimal digits."""
    return _base64(join(digests))[:_ROOT] + "".join(_base64(one)[:_SHORT] for one in digests)


def rounded(contributed: Any, size: Any, reduced: Any) -> list[float | None]:
    """
    The sum of a layer's own gradients, that of their absolute values, and the sum of the reduced ones, without the
    digits that say nothing; None where it is no number.
    """
    own, most, mean = (_number(value) for value in (contributed, size, reduced))
    places = 12 if not most else min(_DIGITS - math.floor(math.log10(most)), 300)
    return [
        None if own is None else round(own, places),
        None if most is None else float(f"{most:.4g}"),
        None if mean is None else round(mean, places),
    ]


@contextmanager
def one_thread(device: Device) -> Iterator[None]:
    """
    On a CPU, compute in one thread: what is computed then depends on no number of cores.

    Threads that wait for each other take seconds for milliseconds of work where other processes want the cores too.
    """
    if str(device.torch_device) != "cpu":
        yield
        return
    before = device.torch.get_num_threads()
    device.torch.set_num_threads(1)
    try:
        yield
    finally:
        device.torch.set_num_threads(before)


def _base64(digest: str) -> str:
    return binascii.b2a_base64(bytes.fromhex(digest), newline=False).decode()


def _number(value: Any) -> float | None:
    number = float("nan") if value is None else float(value)
    return number if math.isfinite(number) else None
