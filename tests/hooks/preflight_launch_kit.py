"""What the tests of preflight launch, and those beside them, are made with."""

from __future__ import annotations

PASSIVE = ("--tier", "passive", "--no-collective")  # collectives are in test_preflight_collective


BAD = (*PASSIVE, "--fault", "memory_free=fail")
