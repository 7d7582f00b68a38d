"""How things are said on the page: signs, times, actions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from checks.contract import Action, Status
from healthd.core.model import Health, Verdict

# Colours are never alone: each health and status has a sign of its own.
HEALTH_SIGNS: Mapping[Health, str] = {
    Health.HEALTHY: "✓",
    Health.DEGRADED: "!",
    Health.UNKNOWN: "?",
    Health.UNHEALTHY: "✕",
}
STATUS_SIGNS: Mapping[Status, str] = {
    Status.PASS: "✓",
    Status.SKIP: "-",
    Status.WARN: "!",
    Status.UNKNOWN: "?",
    Status.FAIL: "✕",
}
VERDICT_SIGNS: Mapping[Verdict, str] = {Verdict.ADMIT: "✓", Verdict.HOLD: "…", Verdict.REJECT: "✕"}

# The word that gives a status its colour; a status and a health of the same weight look the same.
STATUS_TONES: Mapping[Status, str] = {
    Status.PASS: "healthy",
    Status.SKIP: "none",
    Status.WARN: "degraded",
    Status.UNKNOWN: "unknown",
    Status.FAIL: "unhealthy",
}
VERDICT_TONES: Mapping[Verdict, str] = {
    Verdict.ADMIT: "healthy",
    Verdict.HOLD: "degraded",
    Verdict.REJECT: "unhealthy",
}

WORST_FIRST = (Health.UNHEALTHY, Health.UNKNOWN, Health.DEGRADED, Health.HEALTHY)

ACTIONS: Mapping[Action, tuple[str, str]] = {
    Action.NONE: ("Nothing to do", "It passes by itself, or it says what a person or another job wanted."),
    Action.RETRY: ("Try again", "Ask again, or wait for the next run. If it stays for an hour, inspect the node."),
    Action.RESET_DEVICE: (
        "Reset the device",
        "Drain the node, reset the device by its vendor's tool or reboot, then run the deep tier before it comes back.",
    ),
    Action.REBOOT: (
        "Reboot the node",
        "Drain it, reboot it, and let the boot-time checks run. If it comes back, replace the node.",
    ),
    Action.REPLACE: (
        "Replace the node",
        "Do not give it work. Keep it out with a quarantine, replace the hardware or the instance, and run the deep "
        "tier on what comes in its place.",
    ),
    Action.INSPECT: (
        "Look into it",
        "Somebody has to look: read the message and the evidence of the check, then the kernel log of the node.",
    ),
}

_DIGITS = re.compile(r"(\d+)")


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """For sorting as people count: n2 before n10."""
    parts = _DIGITS.split(text)
    # At most so many digits become a number: Python refuses to read thousands of them.
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 18 else (1, 0, part) for part in parts if part)


def brief(text: str, most: int = 200) -> str:
    """One line, not longer than `most`."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{grouped(number)} {one if number == 1 else many or one + 's'}"


def grouped(number: int) -> str:
    """Thousands apart, by a narrow space that does not break."""
    return f"{number:,}".replace(",", "\u202f")


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names in a sentence; how many more there are when there are many."""
    found = list(names)
    rest = len(found) - most
    return ", ".join(found[:most]) + (f" and {rest} more" if rest > 0 else "")
