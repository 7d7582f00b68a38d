"""What a verdict means for a gate: which nodes go, whether the rest may start, and why, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import Action, Blame, Status
from checks.reasons import blame_of
from healthd.aggregator.validation.records import Tested, Validation
from healthd.core.evidence import reason
from healthd.core.model import Reason
from healthd.localize import Culprit, Manner, PathFault, ValidationVerdict, names


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """
    `out`: nodes that this job goes without, and why; those with blame `node` are at fault, others only in the way.

    `cleared`: these ran all collectives together and passed; empty when nobody can say that of anybody. `reasons` are
    for people, worst first; of a clean validation there is none.
    """

    out: Mapping[str, Reason]
    cleared: tuple[str, ...]
    reasons: tuple[Reason, ...]


def consequence(validation: Validation) -> Consequence:
    """Of a validation that has ended. Raises ValueError while it has not."""
    verdict = validation.verdict
    if verdict is None:
        raise ValueError(f"validation {validation.id} has no verdict yet")
    injected = any(tested.injected for tested in validation.history)
    found = dict(_out(validation, verdict, injected=injected))
    # A partner that was borrowed concerns the job only where it is at fault.
    out = {node: why for node, why in found.items() if node in validation.members or why.blame is Blame.NODE}
    sound = verdict.rest_passed is True and not any(node in found for node in verdict.rest)
    cleared = tuple(node for node in verdict.rest if node in validation.members) if sound else ()
    reasons = list({why.message: why for why in out.values()}.values())
    if verdict.scale is not None:
        scale = verdict.scale
        text = (
            f"groups of up to {scale.largest_passing} nodes pass but {len(scale.members)} fail together: "
            f"{names(scale.members)}; no single node is at fault"
        )
        reasons.append(_reason("ScaleFault", text, None, injected=injected))
    if not cleared and not reasons:
        text = f"the nodes did not pass their collectives together: {'; '.join(verdict.reasons)}"
        reasons.append(_reason("Undecided", text, None, injected=injected))
    if cleared and not reasons and any(tested.reasons for tested in validation.history):
        reasons.append(_passing_fault(validation, injected=injected))
    reasons.extend(reason("CheckUnknown", text, status=Status.WARN) for text in validation.left_out)
    return Consequence(out=out, cleared=cleared, reasons=tuple(reasons))


def _out(validation: Validation, verdict: ValidationVerdict, *, injected: bool) -> Iterator[tuple[str, Reason]]:
    """Nodes and why the job goes without them; the strongest reason of a node comes last."""
    yield from _unexplained(validation, verdict, injected=injected)
    yield from _not_measured(validation, verdict)
    yield from _in_network(validation, verdict, injected=injected)
    for culprit in verdict.culprits:
        yield culprit.member, _culprit(culprit, validation, injected=injected)


def _unexplained(validation: Validation, verdict: ValidationVerdict, *, injected: bool) -> Iterator[tuple[str, Reason]]:
    """Nodes that are not among those that passed together, and of which no more is known."""
    if verdict.rest_passed is True:
        for node in sorted({*validation.members, *validation.partners}.difference(verdict.rest)):
            text = f"{node} is not among the {len(verdict.rest)} that passed together, and the cause is undecided"
            yield node, _reason("Undecided", text, node, injected=injected)
    for part in verdict.one_of:
        if len(part) == 1:
            text = f"{part[0]} failed, and whether it is at fault is unknown"
            yield part[0], _reason("Undecided", text, part[0], injected=injected)
            continue
        text = f"one of {names(part)} is at fault, or a path between them; this could not be narrowed down"
        for node in part:
            yield node, _reason("Ambiguous", text, node, injected=injected)


def _in_network(validation: Validation, verdict: ValidationVerdict, *, injected: bool) -> Iterator[tuple[str, Reason]]:
    """Nodes that the job goes without because of a path, a trunk, or a cut; none of them is at fault."""
    named = {culprit.member for culprit in verdict.culprits} | {n for fault in verdict.groups for n in fault.members}
    for path in verdict.paths:
        end = next((end for end in reversed(path.ends) if end not in verdict.rest), None)
        if end is not None and named.isdisjoint(path.ends):
            yield end, _path(path, end, validation, injected=injected)
    for trunk in verdict.trunks:
        one, other = trunk.values
        text = f"no node with {trunk.label} {one} passes with one of {other}: the link between the two groups is broken"
        for node in {node for side in trunk.members for node in side}.difference(verdict.rest):
            yield node, _reason("TopologyFault", text, node, injected=injected)
    for fault in verdict.groups:
        what = (
            f"all nodes with {fault.label} {fault.value} fail" if fault.label else "these nodes are cut off: they fail"
        )
        text = f"{what} together with all others: {names(fault.members)}"
        text += "; they pass among themselves" if fault.inside else ""
        for node in fault.members:
            if node in verdict.rest:
                continue  # of parts that reach each other no more, the job goes on with this one
            yield node, _reason("TopologyFault", text, node, injected=injected)


def _culprit(culprit: Culprit, validation: Validation, *, injected: bool) -> Reason:
    """A node at fault. What was seen in it is quoted; where that is our own tool's failure, no node is marked."""
    node = culprit.member
    seen = _seen(validation.history, node)
    manner = {Manner.ALWAYS: "fails", Manner.SOMETIMES: "sometimes fails", Manner.SLOW: "is slow"}[culprit.manner]
    text = f"{node} {manner} in collectives with {names(culprit.failed_with) or 'every other node'}"
    if culprit.failed_with:
        text += ", which pass without it" if len(culprit.failed_with) > 1 else ", which passes without it"
    last = seen or _of_group(validation.history, node)
    if last is not None:
        text += f": {last.message.removeprefix(f'{node}: ')}"
    ours = seen is not None and seen.blame is Blame.CHECK
    code = "SlowNode" if culprit.manner is Manner.SLOW else "CollectiveFault"
    return _reason(
        seen.code if seen is not None and ours else code,
        text,
        node,
        target=seen.target if seen is not None else None,
        check=last.check if last is not None else None,
        status=Status.UNKNOWN if ours else Status.FAIL,
        blame=Blame.CHECK if ours else Blame.NODE,
        action=None if ours else Action.INSPECT,
        injected=injected,
    )


