"""What the tests of preflight stopped, and those beside them, are made with."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.hooks.hook_answers_kit import Answer, admission


def main_node(*, go: bool | None) -> dict[str, Answer | Callable[[str], Answer]]:
    """What a main node answers to rank 1 of 2, both of which are admitted."""
    rolls = {"wait_seconds": 60.0, "difference": None, "all_told": False}
    shake = {"go": go, "missing": [], "all_told": False, "over": False}
    return {
        "/v1/preflight/ranks": (200, "application/json", json.dumps(rolls).encode()),
        "/v1/gates": (200, "application/json", admission("rank-0", "rank-1")),
        "/handshake": (200, "application/json", json.dumps(shake).encode()),
        "/sync": (404, "application/json", b"{}"),
    }
