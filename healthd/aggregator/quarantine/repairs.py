"""
The repairs of one node, as they follow from what the rules hold against it and from what people decide. Pure.

A repair opens with the first latched fault on a device (or on the node), and closes when neither a latch nor the proof
of a repair is left there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from checks.contract import Tier
from healthd.aggregator.quarantine.records import (
    HARD_ACTIONS,
    INHERITED,
    Latch,
    ReplacementProof,
    RuleRecord,
)
from healthd.aggregator.quarantine.repair_records import (
    MOST_STEPS,
    Repair,
    RepairDecision,
    RepairEnd,
    RepairState,
    RepairStep,
)
from healthd.core.errors import ConflictError, NotFoundError

OURS = "healthd"
"""By whom a state changes that no person changed."""

_DECIDED = {RepairDecision.ACCEPT: RepairState.ACCEPTED, RepairDecision.REJECT: RepairState.REJECTED}


def follow(now: float, open_repairs: Sequence[Repair], record: RuleRecord) -> tuple[Repair, ...]:
    """
    The repairs of the node from now on, those that close now included. `record` has its latches.

    Injected faults need no repair. A quarantine taken over from a lost database does not say which repair it needs.
    """
    latched: dict[str, list[Latch]] = {}
    for latch in record.latches:
        if _needs_repair(latch):
            latched.setdefault(_device_of(latch, record), []).append(latch)
    found = [
        _followed(now, repair, latched.pop(repair.device, ()), _proof_for(repair, record)) for repair in open_repairs
    ]
    return (*found, *(_opened(now, record.node, device, latches) for device, latches in latched.items()))


def _needs_repair(latch: Latch) -> bool:
    return not latch.fault.injected and latch.fault.check != INHERITED


def _device_of(latch: Latch, record: RuleRecord) -> str:
    """The device that a latch is about, or `node`. A latch on the machine may still name one of its devices."""
    target = next((seat.target for seat in record.seats if seat.identity == latch.identity), "node")
    return (latch.fault.device or "node") if target == "node" else target


def _proof_for(repair: Repair, record: RuleRecord) -> ReplacementProof | None:
    """What is still to be shown of a repair that was made, or of the machine or device that came instead."""
    return next((one for one in record.owed if repair.device == one.target or repair.identity == one.instead_of), None)


def _strongest(latches: Iterable[Latch]) -> Latch:
    return min(latches, key=lambda latch: (HARD_ACTIONS.index(latch.fault.action), latch.since))


def _opened(now: float, node: str, device: str, latches: Sequence[Latch]) -> Repair:
    worst = _strongest(latches)
    return Repair(
        node=node,
        device=device,
        identity=worst.identity,
        advice=worst.fault.action,
        check=worst.fault.check,
        code=worst.fault.code,
        message=worst.fault.message,
        since=min(latch.since for latch in latches),
        state=RepairState.ADVISED,
        steps=(RepairStep(at=now, state=RepairState.ADVISED, by=OURS, why=_finding(worst)),),
    )


def _finding(latch: Latch) -> str:
    return f"{latch.fault.check} {latch.fault.code}: {latch.fault.message}"


def _followed(now: float, repair: Repair, latches: Sequence[Latch], owed: ReplacementProof | None) -> Repair:
    done = repair.state is RepairState.DONE
    if latches:
        worst = _strongest(latches)
        repair = dataclasses.replace(
            repair,
            identity=worst.identity,
            advice=worst.fault.action,
            check=worst.fault.check,
            code=worst.fault.code,
            message=worst.fault.message,
        )
        return _stepped(now, repair, RepairState.ADVISED, OURS, f"failed again: {_finding(worst)}") if done else repair
    if owed is not None:
        why = f"{owed.identity} replaced {owed.instead_of}"
        return repair if done else _stepped(now, repair, RepairState.DONE, OURS, why)
    if done:
        return closed(now, repair, RepairEnd.PASSED, "the tier passed after the repair")
    return closed(now, repair, RepairEnd.CLEARED, "newer results cleared the finding")


def _stepped(now: float, repair: Repair, state: RepairState, by: str, why: str) -> Repair:
    steps = (*repair.steps, RepairStep(at=now, state=state, by=by, why=why))
    if len(steps) > MOST_STEPS:
        steps = (steps[0], *steps[2:])
    return dataclasses.replace(repair, state=state, steps=steps)


def closed(now: float, repair: Repair, end: RepairEnd, why: str) -> Repair:
    """The repair, closed by healthd because of what it has seen."""
    return dataclasses.replace(_stepped(now, repair, RepairState.CLOSED, OURS, why), closed_at=now, end=end)


def decided(
    now: float, open_repairs: Sequence[Repair], decision: RepairDecision, device: str | None, by: str, why: str
) -> tuple[Repair, ...]:
    """
    The repairs of a node after a person decided about one device, or about all (None). One that is in the wanted state
    already stays as it is.

    NotFoundError where no repair is open there; ConflictError for one that was made and waits for its deep pass.
    """
    meant = {repair.device for repair in open_repairs if device in (None, repair.device)}
    if not meant:
        known = ", ".join(repair.device for repair in open_repairs)
        there = f"; open: {known}" if known else ""
        what = "no repair is open" if device is None else f"no repair of {device[:80]!r} is open"
        raise NotFoundError(f"{what}{there}; 'healthd fleet repairs' lists all")
    state = _DECIDED.get(decision, RepairState.DONE)
    return tuple(_decided(now, repair, state, by, why) if repair.device in meant else repair for repair in open_repairs)


def _decided(now: float, repair: Repair, state: RepairState, by: str, why: str) -> Repair:
    if repair.state is state:
        return repair
    if repair.state is RepairState.DONE:
        raise ConflictError(
            f"{repair.node} {repair.device}: the repair is marked as done, and the node waits for a pass of the "
            f"whole tier; to admit it without, run 'healthd fleet release {repair.node}'"
        )
    return _stepped(now, repair, state, by, why)


def repaired(now: float, record: RuleRecord, repairs: Sequence[Repair], tier: Tier) -> RuleRecord:
    """
    The record of a node after a person marked these repairs as done: their latches go, and the node has to pass the
    tier instead. The rest of the cool-down goes as well, because a person has acted.
    """
    devices = {repair.device for repair in repairs}
    kept, owed = [], {one.target: one for one in record.owed}
    for latch in record.latches:
        device = _device_of(latch, record)
        if device not in devices or not _needs_repair(latch):
            kept.append(latch)
            continue
        proof = ReplacementProof(
            target=device, identity=latch.identity, instead_of=latch.identity, since=now, repaired=True, tier=tier
        )
        owed[device] = proof
    word = record.word
    if word is not None:
        word = dataclasses.replace(word, until=min(word.until, now))
    return dataclasses.replace(record, latches=tuple(kept), owed=tuple(owed.values()), word=word, probe_after=now)
