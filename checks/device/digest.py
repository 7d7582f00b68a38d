"""The `digest` probe: fixed work has one right answer to the bit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Device, Evidence, Finding, Measurement, Missing, Status, Tier, check
from checks.peers import vote

_DATA_SEED = 20_240_229  # fixed for ever: digests are compared over devices and over time
_SIZE_BF16 = 256
_SIZE_INTEGER = 96
_STEPS = 4
_TIER_REPEATS = {Tier.QUICK: 4, Tier.DEEP: 100, Tier.SOAK: 1000}


@dataclass(frozen=True)
class Params:
    repeats: int | None = None
    """How often the work is done over; None: 4 in the quick tier, 100 in deep, 1000 in soak."""


def judge_digests(evidence: Sequence[Evidence], missing: Sequence[Missing]) -> Iterator[Finding]:
    """
    Compare the digests of devices of one key. Pure.

    A device whose own repeats differ has failed already and has no vote. For a device that gave no evidence the runner
    speaks; here it is a peer less, which a pass says.
    """
    groups: dict[str, list[Evidence]] = defaultdict(list)
    for item in sorted(evidence, key=lambda item: item.target):
        if item.data["stable"]:
            groups[item.key].append(item)
    absent = ", ".join(sorted(gone.target for gone in missing))
    for key in sorted(groups):
        yield from _judge_group(groups[key], f" (nothing from {absent})" if absent else "")


def _judge_group(devices: Sequence[Evidence], absent: str) -> Iterator[Finding]:
    """Devices of one key by majority of the digests; without a strict majority nobody can tell who is right."""
    majority = vote(Counter(str(device.data["digest"]) for device in devices))
    right, count = majority.right, majority.count
    if right is None:
        names = ", ".join(device.target for device in devices)
        for device in devices:
            text = (
                f"digests differ and no majority shows which is wrong: one of {names} ({_short(device)} here){absent}"
            )
            yield Finding(status=Status.FAIL, reason="DigestMismatch", message=text, target=device.target)
        return
    for device in devices:
        if device.data["digest"] != right:
            text = f"digest {_short(device)} differs from {right[:12]} of the {count} others of its kind{absent}"
            yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)
            continue
        repeats = int(device.data["repeats"])
        peers = f"{count - 1} other{'s' if count > 2 else ''}"
        compared = f"as {peers} of its kind" if count > 1 else "nothing of its kind to compare with"
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"digest {_short(device)} is the same in {repeats} repeats, {compared}{absent}",
            target=device.target,
            measurements=(
                _number("digest_repeats_count", float(repeats)),
                _number("digest_peers_count", float(count - 1)),
            ),
        )


def _number(name: str, value: float) -> Measurement:
    return Measurement(name=name, value=value, lower=None, upper=None, origin="none")


def _short(device: Evidence) -> str:
    return str(device.data["digest"])[:12]


@check(tier="quick", interval_seconds=3600, timeout_seconds=120, scope="device", judge=judge_digests)
def digest(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    A fixed computation gives the same bits each time and on each device of a kind (silent data corruption).

    Reads:   the device, by a chain of integer and bf16 matrix products and reductions, on one thread, whose bytes are
             hashed (SHA-256).
    Judges:  fail SilentCorruption (a device differs from itself, or is a minority among three or more of one key) |
             fail DigestMismatch (devices differ and no majority tells which: one of them) | pass with the number of
             equal repeats and peers. The key has device kind, instruction set and library version: bits may differ
             between those.
    Cost:    quick: 4 repeats, under 0.05 s on one core.
    Source:  own; methods of A. Dixit and others, Silent Data Corruptions at Scale (2021). Clean digests do not prove
             that there is no silent corruption: it often needs data or heat that short fixed work does not have.
    Unverified: GPUs and Neuron devices, and a device that really corrupts. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("digest needs a device; run it in a device's worker")
    repeats = ctx.params.repeats if ctx.params.repeats is not None else _TIER_REPEATS.get(ctx.tier, 4)
    torch = device.torch
    data = _data(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum, and so its bits, depends on the number of threads
    try:
        counts = Counter(_work(device, *data) for _ in range(max(2, repeats)))
    finally:
        torch.set_num_threads(threads)
    (common, same), total = counts.most_common(1)[0], counts.total()
    if len(counts) > 1:
        text = (
            f"the same computation gave {len(counts)} different digests in {total} repeats ({same} times {common[:12]})"
        )
        yield Finding(status=Status.FAIL, reason="SilentCorruption", message=text, target=device.target)
    yield Evidence(
        target=device.target,
        key=device.key,
        data={"digest": common, "repeats": total, "stable": len(counts) == 1},
    )


def _data(device: Device) -> tuple[Any, Any, Any, Any]:
    """The fixed data: integers x, w  # [96, 96] int32 in 0..250, and a, b  # [256, 256] bf16 in -1..1."""
    torch = device.torch
    generator = torch.Generator().manual_seed(_DATA_SEED)
    integers = [
        torch.randint(0, 251, (_SIZE_INTEGER, _SIZE_INTEGER), dtype=torch.int32, generator=generator) for _ in range(2)
    ]
    floats = [
        torch.rand(_SIZE_BF16, _SIZE_BF16, generator=generator).mul_(2).sub_(1).to(torch.bfloat16) for _ in range(2)
    ]
    x, w, a, b = (tensor.to(device.torch_device) for tensor in (*integers, *floats))
    return x, w, a, b


def _work(device: Device, x: Any, w: Any, a: Any, b: Any) -> str:
    """One pass of the chain; the SHA-256 of every byte that it ends with."""
    import ctypes
    import hashlib

    torch = device.torch
    for _ in range(_STEPS):
        # Multiply and add instead of matmul: most accelerators have no integer matmul. 96 * 250 * 250 fits in 23 bits.
        x = (x.unsqueeze(2) * w).sum(1, dtype=torch.int32).remainder(251)
        # 1/8 is near the growth of one product of such data (sqrt(256 / 3)), and a power of two: nothing overflows and
        # the scaling rounds nothing.
        a = torch.matmul(a, b) * 0.125
    hashed = hashlib.sha256()
    for tensor in (x, a, x.sum(0, dtype=torch.int32), a.float().sum(0)):
        host = device.read(tensor).contiguous()
        hashed.update(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()))
    return hashed.hexdigest()
