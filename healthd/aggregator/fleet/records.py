"""One node as the aggregator sees it. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checks.contract import Tier
from healthd.aggregator.fleet.packed_records import later
from healthd.core.evidence import Judged, aged
from healthd.core.model import NodeState, OrderReport, Quarantine

MOST_COMPILE_SECONDS = 7200.0
"""More is not waited for, whatever a node says: six times what a node allows for by default."""

Verdicts = dict[tuple[Tier, tuple[str, ...]], Judged]
"""What was found of the evidence of a node, by tier and required checks, with ages left out."""


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """
    What AWS will do to the machine of a node, as the check `scheduled_events` says.

    `seconds` is how long from now it begins, 0 or less: it may happen at any moment. None: it is not known whether
    there is an event, and `message` says why.
    """

    seconds: float | None
    message: str


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """
    One node as the aggregator sees it now.

    `state` is as it was received: `behind_seconds` is to be added to every age in it (None of a state: the node is
    known from the store only). `version` is another number whenever the evidence is another, and `oldest_seconds` the
    age of the oldest result, as it was received; None where nobody counted. `judged` is a memory: who judges this
    evidence adds to it. `machine` and `failing` say what the rules would read of the state
    (`healthd.aggregator.fleet.node_record`), None where nobody has looked. `heard_seconds` is how long ago the
    node was last heard, None: never since this aggregator started. `confirmed` means two-way contact, so that its ages
    are bounded; a node that is not confirmed is never admitted. `quarantine` is the aggregator's word. `orders` holds
    the last report on every order that is not yet acknowledged. `issuer` is the database that had made the last
    statement to the node when it sent its last sync. `event` is the first thing that AWS has scheduled for the machine,
    None where there is nothing. `moved_to` is the name under which the machine started again.
    """

    node: str
    state: NodeState | None
    version: int
    behind_seconds: float
    heard_seconds: float | None
    confirmed: bool
    duplicate: bool
    quarantine: Quarantine | None
    orders: Mapping[str, OrderReport]
    issuer: str | None
    oldest_seconds: float | None = None
    judged: Verdicts = field(default_factory=dict, compare=False)
    machine: str | None = None
    failing: bool | None = None
    event: ScheduledEvent | None = None
    moved_to: str | None = None

    @property
    def compile_seconds(self) -> float:
        """How much longer it may take because it compiles: by its own word, which is bounded."""
        said = 0.0 if self.state is None else self.state.compile_seconds
        return max(0.0, min(said, MOST_COMPILE_SECONDS))

    def current(self) -> NodeState | None:
        """The state with ages as of now."""
        return None if self.state is None else aged(self.state, self.behind_seconds)

    def kept(self) -> NodeState | None:
        """The same, not opened where it is kept packed."""
        return None if self.state is None else later(self.state, self.behind_seconds)


def moved_text(node: str, moved_to: str) -> str:
    """Where a machine is that started again under another name."""
    return (
        f"the machine that was {node} is now named {moved_to} (its key is used under that name); its leases moved "
        f"with it. Use {moved_to}, and once the old name is no longer needed: healthd fleet forget {node}"
    )


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """
    Why two daemons seem to have one name; until an admin decides, nothing is admitted there.

    `refused_key_hash` is the last key that was not the node's; None where both hold the node's own.
    """

    why: str
    refused_key_hash: str | None
