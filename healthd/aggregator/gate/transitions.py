"""
The phases of a gate, and every way from one to another. Nothing changes the phase of a gate but `move`, here.

Theory of operation. A gate holds its phase as a record (`healthd.aggregator.gate.records`): what only one phase has is
in the record of that phase and is gone with it. `step` (in `machine`) looks at the fleet anew each time and moves the
gate through as many phases as it can at once: where all nodes are ready, one step goes from `waiting` to `granting`.

A gate that asks for nodes begins in `waiting`. It reserves all the nodes that it needs at once, or none (`reserved`),
and is in `checking` while it has nodes whose evidence is being renewed. When enough are ready, nodes of a job of
several run collectives together (`validation started`); with the verdict the gate is back in `checking`, without the
nodes that the verdict names (`validation ended`). When the nodes are ready and proven, each gets a lease (`granted`);
when each has stored it, the job is admitted (`answered`).

Nothing is kept for a gate that cannot have all that it needs: when too few nodes are left, it gives back the others
too and waits (`returned`). When leases are taken back while nodes stay, they are checked again (`revoked`).

The gate of hooks that join begins in `collecting`, and has nodes as soon as its members are there (`gathered`). When a
member is replaced or gone, it gives back what it has and collects its members again (`regrouped`).

A gate may end in every phase, by its own answer, or because it is closed from outside: the asker withdrew it, or a
later attempt of the job takes its place (`closed`). `decided` is final.

    phase        event                phase after it
    collecting   gathered             waiting
    waiting      regrouped            collecting
    waiting      reserved             checking
    checking     returned             waiting
    checking     validation started   validating
    validating   validation ended     checking
    checking     granted              granting
    granting     revoked              checking
    granting     returned             waiting
    any other    answered, closed     decided
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.aggregator.gate.records import Gate, Phase, Progress, phase_of


class Event(str, enum.Enum):
    """Why a gate leaves a phase; see the module."""

    GATHERED = "gathered"
    REGROUPED = "regrouped"
    RESERVED = "reserved"
    RETURNED = "returned"
    VALIDATION_STARTED = "validation started"
    VALIDATION_ENDED = "validation ended"
    GRANTED = "granted"
    REVOKED = "revoked"
    ANSWERED = "answered"
    CLOSED = "closed"


TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = {
    (Phase.COLLECTING, Event.GATHERED): Phase.WAITING,
    (Phase.WAITING, Event.REGROUPED): Phase.COLLECTING,
    (Phase.WAITING, Event.RESERVED): Phase.CHECKING,
    (Phase.CHECKING, Event.RETURNED): Phase.WAITING,
    (Phase.CHECKING, Event.VALIDATION_STARTED): Phase.VALIDATING,
    (Phase.VALIDATING, Event.VALIDATION_ENDED): Phase.CHECKING,
    (Phase.CHECKING, Event.GRANTED): Phase.GRANTING,
    (Phase.GRANTING, Event.REVOKED): Phase.CHECKING,
    (Phase.GRANTING, Event.RETURNED): Phase.WAITING,
    **{(phase, Event.ANSWERED): Phase.DECIDED for phase in Phase if phase is not Phase.DECIDED},
    **{(phase, Event.CLOSED): Phase.DECIDED for phase in Phase if phase is not Phase.DECIDED},
}


@dataclass(frozen=True, kw_only=True)
class Move:
    """One change of phase."""

    before: Phase
    event: Event
    after: Phase


class IllegalMoveError(Exception):
    """A change of phase that is not in the table: a fault of ours, which holds the gate."""


def move(gate: Gate, event: Event, progress: Progress) -> tuple[Gate, Move]:
    """The gate in its next phase; IllegalMoveError when the table has no such way."""
    made = Move(before=gate.phase, event=event, after=phase_of(progress))
    if TRANSITIONS.get((made.before, event)) is not made.after:
        raise IllegalMoveError(f"gate {gate.id}: {made.before.value}, {event.value}, {made.after.value}")
    return dataclasses.replace(gate, progress=progress), made
