"""Gates: the answer to the question whether a job may start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checks.words import Blame, Status
from healthd.core.model.questions import GateRequest, Verdict
from healthd.core.model.reasons import Reason
from healthd.core.wire import FROM_OUTSIDE

HandshakeEvent = Literal["acknowledge", "withdraw", "wait", "told", "ended"]
"""What a hook says at the end of its gate; see `healthd.aggregator.gate.rendezvous`."""


@dataclass(frozen=True, kw_only=True)
class AdmittedNode:
    """
    A node that a decision includes; `evidence_age_seconds` is that of its oldest result that was counted.

    `asked` is the name by which it was asked for, where that is not its own.
    """

    node: str
    evidence_age_seconds: float | None
    address: str | None = None
    asked: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """A node that a decision leaves out, and why. `asked` as of an AdmittedNode."""

    node: str
    reasons: tuple[Reason, ...]
    asked: str | None = None


@dataclass(frozen=True, kw_only=True)
class WellNode:
    """
    A node that was asked for and that nothing speaks against, though the decision does not include it.

    Its evidence is fresh and says that it is fit, and no collectives of this gate ended without clearing it.
    `evidence_age_seconds` and `asked` as of an AdmittedNode.
    """

    node: str
    evidence_age_seconds: float | None
    asked: str | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """
    The answer of a gate, with all that explains it.

    `id` is the gate's. `retryable` tells the hook whether trying again, here or elsewhere, can help. `would` is what
    enforce mode would have said, where `policy.mode` is observe or a person overrode it, else None.

    `request` is what was asked, and `policy` the terms that were applied; a term that is None in the request was left
    to the aggregator's settings. Each node that the request names is in `nodes`, in `well` or in `excluded`, unless the
    gate was closed from outside. Of a pool, `well` and `excluded` have the nodes that were looked at.
    """

    id: str
    decision: Verdict
    reasons: tuple[Reason, ...]
    nodes: tuple[AdmittedNode, ...]
    excluded: tuple[ExcludedNode, ...]
    policy: Mapping[str, Any]
    retryable: bool
    decided_at: float
    duration_seconds: float
    would: Verdict | None = None
    request: GateRequest | None = None
    well: tuple[WellNode, ...] = ()
    decided_seconds_ago: float | None = field(default=None, compare=False)
    """Of a reject, in the answer to who asks for it: the same question again gets the same answer, which may be old."""

    @property
    def drill(self) -> bool:
        """Whether it stopped the job, or would have, and all the faults that it names were injected."""
        named = [reason for one in self.excluded for reason in one.reasons] + list(self.reasons)
        faults = [one for one in named if one.status is Status.FAIL and one.blame in (Blame.NODE, Blame.PATH)]
        faults += [one for one in named if one.injected]
        stopped = self.decision is not Verdict.ADMIT or self.would not in (None, Verdict.ADMIT)
        return stopped and bool(faults) and all(one.injected for one in faults)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """
    A gate that waits for nodes (`open`), or that has them: `nodes` are those on which its leases are in force.

    `workload` is the one of its request. `age_seconds` counts from its question, or from the first of these leases.
    `pool` is the pool of the first of `nodes`, None where it has none.
    `unfit` says of those of `nodes` that are known to be bad now what is wrong with them.
    """

    gate: str
    job: str
    attempt: int
    workload: str
    open: bool
    nodes: tuple[str, ...]
    age_seconds: float
    pool: str | None = None
    unfit: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClaimList:
    """Claims, the oldest gate first."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, kw_only=True)
class HandshakeBody:
    """A step of the end of a gate, by the hook of one of its nodes."""

    __pydantic_config__ = FROM_OUTSIDE

    node: str
    event: HandshakeEvent


@dataclass(frozen=True, kw_only=True)
class HandshakeAnswer:
    """
    How far the end of a gate is. `go` is None until it is settled.

    `missing` are the nodes that have not confirmed, or the one that has withdrawn. `all_told`: nobody waits for the
    outcome any more. `over`: the job has ended on all nodes that ran it, or does not start.
    """

    go: bool | None
    missing: tuple[str, ...]
    all_told: bool
    over: bool
