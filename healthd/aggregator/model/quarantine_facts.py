"""What the rules of quarantine may see of a node. Frozen data; all `*_at` are seconds of the controller's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checks.contract import Action, Tier
from healthd.core.model import OrderStatus


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

    `quick_at`, `deep_at`: when the oldest active result was measured of evidence of that tier that passed whole; None:
    there is none. `injected`: the faults in force. `person`, `kept`: a person, or a rule, keeps the
    node out now. `accusations` are new ones.
    `probe_status` is that of the node's report on the run that the rules ordered. `compile_seconds`: how much longer
    such a run may take there.
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
