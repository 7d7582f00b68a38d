"""What the page of a gate shows: what it waits for, what it decided on, and its validations round by round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from healthd.aggregator.gate.records import Gate, Phase
from healthd.aggregator.validation.records import Tested, Validation
from healthd.core.model import Decision, ExcludedNode, Reason
from healthd.localize import Outcome, ValidationVerdict

# Names written into a box of the picture; what is more is counted.
MOST_NAMES = 8
MOST_ROUNDS = 60
MOST_BOXES = 400

_SAID = {
    "collecting": "collecting members",
    "waiting": "waiting for nodes",
    "checking": "checking nodes",
    "validating": "validating together",
    "granting": "granting leases",
    "decided": "decided",
}
# All phases in their order, with the words for them.
PHASES = tuple((phase, _SAID.get(phase.value, phase.value)) for phase in Phase)

TONES = {
    Outcome.PASS: ("healthy", "✓", "passed"),
    Outcome.SLOW: ("degraded", "!", "slow"),
    Outcome.UNKNOWN: ("unknown", "?", "no outcome"),
    Outcome.FAIL: ("unhealthy", "✕", "failed"),
}


def steps_of(gate: Gate) -> list[tuple[Phase, str]]:
    """The phases that a gate goes through."""
    skipped = set() if gate.terms.collective else {"validating"}
    if gate.phase.value != "collecting" and gate.request.join is None:
        skipped.add("collecting")
    return [(phase, said) for phase, said in PHASES if phase.value not in skipped]


@dataclass(frozen=True, kw_only=True)
class Name:
    """
    A node in a box. `mark`: culprit (the verdict names it), suspect (localisation could not tell it from others), unfit
    (it could not take part), or empty. Only a verdict accuses.
    """

    node: str
    mark: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """A group as it was tested. `tone`, `sign` and `said` are its outcome; `busbw` bytes/s by check, largest size."""

    tone: str
    sign: str
    said: str
    size: int
    names: tuple[Name, ...]
    more: int
    seconds: float | None
    busbw: float | None
    why: str
    injected: bool


@dataclass(frozen=True, kw_only=True)
class Round:
    """A row of the picture."""

    number: int
    title: str
    boxes: tuple[Box, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A validation: its rounds, and what came of it (`verdict` None: under way)."""

    id: str
    members: int
    partners: tuple[str, ...]
    rounds: tuple[Round, ...]
    culprits: tuple[str, ...]
    sentences: tuple[str, ...]
    tone: str
    sign: str
    outcome: str
    started_at: float
    seconds: float | None


def left_out(decision: Decision) -> list[ExcludedNode]:
    """The excluded nodes, each with the reasons that are not told at the top already."""
    told = {(why.node, why.message.removeprefix(f"{why.node}: ")) for why in decision.reasons}

    def is_new(why: Reason) -> bool:
        return (why.node, why.message.removeprefix(f"{why.node}: ")) not in told

    return [replace(one, reasons=tuple(filter(is_new, one.reasons))) for one in decision.excluded]


def pictures(gate: Gate) -> list[Picture]:
    """The validations of a gate, oldest first."""
    return [picture(run, ended=gate.decision is not None) for run in gate.validations]


def picture(run: Validation, *, ended: bool = False) -> Picture:
    """One validation; `ended`: its gate is decided, so that nothing of it is under way any more."""
    culprits = tuple(culprit.member for culprit in run.verdict.culprits) if run.verdict else ()
    suspects = tuple(name for part in run.verdict.one_of for name in part) if run.verdict else ()
    by_round: dict[int, list[Box]] = {}
    for tested in (*run.history, *run.done):
        by_round.setdefault(tested.round, []).append(_box(tested, culprits, suspects))
    tested_now = {one.members for one in run.done if one.round == run.round}
    if run.verdict is None and not ended:
        for group in run.groups:
            if group.members not in tested_now:
                by_round.setdefault(run.round, []).append(_under_way(group.members))
    rounds = tuple(
        Round(
            number=number,
            title=_title(number, boxes, run),
            boxes=tuple(boxes[:MOST_BOXES]),
            more=max(0, len(boxes) - MOST_BOXES),
        )
        for number, boxes in sorted(by_round.items())[:MOST_ROUNDS]
    )
    tone, sign, outcome = _outcome(run.verdict, rounds, ended=ended)
    return Picture(
        id=run.id,
        members=len(run.members),
        partners=run.partners,
        rounds=rounds,
        culprits=culprits,
        sentences=tuple(run.verdict.reasons) if run.verdict else (),
        tone=tone,
        sign=sign,
        outcome=outcome,
        started_at=run.started_at,
        seconds=None if run.ended_at is None else run.ended_at - run.started_at,
    )


def _title(number: int, boxes: Sequence[Box], run: Validation) -> str:
    if run.verdict is None and number == run.round:
        return run.why
    if number == 0:
        return "the whole"
    sizes = {box.size for box in boxes}
    if len(boxes) == 1:
        return "a pair" if sizes == {2} else f"{boxes[0].size} together"
    return "pairs" if sizes == {2} else "groups"


def _box(tested: Tested, culprits: Sequence[str], suspects: Sequence[str]) -> Box:
    tone, sign, said = TONES[tested.outcome]
    marks = dict.fromkeys(tested.unfit, "unfit")
    marks |= {name: "suspect" for name in suspects if name in tested.members and tested.outcome is not Outcome.PASS}
    marks |= {name: "culprit" for name in culprits if name in tested.members}
    # Those that something is said of come first, so that a box of a thousand nodes still names them.
    large = len(tested.members) > MOST_NAMES
    names = sorted(tested.members, key=lambda name: name not in marks) if large else tested.members
    accused = next(iter(tested.accused.values()), None)
    first = tested.reasons[0] if tested.reasons else accused
    return Box(
        tone=tone,
        sign=sign,
        said=said,
        size=len(tested.members),
        names=tuple(Name(node=name, mark=marks.get(name, "")) for name in names[:MOST_NAMES]),
        more=max(0, len(names) - MOST_NAMES),
        seconds=tested.seconds,
        busbw=min(tested.busbw_bytes_per_second.values(), default=None),
        why=first.message if first is not None else "",
        injected=tested.injected,
    )


def _under_way(members: Sequence[str]) -> Box:
    return Box(
        tone="running",
        sign="…",
        said="under way",
        size=len(members),
        names=tuple(Name(node=name, mark="") for name in members[:MOST_NAMES]),
        more=max(0, len(members) - MOST_NAMES),
        seconds=None,
        busbw=None,
        why="",
        injected=False,
    )


def _outcome(verdict: ValidationVerdict | None, rounds: Sequence[Round], *, ended: bool) -> tuple[str, str, str]:
    if verdict is None and ended:
        return "unknown", "?", "not finished when the gate ended"
    if verdict is None:
        return "running", "…", "running"
    if verdict.culprits:
        return "unhealthy", "✕", "at fault: " + ", ".join(culprit.member for culprit in verdict.culprits[:MOST_NAMES])
    if verdict.paths or verdict.groups or verdict.scale or verdict.one_of:
        return "unhealthy", "✕", "a fault between nodes"
    if not verdict.decided and verdict.rest_passed:
        return "unknown", "?", "failed, then passed: no node at fault"
    if not verdict.decided or verdict.not_measured or verdict.rest_passed is not True:
        return "unknown", "?", "not decided"
    if len(rounds) > 1:
        return "degraded", "!", "passed after repeats"
    return "healthy", "✓", "all passed together"
