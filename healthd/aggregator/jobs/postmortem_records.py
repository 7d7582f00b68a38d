"""What nodes have reported about the bad end of a gate's job, and the verdict."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.postmortem.judge import JobVerdict, Measured


class PostmortemPhase(str, enum.Enum):
    """COLLECTING: not all have told yet. MEASURING: nodes check their devices. FINAL: nothing more is waited for."""

    COLLECTING = "collecting"
    MEASURING = "measuring"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Told:
    """One `healthd run` that has sent its notes: of the whole node, or of one `rank` on it."""

    node: str
    rank: int | None
    code: int
    signal: int | None
    ended_at: float
    world_size: int | None = None
    measures: bool = False
    """It runs checks of the devices when it is asked to."""
    measured: bool = False
    """It has run them."""
    packed_bytes: int = 0
    """How large its notes are on disk."""


@dataclass(frozen=True, kw_only=True)
class Postmortem:
    """
    Why a job died, as far as it is known. `verdict` is None while notes are collected, and may change until FINAL; and
    after that where somebody tells late.
    """

    gate: str
    job: str
    attempt: int
    phase: PostmortemPhase
    first_told_at: float
    nodes: tuple[str, ...]
    """The nodes that the job was given."""
    told: Mapping[str, Told]
    """By member: a node, or `NODE/RANK`."""
    verdict: JobVerdict | None = None
    judged_at: float | None = None
    """When it was judged first: the checks of the devices have so long from then on."""
    ordered: str | None = None
    """The gate, without a lease, by which daemons check nodes under suspicion and the links between them."""
    by_order: tuple[Measured, ...] = ()
    """What came of that."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes of the job of which nobody has told."""
        heard = {each.node for each in self.told.values()}
        return tuple(node for node in self.nodes if node not in heard)

    @property
    def complete(self) -> bool:
        """Whether all have told: every rank where each rank tells by itself, else every node."""
        sizes = {each.world_size for each in self.told.values() if each.rank is not None and each.world_size}
        ranks = {each.rank for each in self.told.values() if each.rank is not None}
        return not self.missing and (not sizes or len(ranks) >= max(sizes))

    @property
    def to_measure(self) -> tuple[str, ...]:
        """The members that still have to check their devices."""
        if self.phase is not PostmortemPhase.MEASURING:
            return ()
        return tuple(member for member, each in self.told.items() if each.measures and not each.measured)


@dataclass(frozen=True, kw_only=True)
class PostmortemState:
    """A post-mortem with what follows from it: nodes that have not told, members that are to check their devices."""

    postmortem: Postmortem
    missing: tuple[str, ...]
    to_measure: tuple[str, ...]
    member: str | None = None
    """As which member the one who asks has told; None where it has not."""


def state_of(record: Postmortem, member: str | None = None) -> PostmortemState:
    """The record as it is answered to a member, or to who only reads."""
    return PostmortemState(postmortem=record, missing=record.missing, to_measure=record.to_measure, member=member)


def member_name(node: str, rank: int | None) -> str:
    """How a member is called in `told` and `to_measure`."""
    return node if rank is None else f"{node}/{rank}"
