"""The memory probe, on real memory."""

from __future__ import annotations

from typing import Any

import pytest

from checks.contract import Finding, Limit, Status
from checks.device.memory import PATTERNS, memory

MIB = 2**20


def run(ctx: Any) -> Finding:
    (finding,) = memory(ctx)
    assert isinstance(finding, Finding)
    return finding


def test_good_memory_passes_with_its_bandwidth(context: Any, cpu_device: Any) -> None:
    finding = run(context(memory, device=cpu_device))
    assert finding.status is Status.PASS, finding.message
    (measured,) = finding.measurements
    assert measured.name == "memory_bandwidth_bytes_per_second"
    assert measured.value is not None
    assert measured.value > 1e6
    assert "33.6 MB returned address, walking, random and their inverses" in finding.message


@pytest.mark.parametrize("read", range(1, 13))
def test_flipped_bit_is_found_in_every_pattern_both_ways_and_in_every_chunk(
    context: Any, tampering: Any, read: int
) -> None:
    """Two chunks of 4 MiB, three patterns, upright and inverted: twelve reads, a flip in any of them is corruption."""

    def flip(tensor: Any, number: int) -> Any:
        if number == read:
            tensor[2000] ^= 1 << 17  # of words of 32 bits
        return tensor

    finding = run(context(memory, device=tampering(flip), max_bytes=8 * MIB, seed=3))
    assert (finding.status, finding.reason) == (Status.FAIL, "MemoryCorruption")
    chunk = (read - 1) % 2
    assert f"byte offset {(chunk * 2**19 + 1000) * 8:#x} of {8 * MIB:#x}" in finding.message
    assert "bit 17" in finding.message
    pattern = PATTERNS[(read - 1) // 4]
    assert (f"({pattern}, inverted," if (read - 1) // 2 % 2 else f"({pattern}, seed") in finding.message


def test_crossed_address_lines_are_found_by_the_address_pattern(context: Any, tampering: Any) -> None:
    def cross(tensor: Any, _: int) -> Any:
        tensor[8:16] = tensor[0:8].clone()  # two addresses reach one cell; words of 64 bits are two of 32 there
        return tensor

    finding = run(context(memory, device=tampering(cross), max_bytes=2 * MIB))
    assert finding.reason == "MemoryCorruption"
    assert "(address" in finding.message
    assert "4 words differ" in finding.message


def test_bits_of_the_top_of_a_word_are_told_as_well(context: Any, tampering: Any) -> None:
    def invert(tensor: Any, _: int) -> Any:
        tensor[1] ^= -(2**31)
        return tensor

    assert "bit 63" in run(context(memory, device=tampering(invert), max_bytes=2 * MIB)).message


@pytest.mark.parametrize("available", [None, 0, 1000, MIB])
def test_memory_that_is_unknown_or_too_little_is_unknown_never_a_pass(
    context: Any, tampering: Any, available: int | None
) -> None:
    finding = run(context(memory, device=tampering(available_bytes=lambda: available)))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "CannotAllocate")


def test_block_that_cannot_be_allocated_is_unknown_never_a_pass(context: Any, tampering: Any) -> None:
    """Rival fault 17: the device promises memory that it does not give."""
    device = tampering(available_bytes=lambda: 2**62)
    finding = run(context(memory, device=device, max_bytes=2**60))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "CannotAllocate")
    assert "could not allocate 1152921504606846976 of 4611686018427387904 available bytes" in finding.message


@pytest.mark.parametrize("words", ["nrt_execute failed: status=1202", "CUDA error: unspecified launch failure"])
def test_device_that_fails_while_memory_is_taken_is_not_said_to_have_too_little(
    context: Any, tampering: Any, words: str
) -> None:
    def fail() -> None:
        raise RuntimeError(words)

    with pytest.raises(RuntimeError, match=words):
        run(context(memory, device=tampering(synchronize=fail), max_bytes=2 * MIB))


def test_share_of_the_available_memory_is_not_exceeded(context: Any, tampering: Any) -> None:
    finding = run(context(memory, device=tampering(available_bytes=lambda: 8 * MIB), share_ratio=0.25))
    assert "2.1 MB returned" in finding.message


def test_block_that_is_no_multiple_of_a_chunk_is_tested_to_its_end(context: Any, tampering: Any) -> None:
    def flip_last(tensor: Any, number: int) -> Any:
        if number == 2:  # the second of two pieces of two and a half MiB
            tensor[-1] ^= 1
        return tensor

    finding = run(context(memory, device=tampering(flip_last), max_bytes=5 * MIB))
    assert f"byte offset {5 * MIB - 8:#x}" in finding.message


def test_slow_memory_fails_at_its_limit(context: Any, cpu_device: Any) -> None:
    limits = {"memory_bandwidth_bytes_per_second": Limit(lower=1e18, upper=None, origin="baseline")}
    finding = run(context(memory, device=cpu_device, limits=limits, max_bytes=2 * MIB))
    assert (finding.status, finding.reason) == (Status.FAIL, "SlowDevice")
    assert "limit from baseline" in finding.message
