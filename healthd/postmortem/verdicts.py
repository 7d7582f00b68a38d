"""
The verdict for each combination of the strongest explaining observation and the checks afterwards, as one table.
`judge` uses it, and docs/postmortem.md prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from healthd.postmortem.catalogue import Kind, Outlook, Strength

FAILED = "failed"
"""A check of a node failed afterwards, for a reason that explains this end."""
PASSED = "passed"
"""Every node of which there are notes passed the tier that would have found a device at fault: quick or deep."""
OPEN = "open"
"""Anything else: nothing was measured, no answer came, or only a tier that could not have found it."""
ANY = (FAILED, PASSED, OPEN)

_EVERY = tuple(Kind)


@dataclass(frozen=True)
class Row:
    """One line of the table; None leaves what the signature says."""

    strength: Strength | None
    """None: no observation explains the end."""
    kinds: tuple[Kind, ...]
    measurement: tuple[str, ...]
    kind: Kind | None
    suspected: bool
    confidence: str
    outlook: Outlook | None = None
    program: bool | None = None
    """Only for signatures of this kind: a program can cause what looks like a fault of the device."""
    own: bool | None = None
    """Only where the check that failed is of the subject's own node, or of another one."""


TABLE = (
    Row(Strength.FACT, _EVERY, ANY, None, False, "high"),
    Row(Strength.REPORT, (Kind.STOPPED,), ANY, None, False, "medium"),
    Row(Strength.REPORT, (Kind.NETWORK,), (FAILED,), None, False, "high", Outlook.ELSEWHERE),
    Row(Strength.REPORT, (Kind.HOST, Kind.STORAGE), (FAILED,), None, False, "high"),
    Row(Strength.REPORT, (Kind.UNKNOWN,), (FAILED,), Kind.HARDWARE, True, "medium", Outlook.ELSEWHERE),
    Row(Strength.REPORT, _EVERY, (FAILED,), Kind.HARDWARE, False, "high", Outlook.ELSEWHERE, own=True),
    Row(Strength.REPORT, _EVERY, (FAILED,), Kind.HARDWARE, True, "medium", Outlook.ELSEWHERE),
    Row(Strength.REPORT, (Kind.SOFTWARE,), (PASSED,), None, False, "high"),
    Row(Strength.REPORT, (Kind.HARDWARE,), (PASSED,), Kind.SOFTWARE, True, "low", Outlook.NONE, program=True),
    Row(Strength.REPORT, (Kind.HARDWARE,), (PASSED,), None, True, "low"),
    Row(Strength.REPORT, (Kind.UNKNOWN,), (PASSED, OPEN), None, False, "low"),
    Row(Strength.REPORT, _EVERY, (PASSED, OPEN), None, True, "medium"),
    Row(None, _EVERY, (FAILED,), Kind.HARDWARE, True, "low", Outlook.ELSEWHERE),
    Row(None, _EVERY, (PASSED, OPEN), Kind.UNKNOWN, False, "low", Outlook.HERE),
)


def row_of(strength: Strength | None, kind: Kind, measurement: str, *, program: bool, own: bool) -> Row:
    """The line of the table: the first that fits. There is one for everything."""
    return next(
        row
        for row in TABLE
        if row.strength is strength
        and kind in row.kinds
        and measurement in row.measurement
        and row.program in (None, program)
        and row.own in (None, own)
    )


def as_markdown() -> str:
    """The table as a page shows it."""
    lines = ["| strongest observation | of class | checks afterwards | verdict | confidence |", "|---|---|---|---|---|"]
    for row in TABLE:
        strength = "none" if row.strength is None else row.strength.value
        kinds = "any" if row.kinds == _EVERY else ", ".join(kind.value for kind in row.kinds)
        kinds += ", which a program can cause" if row.program else ""
        checks = "any" if row.measurement == ANY else " or ".join(row.measurement)
        checks += {None: "", True: " on the subject's node", False: " on another node"}[row.own]
        unknown = row.kind is Kind.UNKNOWN or (row.kind is None and row.kinds == (Kind.UNKNOWN,))
        kind = row.kind.value if row.kind is not None else "unknown" if unknown else "that class"
        certainty = "" if unknown else ", suspected" if row.suspected else ", certain"
        outlook = f", {row.outlook.value}" if row.outlook is not None else ""
        lines.append(f"| {strength} | {kinds} | {checks} | {kind}{certainty}{outlook} | {row.confidence} |")
    return "\n".join(lines) + "\n"
