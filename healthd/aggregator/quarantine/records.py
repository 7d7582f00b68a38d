"""
What the rules of quarantine see and remember of a node, and what they want done. Frozen data; nothing here acts.

All `*_at`, `since` and `until` are seconds of the engine's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from checks.contract import Action, Tier
from healthd.core.model import OrderStatus, Quarantine

ACCUSED_WINDOW_SECONDS = 86400.0
"""How old accusations that count may be. A day: jobs start a few times a day."""
COLLECTIVES = "collectives"
"""The name under which accusations by validations are counted, in the place of a check's."""
INHERITED = "inherited"
"""The name under which the quarantine is counted that a rule spoke before the database was lost."""
HARD_ACTIONS = (Action.REPLACE, Action.RESET_DEVICE, Action.REBOOT)
"""Actions of reasons that no later pass takes back by itself; the catalogue of reasons says which have them."""
BY_BOOT = (Action.RESET_DEVICE, Action.REBOOT)
"""Actions that a new boot has done."""


class Rule(str, enum.Enum):
    """SOFT: failed too often lately. HARD: a fault that does not heal by itself. ACCUSED: named by validations."""

    SOFT = "soft"
    HARD = "hard"
    ACCUSED = "accused"


class RuleMode(str, enum.Enum):
    """
    What came of a rule's verdict. ENFORCED: the node is quarantined. OBSERVED: the rule may only watch. HELD: the
    breaker is open. SHADOWED: a person keeps the node out already.
    """

    ENFORCED = "enforced"
    OBSERVED = "observed"
    HELD = "held"
    SHADOWED = "shadowed"


# --- what the rules see of a node -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A finding that failed and that the node is to blame for. `device` is the target it is about; None: the node."""

    code: str
    check: str
    target: str
    message: str
    action: Action
    device: str | None
    injected: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """
    The last result of a check. `passed` None: it says nothing of the node. `started_at` tells one run from another and
    decides nothing else.
    """

    check: str
    tier: Tier
    active: bool
    interval_seconds: float
    passed: bool | None
    faults: tuple[Fault, ...]
    measured_at: float
    started_at: float


@dataclass(frozen=True, kw_only=True)
class PoolLimit:
    """
    How many more nodes rules may take from a pool ("" for nodes without one): `kept` of `size` are out already, at
    most `most` may be. `open`: the breaker has tripped and nobody has reset it.
    """

    pool: str
    size: int
    kept: int
    most: int
    open: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """
    One node as of now. `identity` is the machine's: its instance id, else its name. `serials` maps devices to serial
    numbers (None where the hardware tells none); empty where the devices are not known.

    `quick_at`, `deep_at`, `soak_at`: when the oldest active result was measured of evidence of that tier that passed
    whole; None: there is none, or nothing waits for it. `injected`: the faults in force. `person`, `kept`: a person, or
    a rule, keeps the node out now. `accusations` are new ones.
    `probe_status` is that of the node's report on the run that the rules ordered. `compile_seconds`: how much longer
    such a run may take there. `maintenance`: the node is in maintenance, so that nothing is held against it.
    """

    node: str
    identity: str
    boot_id: str | None
    serials: Mapping[str, str | None]
    outcomes: tuple[Outcome, ...]
    quick_at: float | None
    deep_at: float | None
    injected: tuple[str, ...]
    allocated: bool
    person: bool
    kept: bool
    room: PoolLimit
    accusations: tuple[Fault, ...] = ()
    probe_status: OrderStatus | None = None
    compile_seconds: float = 0.0
    maintenance: bool = False
    soak_at: float | None = None

    def identity_of(self, device: str | None) -> str:
        """Whose a fault on this device is: the device's by its serial number, else the machine's."""
        serial = self.serials.get(device) if device is not None else None
        return f"serial:{serial}" if serial else self.identity

    @property
    def identities(self) -> tuple[str, ...]:
        """
        All that a latch on this node may be on. Its name too: a fault latched on the name, because no instance id was
        known then, does not go when one becomes known.
        """
        found = [f"serial:{serial}" for serial in self.serials.values() if serial]
        return tuple(dict.fromkeys((self.identity, f"node:{self.node}", *found)))


