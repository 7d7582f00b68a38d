"""
A training step of a user's own: their model, their batch, their loss. See `checks.training.work.Work`.

`make()` takes nothing and gives back (model, batch, loss): a `torch.nn.Module` with its parameters as they are to be, a
batch of tensors (in tuples, lists and dictionaries, as deep as wanted), and a function `loss(model, batch)` that gives
a tensor of one element. Places are those of the modules, by the names of `named_modules` after `own.`: what each gives
(`own.blocks.0.output`), its gradient, and the gradients and updates of its parameters.

The step must be the same each time: no dropout, no random numbers but those of torch's generator, which is seeded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from checks.contract import Device
from checks.training.digests import digest_on_host, join
from checks.training.model import Tap
from checks.training.reference import Error, errors_of
from checks.training.step import Change, Look, State, Step, first_state, take_step

ENTRY_POINTS = "healthd.training_steps"
_SEED = 20_240_229


def own_step(device: Device, name: str) -> OwnStep:
    """The step of this name. Raises ValueError, one line, where it cannot be loaded or is no step."""
    make = find_make(name)
    device.torch.manual_seed(_SEED)
    made = make()
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[2]):
        raise ValueError(f"step {name!r} returned {type(made).__name__}; it must return (model, batch, loss)")
    model, batch, loss = made
    if not isinstance(model, device.torch.nn.Module):
        raise ValueError(f"step {name!r}: its model is {type(model).__name__}, not a torch.nn.Module")
    return OwnStep(device, name, model, batch, loss)


def find_make(name: str) -> Callable[[], Any]:
    """What makes the step: a function of a module or of a file, or an entry point. Raises ValueError with one line."""
    place, colon, function = name.rpartition(":")
    try:
        if colon:
            module = _file(place) if place.endswith(".py") else _module(place)
            found: Any = getattr(module, function)
        else:
            found = _entry_point(name)
    except (ImportError, OSError, AttributeError, SyntaxError) as error:
        raise ValueError(f"step {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"step {name!r} is {type(found).__name__}, not a function")
    make: Callable[[], Any] = found
    return make


def _entry_point(name: str) -> Any:
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none is installed"
        raise ValueError(
            f"no training step {name!r} in entry points {ENTRY_POINTS!r}; choose from: {known}; or write "
            "package.module:make"
        )
    return points[name].load()


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


def _file(path: str) -> Any:
    import sys
    from importlib.machinery import SourceFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    class Uncached(SourceFileLoader):
        """The file as it is now: compiled code is found by seconds and size, which an edit may leave as they were."""

        def get_code(self, fullname: str) -> CodeType | None:
            return self.source_to_code(self.get_data(path), path)

    spec = spec_from_loader("healthd_training_step", Uncached("healthd_training_step", path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look their module up
    spec.loader.exec_module(module)
    return module


class OwnStep:
    """A user's step on a device, always from the parameters that `make` gave. See `Work`."""

    def __init__(self, device: Device, name: str, model: Any, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        torch = device.torch
        self.name, self.label = "own step", "own"
        self.tokens: int | None = None
        self.flops: float | None = None
        self._device, self._loss = device, loss
        self._exact = _Placed(torch, copy.deepcopy(model).to(torch.float64), _moved(torch, batch, "cpu", exact=True))
        self._placed = _Placed(torch, model.to(device.torch_device), _moved(torch, batch, device.torch_device))
        self._start = {f"own.{name}": value.detach().cpu() for name, value in model.named_parameters()}
        if not self._start:
            raise ValueError(f"step {name!r}: its model has no parameters")
        self._state: State = first_state(torch, self._start, None, device.torch_device)
        # Other parameters or another batch are another step, which must not be compared with this one.
        tensors = {**self._start, **{f"batch{n}": tensor.cpu() for n, tensor in enumerate(_tensors(torch, batch))}}
        self.start = join(digest_on_host(torch, tensors).values())
        self.key = f"own {name} | {self.start}"

    def run(self, *, look: Look | None = None, change: Change | None = None) -> Step:
        """See `Work.run`."""
        return self._run(self._placed, self._state, look, change)

    def errors(self, step: Step) -> Sequence[Error]:
        """See `Work.errors`; sums are as long as the longest side of a parameter, or its whole where it is a filter."""
        torch = self._device.torch
        exact = first_state(torch, self._start, "float64", "cpu")
        reference = self._run(self._exact, exact, None, None).places
        used = {value.dtype for value in (*self._start.values(), *step.places.values()) if value.is_floating_point()}
        roundoff = max(torch.finfo(dtype).eps for dtype in used) / 2  # the coarsest, where precision is mixed
        longest = max(value.numel() for value in self._start.values())
        return errors_of(
            torch,
            self._start,
            step.places,
            reference,
            read=self._device.read,
            scale=1.0,
            roundoff=roundoff,
            longest=longest,
            stored=roundoff,
        )

    def _run(self, placed: _Placed, state: State, look: Look | None, change: Change | None) -> Step:
        torch = self._device.torch
        torch.manual_seed(_SEED)
        parameters = {name: tensor.detach().requires_grad_() for name, tensor in state.parameters.items()}

        def loss_of(tap: Tap) -> Any:
            with placed.watched(tap):
                return tap("own.loss", self._loss(placed.bound(parameters), placed.batch))

        return take_step(torch, state, parameters, loss_of, 1.0, look=look, change=change)


class _Placed:
    """A model and its batch, on the device or on the host."""

    def __init__(self, torch: Any, model: Any, batch: Any) -> None:
        self.batch = batch
        self._torch, self._model = torch, model
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def bound(self, parameters: Mapping[str, Any]) -> _Bound:
        """The model with these parameters, and with its buffers as they were at the start."""
        tensors = {name.partition(".")[2]: tensor for name, tensor in parameters.items()}
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        return _Bound(self._torch, self._model, {**tensors, **buffers})

    @contextmanager
    def watched(self, tap: Tap) -> Iterator[None]:
        """While it is open, what every module gives passes through `tap`."""
        counts: dict[str, int] = {}
        handles = []

        def watch(name: str, module: Any) -> None:
            def hook(_module: Any, _given: Any, output: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                again = f"_{counts[name]}" if counts[name] > 1 else ""
                return _tapped(self._torch, tap, f"{name}.output{again}", output)

            handles.append(module.register_forward_hook(hook))

        for name, module in self._model.named_modules():
            watch(f"own.{name}" if name else "own", module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Bound:
    """What a loss gets as its model: it is called as the model is, and has the model's attributes."""

    def __init__(self, torch: Any, model: Any, tensors: Mapping[str, Any]) -> None:
        self._torch, self._model, self._tensors = torch, model, dict(tensors)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._torch.func.functional_call(self._model, self._tensors, arguments, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _tapped(torch: Any, tap: Tap, name: str, output: Any) -> Any:
    """
    The output of a module, its floating-point tensors passed through `tap`; others are left alone.

    What comes next gets a copy: a module that works in place, as ReLU may, would change what was looked at.
    """
    if isinstance(output, torch.Tensor):
        return tap(name, output).clone() if output.is_floating_point() else output
    if type(output) in (tuple, list):
        return type(output)(_tapped(torch, tap, f"{name}{index}", one) for index, one in enumerate(output))
    if type(output) is dict:
        return {key: _tapped(torch, tap, f"{name}_{key}", one) for key, one in output.items()}
    return output


def _moved(torch: Any, batch: Any, place: Any, *, exact: bool = False) -> Any:
    """A batch on another device; `exact`: its floating-point tensors as float64."""
    if isinstance(batch, torch.Tensor):
        return (batch.to(torch.float64) if exact and batch.is_floating_point() else batch).to(place)
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(torch, one, place, exact=exact) for one in batch)
    if isinstance(batch, dict):
        return {key: _moved(torch, one, place, exact=exact) for key, one in batch.items()}
    return batch


def _tensors(torch: Any, batch: Any) -> Iterator[Any]:
    """All tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, dict)):
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(torch, one)