def _seen(history: Iterable[Tested], node: str) -> Reason | None:
    """What was last seen of the node itself."""
    found = [tested.accused[node] for tested in history if node in tested.accused]
    return found[-1] if found else None


def _of_group(history: Iterable[Tested], node: str) -> Reason | None:
    """What its smallest failing group said."""
    found = [tested for tested in history if node in tested.members and tested.reasons]
    return min(found, key=lambda tested: len(tested.members)).reasons[0] if found else None


def _path(path: PathFault, end: str, validation: Validation, *, injected: bool) -> Reason:
    a, b = path.ends
    manner = "slow" if path.slow else "broken"
    text = f"the path between {a} and {b} is {manner}: both pass with others; the job runs without {end}"
    pair = next((tested for tested in validation.history if set(tested.members) == {a, b} and tested.reasons), None)
    if pair is not None:
        text += f" ({pair.reasons[0].message})"
    return _reason("PathFault", text, end, target=f"path:{a}-{b}", injected=injected)


def _not_measured(validation: Validation, verdict: ValidationVerdict) -> Iterator[tuple[str, Reason]]:
    """Nodes that gave no outcome: nobody knows why, or they could not take part, or fell silent."""
    for node in verdict.not_measured:
        yield node, _reason("Undecided", f"no test with {node} produced a result", node)
    for tested in validation.history:
        for node in tested.silent:
            yield node, _reason("Silent", f"{node} stopped responding in the collectives", node)
        yield from tested.unfit.items()


def _passing_fault(validation: Validation, *, injected: bool) -> Reason:
    first = next(tested for tested in validation.history if tested.reasons)
    text = f"the collectives failed once and passed when all ran together again: {first.reasons[0].message}"
    return _reason(
        "PassingFault",
        text,
        None,
        status=Status.WARN,
        blame=Blame.PATH,
        action=Action.INSPECT,
        injected=injected,
    )


def _reason(code: str, message: str, node: str | None, *, injected: bool = False, **more: Any) -> Reason:
    """A reason that says in words, too, that a fault was injected; it fails where a node is to blame."""
    known = {"status": Status.FAIL if blame_of(code) is Blame.NODE else Status.UNKNOWN, **more}
    marked = f"{message} (injected)" if injected else message
    return reason(code, marked, node=node, injected=injected, **known)
