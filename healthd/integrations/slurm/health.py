"""What the verdict of a node's daemon means for the node in Slurm: pure, but for the file that the prolog writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.cli.hooks.readiness import Fitness
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError
from healthd.integrations.slurm.scontrol import MARK, SlurmNode, reason_text

PROLOG_ERROR = "Prolog error"
"""The reason that slurmctld itself gives when a node's prolog failed."""

# Between the prolog's word and slurmctld's drain lies a message; a minute also covers clocks that are not quite equal.
ADOPT_SECONDS = 60.0
MAX_REFUSAL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to do with a node in Slurm: drain (with `reason`), undrain or nothing; `note` says why, for the log."""

    action: str
    reason: str
    note: str


def next_step(
    node: SlurmNode, found: Fitness, *, refused_at: float | None = None, mark: str = MARK, drain_unknown: bool = True
) -> Step:
    """
    What the node's own word comes to: pure.

    `refused_at` is when our prolog refused a job here (seconds since the epoch, None never): a drain for "Prolog error"
    of that moment is ours, though slurmctld signed it. `drain_unknown`: a daemon that does not answer is no health.
    """
    adopted = (
        node.drained
        and node.reason == PROLOG_ERROR
        and refused_at is not None
        and node.reason_at is not None
        and abs(node.reason_at - refused_at) <= ADOPT_SECONDS
    )
    ours = node.bears(mark) or adopted
    if found.fit:
        if ours:
            return Step(action="undrain", reason="", note=f"is fit again; healthd had drained it ({node.reason})")
        if node.drained:
            return Step(
                action="nothing", reason="", note=f"is fit; healthd did not drain it ({node.reason or 'no reason'})"
            )
        return Step(action="nothing", reason="", note="is fit")
    if found.fit is None and not drain_unknown:
        return Step(action="nothing", reason="", note=f"is left as it is: {found.why}")
    reason = reason_text(mark, found.why)
    if ours and not adopted:
        return Step(action="nothing", reason="", note=f"is drained already ({node.reason})")
    if node.off:
        return Step(action="nothing", reason="", note="is powered off; no drain is needed")
    if node.out and not adopted:
        return Step(action="nothing", reason="", note=f"is out of service by others ({node.reason or 'no reason'})")
    return Step(action="drain", reason=reason, note=found.why)


def culprits(nodes: Sequence[tuple[str, str]], *, of: int, most: int) -> tuple[tuple[str, str], ...]:
    """
    Which of the nodes (name and reason) that a gate found at fault may be drained: all, or none at all.

    What is wrong with more than `most` of a job's nodes and more than a tenth of them is hardly the nodes.
    """
    return tuple(nodes) if len(nodes) <= max(most, of // 10) else ()


def refusal(file: Path) -> float | None:
    """When the prolog last refused a job, as it wrote it (seconds since the epoch); None when it never did."""
    try:
        first = read_file(file, MAX_REFUSAL_BYTES).split(maxsplit=1)[:1]
        return float(first[0]) if first else None
    except (OSError, ValueError, BadInputError):
        return None