# --- what is remembered -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastCounted:
    """
    The last result of a check that was counted. `by_age`: by its age alone it was a new one, and `started_at`, which
    tells runs apart, is still that of the one before.
    """

    at: float
    started_at: float
    by_age: bool


@dataclass(frozen=True, kw_only=True)
class CountedResult:
    """One result that was counted. `devices` are those that it failed on; empty where it says nothing of a device."""

    at: float
    failed: bool
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """
    A check that failed lately. `marks` are its newest results, oldest first, within the window; `passes` those that
    passed in a row since it failed last; `fails` all failures since `since`. `tripped`: it failed too often and has not
    been cleared. `fault` is the newest. `devices` are all that its newest failures were on; empty where one of them
    was on the node.
    """

    rule: Rule
    fault: Fault
    tier: Tier
    active: bool
    since: float
    last_at: float
    window_seconds: float
    fails: int = 0
    passes: int = 0
    marks: tuple[CountedResult, ...] = ()
    tripped: bool = False
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Latch:
    """
    A hard fault, on what it belongs to (`serial:S`, `instance:I` or `node:N`): it goes where that goes.

    `boot_id` is that of the boot in which it was seen last. `node` had it last.
    """

    identity: str
    fault: Fault
    tier: Tier
    node: str
    boot_id: str | None
    since: float
    last_at: float
    times: int


@dataclass(frozen=True, kw_only=True)
class DeviceSlot:
    """Where a latched device is, or `node`: when another one is found there, it was replaced."""

    target: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class ReplacementProof:
    """
    A device that replaced a latched one has to pass the `tier`, measured after `since`. `repaired`: a person marked the
    repair of the device, or of the node, as done.
    """

    target: str
    identity: str
    instead_of: str
    since: float
    repaired: bool = False
    tier: Tier = Tier.DEEP


@dataclass(frozen=True, kw_only=True)
class RuleVerdict:
    """
    The verdict of the rules on a node. It ends when nothing is left of what caused it, not before `until`.

    `lead` names the cause that the sentence is about. `clear`: nothing is left, only the time has to pass. `devices`
    are those of a `Quarantine`.
    `repeats_before` and `last_before` are what the record said before this one, for one that turns out injected.
    """

    rule: Rule
    mode: RuleMode
    code: str
    reason: str
    lead: str
    since: float
    until: float
    clear: bool
    injected: bool
    repeats_before: int
    last_before: float | None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecheckRun:
    """A run that the rules ordered, because nothing else would show that the node is well again."""

    order_id: str
    tier: Tier
    ordered_at: float
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True)
class RuleRecord:
    """
    All that is remembered of one node. Bounded: by checks and devices, and by what a window holds.

    `latches` are those on the node's identities and in its seats, kept apart on disk. `repeats` counts the rules'
    quarantines, `last_at` is when the last one began. No probe before `probe_after`. `maintenance`: the node was in
    maintenance when it was looked at last.
    """

    node: str
    counts: tuple[FailureCount, ...] = ()
    latches: tuple[Latch, ...] = ()
    seats: tuple[DeviceSlot, ...] = ()
    owed: tuple[ReplacementProof, ...] = ()
    seen: Mapping[str, LastCounted] = field(default_factory=dict)
    word: RuleVerdict | None = None
    repeats: int = 0
    last_at: float | None = None
    probe: RecheckRun | None = None
    probe_after: float = 0.0
    maintenance: bool = False

    @property
    def active(self) -> bool:
        """Whether there is anything that the next facts may change."""
        known = self.counts or self.latches or self.seats or self.owed or self.seen
        return bool(known or self.word or self.probe or self.maintenance)


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """A breaker that has tripped."""

    at: float
    reason: str


# --- what is wanted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SetQuarantine:
    """The node is kept out, or kept out with another sentence or end."""

    quarantine: Quarantine


@dataclass(frozen=True, kw_only=True)
class LiftQuarantine:
    """The rule's quarantine ends."""

    why: str


@dataclass(frozen=True, kw_only=True)
class OpenBreaker:
    """The breaker of a pool opens."""

    pool: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class HistoryNote:
    """A line of the node's history."""

    kind: str
    message: str


Effect = SetQuarantine | LiftQuarantine | RuleVerdict | OpenBreaker | HistoryNote
"""A verdict is among them when its mode is not what it was before: for the trail and for counting."""
