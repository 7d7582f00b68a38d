"""
Faults that a reset of the device cures: reset it first, probe it again, and replace it only when the fault comes back.

Pure. A fault is `new` until a reset has followed it, then `reset`; when it comes again after that, it is `again` until
the next boot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from checks.contract import Action, Status
from checks.host.kernel import LogLine
from checks.system.kernel.fault_lines import Pattern, find_fault
from checks.system.neuron.neuron_log import Devices, ResetReader, target_of

Stage = Literal["new", "reset", "again"]
Key = tuple[str, str]  # name of the pattern, target


class Seen(NamedTuple):
    """What an earlier look knew of a fault; `seconds` is when its last line came, None where that is not known."""

    stage: Stage
    seconds: float | None


def to_stage(value: object) -> Stage:
    """A stage out of evidence; `new` where it has none."""
    return next((stage for stage in get_args(Stage) if stage == value), "new")


def find_stages(
    lines: Sequence[LogLine], earlier: Mapping[Key, Seen], devices: Devices, benign: Sequence[str] = ()
) -> dict[Key, Stage]:
    """
    The stage of each fault that a reset cures.

    What an earlier look has seen counts where its lines are no longer in the log, because then all that is in the log
    came later; else the log itself is read anew.
    """
    first = next((stamp for stamp, _ in lines if stamp is not None), None)
    stages: dict[Key, Stage] = {}
    for key, seen in earlier.items():
        gone = seen.seconds is None or first is None or seen.seconds < first
        if gone or seen.stage == "again":
            stages[key] = seen.stage
    resets = ResetReader()
    for _, text in lines:
        if (reset := resets.read(text)) is not None:
            for key in [key for key, stage in stages.items() if stage == "new" and reset.covers(key[1], devices)]:
                stages[key] = "reset"
        pattern = find_fault(text, benign)
        if pattern is None or not pattern.reset_cures:
            continue
        target = target_of(text, devices)
        if target is not None:
            key = (pattern.name, target)
            stages[key] = "new" if stages.get(key, "new") == "new" else "again"
    return stages


def staged(pattern: Pattern, stage: Stage) -> tuple[Pattern, str]:
    """How a fault of this stage is judged, and what is said of it."""
    if stage == "reset":
        note = "; the device was reset since: run the active checks"
        return replace(pattern, status=Status.WARN, action=Action.INSPECT), note
    if stage == "again":
        return replace(pattern, action=Action.REPLACE), "; it came back after a reset"
    return pattern, ""
