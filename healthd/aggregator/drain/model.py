"""What the hand wants of a scheduler, and what it is told: frozen data and one protocol."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from healthd.core.errors import HealthdError


class Why(str, enum.Enum):
    """What a node is out for. QUARANTINE: until it is lifted. GATE: a gate rejected it just now; for a while."""

    QUARANTINE = "quarantine"
    GATE = "gate"


@dataclass(frozen=True, kw_only=True)
class Removal:
    """
    One node that is to be out of the way.

    `node` is its name in the fleet; `aliases` and `instance_id` (None where unknown) are what a scheduler may know it
    by. `reason` is a sentence for people. `by_person`: somebody said so, no rule. `injected`: only an injected fault is
    behind it, so nothing may be done that cannot be undone. `allocated`: a job has the node, as far as anybody knows,
    so nothing may be done that ends it.
    """

    node: str
    aliases: tuple[str, ...]
    instance_id: str | None
    why: Why
    reason: str
    by_person: bool
    injected: bool
    allocated: bool
    since: float

    @property
    def names(self) -> tuple[str, ...]:
        """All names to look for, the most likely first."""
        known = (self.node, *self.aliases, *((self.instance_id,) if self.instance_id else ()))
        return tuple(dict.fromkeys(known))


class Done(str, enum.Enum):
    """
    What came of it. OUT: nothing new is placed on the node, by our mark. LEFT: somebody else's mark keeps it out, or
    the scheduler does not know it; nothing was touched. BACK: our mark is gone.
    """

    OUT = "out"
    LEFT = "left"
    BACK = "back"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`note` is one line for people: what was done, or why nothing was."""

    done: Done
    note: str


class ActuatorError(HealthdError):
    """The scheduler could not be asked or refused. `retry_after_seconds`: not before; None: when we like."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Actuator(Protocol):
    """
    One scheduler. Every method may be repeated at any time, must end within seconds, and raises ActuatorError alone.

    Marks carry an owner, so that only what we did is undone: a person's drain or taint survives, also on a node that we
    had marked before. A mark never ends a job that runs.
    """

    name: str

    async def marked(self) -> Mapping[str, str]:
        """Nodes (by their name in the fleet) that bear our mark now, and its text: read from the scheduler itself."""

    async def remove(self, removal: Removal) -> Outcome:
        """Nothing new is to be placed on the node: OUT or LEFT. Called again now and then while it is out."""

    async def restore(self, node: str) -> Outcome:
        """Take our mark away and nothing else. BACK or LEFT."""
