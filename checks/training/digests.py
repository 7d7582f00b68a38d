"""
Digests of tensors: one 64-bit number of all bytes, exact, in any order of summation.

The bytes are read as integers and summed in columns of each quarter, then these sums are weighted with odd numbers and
summed, all modulo 2**64. Changing one word always changes the digest: the difference times an odd number is not 0
modulo 2**64. Several changes cancel each other once in 2**64 cases. Integer sums have no rounding, so the digest itself
is the same on any number of threads; it costs one reading of the memory. It is no cryptographic hash: nobody attacks
it, bits rot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from checks.contract import Device

_PARTS = 4
_COLUMNS = 16  # 128 bytes: torch sums so many at once; of 64 it reads the memory in strides, at a third of the speed
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: weights that have no pattern in common with data


class Digester:
    """Digests tensors of one device: on the device where it can read its bytes as integers, else on the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # XLA hands reinterpreting bytes to the host, in the middle of a step.
        self.on_host = hasattr(device, "fallbacks")
        self._weights = _weights(device.torch, "cpu" if self.on_host else device.torch_device)

    def look(self, tensor: Any) -> Any:
        """What to keep of a tensor during a step: its sums, where the device makes them  # [64] int64, or itself."""
        return tensor if self.on_host else _sums(self._device.torch, tensor)

    def finish(self, kept: Mapping[str, Any]) -> dict[str, str]:
        """The digests of what `look` gave, 16 hexadecimal digits each."""
        torch = self._device.torch
        if not kept:
            return {}
        if self.on_host:
            return digest_on_host(torch, {name: self._device.read(tensor) for name, tensor in kept.items()})
        return _written(kept, self._device.read(_weighted(torch.stack(list(kept.values())), self._weights)))


def digest_on_host(torch: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The digests of tensors on the host."""
    if not tensors:
        return {}
    sums = torch.stack([_sums(torch, tensor) for tensor in tensors.values()])
    return _written(tensors, _weighted(sums, _weights(torch, "cpu")))


def _written(names: Iterable[str], numbers: Iterable[Any]) -> dict[str, str]:
    return {name: f"{int(number) & (2**64 - 1):016x}" for name, number in zip(names, numbers, strict=True)}


def _weights(torch: Any, place: Any) -> Any:
    weights = [_signed((index * _GOLDEN) | 1) for index in range(1, _PARTS * _COLUMNS + 1)]
    return torch.tensor(weights, dtype=torch.int64, device=place)


def _weighted(sums: Any, weights: Any) -> Any:
    """The digests of tensors  # [tensors] int64."""
    return (sums * weights).sum(1)


def _sums(torch: Any, tensor: Any) -> Any:
    """The sums of one tensor over the columns of each part  # [64] int64."""
    flat = tensor.contiguous().reshape(-1)
    if flat.element_size() > 1 and flat.numel() * flat.element_size() % 8 == 0:
        words = flat.view(torch.int64)
    else:
        by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        words = flat.view(by_size[flat.element_size()]).to(torch.int64)
    whole = words.numel() // (_PARTS * _COLUMNS) * _PARTS * _COLUMNS
    sums = words[:whole].view(_PARTS, whole // (_PARTS * _COLUMNS), _COLUMNS).sum(1).view(-1)
    rest = words[whole:]
    return torch.cat([sums[: rest.numel()] + rest, sums[rest.numel() :]]) if rest.numel() else sums


def _signed(number: int) -> int:
    """The 64-bit integer with these bits, as torch takes it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def fold(digests: Mapping[str, str], most: int) -> dict[str, str]:
    """At most so many digests: those of the places of a layer joined to one, then those of its parent, and so on."""
    found = dict(digests)
    while len(found) > most and any("." in name for name in found):
        parents: dict[str, list[str]] = {}
        for name, value in found.items():
            parents.setdefault(name.rpartition(".")[0] or name, []).append(value)
        found = {name: join(values) for name, values in parents.items()}
    return found


def join(digests: Iterable[str]) -> str:
    """One digest of several."""
    import hashlib

    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
