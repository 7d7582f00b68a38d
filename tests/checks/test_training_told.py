"""What a rank tells of its training steps: few bytes, and where ranks differ."""

from __future__ import annotations

import json

from checks.collective.training.shard import (
    digests_text,
    first_difference,
    is_digests_text,
    names_of,
    names_text,
    rounded,
)
from checks.training.model import OPTIMIZER, REDUCTION, layers

NAMES = [f"{layer}.{parameter}" for layer, _, parameters in layers() for parameter in parameters]
RANKS = 64  # of a node with 16 devices of 4 logical cores each


def told_bytes(steps: int) -> int:
    """Of one rank, without what every collective says."""
    digests = [digests_text([f"{0x9E3779B97F4A7C15 * (i + 1) % 2**64:016x}" for i in range(len(NAMES))])] * steps
    sums = [rounded(18.06584312345, 250.5123456, -17.9191461234)] * steps
    told = {
        "steps": steps,
        "places": names_text(NAMES),
        "digests": {REDUCTION: digests, OPTIMIZER: digests},
        "sums": {layer: sums for layer, _, _ in layers()},
        "faults": [],
    }
    return len(json.dumps(told, separators=(",", ":")))


def test_ranks_of_a_large_node_fit_into_one_sync() -> None:
    around = 720  # what a rank says in every collective, its key, and its last sign of life
    assert RANKS * (around + told_bytes(4)) < 128 * 1024
    assert RANKS * (around + told_bytes(16)) < 320 * 1024


def test_names_come_back_as_they_were() -> None:
    assert names_of(names_text(NAMES)) == NAMES
    assert names_of(names_text(["own.inner.weight", "own.inner.bias", "bias"])) == [
        "own.inner.weight",
        "own.inner.bias",
        "bias",
    ]


def test_one_other_digest_is_another_text_and_its_place_is_found() -> None:
    digests = [f"{index:016x}" for index in range(len(NAMES))]
    one = digests_text(digests)
    assert is_digests_text(one, len(NAMES))
    assert not is_digests_text(one, len(NAMES) - 1)
    other = digests_text([*digests[:5], "f" * 16, *digests[6:]])
    assert first_difference(one, other, names_text(NAMES), REDUCTION) == f"{NAMES[5]}_reduced"
    low = digests_text([*digests[:5], f"{7:016x}", *digests[6:]])  # in bits that only the root has
    assert low != one
    assert first_difference(one, low, names_text(NAMES), REDUCTION) is None


def test_sums_keep_what_the_comparison_needs() -> None:
    own, size, mean = rounded(0.123456789012345, 10.0, 1e-7)
    assert own == 0.1234568
    assert (size, mean) == (10.0, 1e-7)
    assert rounded(float("nan"), float("inf"), None) == [None, None, None]
    assert rounded(0.0, 0.0, 0.0) == [0.0, 0.0, 0.0]
