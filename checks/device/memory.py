"""The `memory` probe: device memory returns what was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Device, Finding, Profile, Series, Status, Tier, check
from checks.device.probes import is_trouble, new_seed, per_second
from checks.limits import quantity, within
from checks.peers import median
from checks.profiling.operations import with_profile

_WORD_BYTES = 8
_CHUNK_WORDS = 2**19  # 4 MiB: each such part of a block has its own address and random words
_PIECE_WORDS = 2**23  # 64 MiB: what is written, inverted and compared at a time, so that the host needs little memory
_MAX_PAIRS = 512  # of pieces: of a block that is larger still, pieces grow
_LEAST_BYTES = 2**20  # less than this is no test of memory
_TIER_BYTES = {Tier.QUICK: 32 * 2**20, Tier.DEEP: 2**30, Tier.SOAK: 8 * 2**30}
PATTERNS = ("address", "walking", "random")


@dataclass(frozen=True)
class Params:
    share_ratio: float = 0.5
    """Of the memory that is available, how much to test at most."""
    max_bytes: int | None = None
    """How much to test at most; None: 32 MiB in the quick tier, 1 GiB in deep, 8 GiB in soak."""
    repeats: int = 5
    """Timed copies for the bandwidth; the median counts."""
    seed: int | None = None
    """Of the random pattern; None: a new one each run, shown in the message."""


@check(
    tier="quick",
    interval_seconds=3600,
    timeout_seconds=120,
    scope="device",
    series=(
        Series(measurement="memory_bandwidth_bytes_per_second", help="Achieved memory bandwidth in the last run."),
    ),
)
def memory(ctx: Context[Params]) -> Iterator[Finding | Profile]:
    """
    A block of device memory returns three patterns and their inverses, and copies fast.

    Reads:   the device's memory: each word's own address (finds crossed address lines), a walking one (stuck and
             coupled bits) and random words; each is written, read back, inverted in place and read back again. The
             block is made of pieces of one size, so that a device that compiles its work compiles it once; words of
             64 bits are two of 32 there, because some devices have no others.
    Judges:  fail MemoryCorruption (with offset and bits) | unknown CannotAllocate (no such block is available, or the
             amount of memory is unknown) | fail SlowDevice (below `memory_bandwidth_bytes_per_second`) | warn
             SlowDevice (below half of the published peak) | pass with bytes/s of an inverting copy, read and written
             bytes both counted, as STREAM does (a plain copy is nothing to do for a compiler that sees it).
    Cost:    quick: 32 MiB and under 0.2 s. A block that fits in a cache tests the cache: deep takes 1 GiB.
    Source:  own; the patterns are those of memtest86+.
    Unverified: GPUs and Neuron devices, and memory that is really faulty. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("memory needs a device; run it in a device's worker")
    torch, params = device.torch, ctx.params
    limit_bytes = params.max_bytes if params.max_bytes is not None else _TIER_BYTES.get(ctx.tier, 32 * 2**20)
    available = device.available_bytes()
    if available is None:
        yield _cannot(device, "the amount of available memory is unknown")
        return
    wanted = min(limit_bytes, int(available * params.share_ratio))
    if wanted < _LEAST_BYTES:
        yield _cannot(device, f"{available} bytes are available, too few for a test")
        return
    half = wanted // _WORD_BYTES // 2
    pairs = min(_MAX_PAIRS, -(-half // _PIECE_WORDS))
    piece_words = half // pairs
    words = 2 * pairs * piece_words
    try:
        pieces = [torch.empty(2 * piece_words, dtype=torch.int32, device=device.torch_device) for _ in range(2 * pairs)]
        blank = torch.zeros(2 * piece_words, dtype=torch.int32)
        for piece in pieces:
            piece.copy_(blank)  # where memory is only promised, it is taken now; and nothing has to be compiled for it
        device.synchronize()
        del blank
    except (RuntimeError, MemoryError) as error:
        if is_trouble(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield _cannot(device, f"could not allocate {wanted} of {available} available bytes: {reason}")
        return
    seed = new_seed(params.seed)
    for pattern in PATTERNS:
        wrong = _test(device, pieces, pattern, seed)
        if wrong is not None:
            yield Finding(status=Status.FAIL, reason="MemoryCorruption", message=wrong, target=device.target)
            return

    def copy() -> None:
        for source, sink in zip(pieces[:pairs], pieces[pairs:], strict=True):
            torch.bitwise_not(source, out=sink)

    seconds = device.measure(copy, repeats=params.repeats, warmup=1)
    name = "memory_bandwidth_bytes_per_second"
    size = quantity("size_bytes", words * _WORD_BYTES)
    judged = within(
        per_second(words * _WORD_BYTES, median(seconds)),
        name=name,
        target=device.target,
        limit=ctx.limit(name, device.target),
        reason="SlowDevice",
        subject=f"{size} returned {', '.join(PATTERNS)} and their inverses (seed {seed}); bandwidth",
    )
    yield from with_profile(ctx, device, "memory", copy, median(seconds), [judged])


def _cannot(device: Device, why: str) -> Finding:
    return Finding(
        status=Status.UNKNOWN, reason="CannotAllocate", message=f"memory not tested: {why}", target=device.target
    )


def _test(device: Device, pieces: Sequence[Any], pattern: str, seed: int) -> str | None:
    """Write, read back, invert, read back; what differed first, or None."""
    torch = device.torch
    base = _base(torch, pattern, seed)
    expected = torch.empty(pieces[0].numel() // 2, dtype=torch.int64)
    starts = range(0, len(pieces) * expected.numel(), expected.numel())
    for piece, start in zip(pieces, starts, strict=True):
        piece.copy_(_fill(torch, expected, base, pattern, start).view(torch.int32))
        device.synchronize()  # before the words on the host change
    for inverted in (False, True):
        for piece, start in zip(pieces, starts, strict=True):
            _fill(torch, expected, base, pattern, start)
            if inverted:
                expected.bitwise_not_()
                piece.bitwise_not_()
            found = device.read(piece).view(torch.int64)
            if not torch.equal(found, expected):
                name = f"{pattern}, inverted" if inverted else pattern
                return _describe(found, expected, start, starts.stop, f"{name}, seed {seed}")
    return None


def _fill(torch: Any, out: Any, base: Any, pattern: str, start: int) -> Any:
    """The words of a pattern from word `start` on, into `out`, which it returns  # [n] int64."""
    for offset in range(0, out.numel(), _CHUNK_WORDS):
        part = out[offset : offset + _CHUNK_WORDS]
        _chunk(torch, base[: part.numel()], pattern, start + offset, part)
    return out


def _base(torch: Any, pattern: str, seed: int) -> Any:
    """One chunk of a pattern  # [2**19] int64."""
    counter = torch.arange(_CHUNK_WORDS, dtype=torch.int64)
    if pattern == "address":
        return counter
    if pattern == "walking":
        return torch.ones_like(counter).bitwise_left_shift_(counter.remainder_(64))
    return counter.random_(generator=torch.Generator().manual_seed(seed))


def _chunk(torch: Any, base: Any, pattern: str, start: int, out: Any) -> Any:
    """The pattern from word `start` on, into `out`: chunks differ, so that a crossed address line shows."""
    if pattern == "address":
        return torch.add(base, start, out=out)
    if pattern == "walking":
        return out.copy_(base)
    # An odd multiple of its place (the 64-bit golden ratio) makes another mask for each chunk.
    mask = (start * 0x9E3779B97F4A7C15) & (2**63 - 1)
    return torch.bitwise_xor(base, mask, out=out)


def _describe(found: Any, wanted: Any, start: int, words: int, pattern: str) -> str:
    """Where memory differed, for people: first word, its bits, and how many words of this chunk."""
    places = (found != wanted).nonzero().flatten()
    first = int(places[0])
    was, is_now = (int(tensor[first]) & (2**64 - 1) for tensor in (wanted, found))
    bits = [str(bit) for bit in range(64) if (was ^ is_now) >> bit & 1]
    return (
        f"byte offset {(start + first) * _WORD_BYTES:#x} of {words * _WORD_BYTES:#x} returned {is_now:#018x} instead "
        f"of {was:#018x}: bit{'s' if len(bits) > 1 else ''} {', '.join(bits)} ({pattern}); {places.numel()} words "
        "differ nearby"
    )
