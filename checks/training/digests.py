"""
Digests of tensors: one 64-bit number of all bytes, exact, in any order of summation.

The bytes are read as integers and summed in columns of each quarter, then these sums are weighted with odd numbers and
summed, all modulo 2**64. Changing one word always changes the digest: the difference times an odd number is not 0
modulo 2**64. Several changes cancel each other once in 2**64 cases. Integer sums have no rounding, so the digest itself
is the same on any number of threads; it costs one reading of the memory. It is no cryptographic hash: nobody attacks
it, bits rot.

Also here:

- compares the digests of training steps over devices of one key.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from checks.contract import Device, Evidence, Finding, Measurement, Missing, Status
from checks.peers import vote
from checks.training.model import describe

_PARTS = 4
_COLUMNS = 16  # 128 bytes: torch sums so many at once; of 64 it reads the memory in strides, at a third of the speed
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: weights that have no pattern in common with data

AFTER = "after"
"""`after/200` is the digest of all parameters after 200 steps; the other digests are of places of the first step."""

RARE = 10_000
"""A pass says how probably it would have missed a fault that strikes one step in so many."""


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


def judge_steps(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """
    Say which devices differ, where first, and pass those that agree with the others of their kind.

    Each item is the step of one dtype on one device. A device whose own repeats differ has failed already and has no
    vote. For a device that gave no evidence the runner speaks; here it is a peer less, which a pass says.
    """
    groups: dict[str, list[Evidence]] = defaultdict(list)
    unstable = {item.target for item in evidence if not item.data["stable"]}
    for item in sorted(evidence, key=lambda item: item.target):
        if item.data["stable"]:
            groups[item.key].append(item)
    absent = ", ".join(sorted(gone.target for gone in missing))
    said = f" (nothing from {absent})" if absent else ""
    wrong: set[str] = set()
    for key in sorted(groups):
        for finding in _judge_group(groups[key], said):
            wrong.add(finding.target)
            yield finding
    for target in sorted({item.target for item in evidence} - unstable - wrong):
        own = [item for group in groups.values() for item in group if item.target == target]
        yield _pass(own, min(len(groups[item.key]) - 1 for item in own), said)


def missed_ratio(repeats: int, one_in: int) -> float:
    """The probability that none of so many repeats was hit by a fault that strikes one step in `one_in`."""
    return (1.0 - 1.0 / one_in) ** repeats


def first_difference(right: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str]:
    """The first place, in words, at which digests differ, and the step; `other` is in the order of computation."""
    for name, value in other.items():
        if right.get(name) != value:
            after, _, step = name.partition("/")
            return ("a parameter", f"after step {step}") if after == AFTER else (describe(name), "step 1")
    return ("a value that the other does not have", "step 1")


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


def _judge_group(devices: Sequence[Evidence], absent: str) -> Iterator[Finding]:
    """Findings on devices of one key, by majority; without a strict majority nobody can tell who is right."""
    majority = vote(Counter(_table(device) for device in devices))
    if majority.is_unanimous:
        return
    right, count = majority.right, majority.count
    names = ", ".join(device.target for device in devices)
    for device in devices:
        dtype = device.data["dtype"]
        if right is not None and _table(device) != right:
            place, step = first_difference(dict(right), device.data["digests"])
            text = f"{dtype} {step}: {place} differs from the {count} others of its kind{absent}"
            yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)
        elif right is None:
            other = next(one for one in devices if _table(one) != _table(device))
            place, step = first_difference(other.data["digests"], device.data["digests"])
            text = (
                f"{dtype} {step}: {place} differs between devices and no majority shows which is wrong: one of "
                f"{names}{absent}"
            )
            yield Finding(status=Status.FAIL, reason="DigestMismatch", message=text, target=device.target)


def _pass(own: Sequence[Evidence], peers: int, absent: str) -> Finding:
    repeats = min(int(item.data["repeats"]) for item in own)
    left_out = sorted({name for item in own for name in item.data["left_out"]})
    count = len(own[0].data["digests"])
    compared = f"as on {peers} other{'s' if peers > 1 else ''} of its kind" if peers else "nothing to compare with"
    dtypes = ", ".join(str(item.data["dtype"]) for item in own)
    text = f"all {count} digests of a step are the same in {repeats} repeats ({dtypes}), {compared}{absent}"
    missed = missed_ratio(repeats, RARE)
    text += f"; a fault in 1 of {RARE:,} steps would be caught with {_percent(1 - missed)} probability"
    if left_out:
        text += f"; left out because the device does not repeat them: {', '.join(left_out)}"
    return Finding(
        status=Status.PASS,
        reason=None,
        message=text,
        target=own[0].target,
        measurements=(
            _step_of("train_step_repeats_count", repeats),
            _step_of("train_step_peers_count", peers),
            _step_of("train_step_missed_ratio", missed, one_in=str(RARE)),
        ),
    )


def _percent(ratio: float) -> str:
    """With as many digits as tell it from certainty: 0.03 %, 95 %, 99.995 %."""
    if ratio < 0.99:
        return f"{100 * ratio:.2g} %"
    digits = 2 if ratio == 1 else max(2, -math.floor(math.log10(100 * (1 - ratio))))
    return f"{100 * ratio:.{digits}f} %"


def _step_of(name: str, value: float, **labels: str) -> Measurement:
    return Measurement(name=name, value=float(value), lower=None, upper=None, origin="none", labels=labels)


def _table(device: Evidence) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(device.data["digests"].items()))
