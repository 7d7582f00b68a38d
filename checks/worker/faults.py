"""
Faults that an operator injects, as text and as records; `fault_injection` applies them in the worker.

A fault is written `CHECK[@TARGET]=KIND[:VALUE]`. The runner sends a worker only the faults that concern it. One check
has places within its work: `train_step.LAYER.OPERATION[@TARGET]=corrupt[:MAGNITUDE]`, see `checks.training.places`;
`corrupt` strikes there in one repeat, `wrong` in every one, so that the device agrees with itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.training.places import OWN, all_places

KINDS = ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage", "absent", "wrong")
MAX_FACTOR = 10_000.0
MAX_MAGNITUDE = 1e30

# What makes sense where. A node check has no device whose data could be corrupt, and only a rank can fail to join.
_BY_SCOPE: Mapping[str, tuple[str, ...]] = {
    "node": ("fail", "hang", "crash", "slow", "garbage"),
    "device": ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage"),
    "group": ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage", "absent"),
}
COUNTING_CHECK = "device_count"  # the one node check that sees a missing device

PLACED_CHECK = "train_step"  # the one check whose faults have places
_PLACED_KINDS = ("corrupt", "wrong")
_PLACE = "block1.gelu"

_TARGET = re.compile(r"rank:\d+|[a-z][a-z0-9_]*(:[A-Za-z0-9_./-]+)?")


@dataclass(frozen=True)
class Fault:
    """
    One injected fault.

    `target` None means every target of the check; `value` is the factor of `slow`, or the relative error of what is
    corrupted at `place` (None: a bit of the exponent); `place` is where in the check's work, for checks that have
    places.
    """

    check: str
    target: str | None
    kind: str
    value: float | None
    place: str | None = None

    def __str__(self) -> str:
        """As an operator writes it."""
        target = f"@{self.target}" if self.target else ""
        value = f":{self.value:g}" if self.value is not None else ""
        place = f".{self.place}" if self.place else ""
        return f"{self.check}{place}{target}={self.kind}{value}"

    def hits(self, check: str, targets: Collection[str]) -> bool:
        """Whether it concerns a check on the worker with these names (`cpu:1` and `rank:1` are names of one worker)."""
        return self.check == check and (self.target is None or self.target in targets)


def parse_fault(text: str, scopes: Mapping[str, str] | None = None) -> Fault:
    """
    Parse one fault as an operator writes it.

    `scopes` maps the known checks to their scope (node, device, group); None accepts any name. Raises ValueError with
    one line that names the mistake and the nearest valid word.
    """
    where = f"fault {text!r}"
    left, separator, right = text.partition("=")
    if not separator or not left or not right:
        raise ValueError(f"{where}: write CHECK[@TARGET]=KIND[:VALUE], as in matmul@cpu:1=corrupt")
    name, at, target = left.strip().partition("@")
    check, dot, place = name.partition(".")
    kind, colon, value_text = right.strip().partition(":")
    if kind not in KINDS:
        raise ValueError(f"{where}: no such kind: {kind!r}{_nearest(kind, KINDS)}")
    if at and not _TARGET.fullmatch(target):
        raise ValueError(f"{where}: {target!r} is no target; write node, cpu:1 or rank:1")
    if kind == "wrong" and not dot:
        raise ValueError(f"{where}: wrong acts on a place of {PLACED_CHECK}, as in {PLACED_CHECK}.{_PLACE}=wrong:1e-6")
    if scopes is not None:
        if check not in scopes:
            raise ValueError(f"{where}: no such check: {check!r}{_nearest(check, scopes)}")
        _check_scope(where, check, scopes[check], kind, target)
    if dot:
        _check_place(where, check, place, kind)
        return Fault(check, target or None, kind, _magnitude(where, value_text) if colon else None, place)
    if kind != "slow" and colon:
        raise ValueError(f"{where}: {kind} takes no value; only slow does, as in slow:4")
    return Fault(check, target or None, kind, _factor(where, value_text) if kind == "slow" else None)


def check_target(fault: Fault, devices: Collection[str], workers: Collection[str] = ()) -> None:
    """
    Refuse a fault on a device or rank that does not exist: it would have no effect. Raises ValueError.

    `workers` are the targets that checks run on, where these are not the devices but their cores.
    """
    target = fault.target or ""
    kind = target.partition(":")[0]
    devices = workers if workers and fault.check != COUNTING_CHECK else devices
    there = [f"rank:{rank}" for rank in range(len(devices))] if kind == "rank" else sorted(devices)
    if target not in ("", "node") and target not in there:
        raise ValueError(f"fault on {fault.check}: there is no {target!r} here, only {', '.join(there) or 'no device'}")


def _check_scope(where: str, check: str, scope: str, kind: str, target: str) -> None:
    allowed = (*_BY_SCOPE[scope], "wrong") if check == PLACED_CHECK else _BY_SCOPE[scope]
    if kind not in allowed and not (check == COUNTING_CHECK and kind == "missing"):
        raise ValueError(f"{where}: {kind} makes no sense for {check}, a {scope} check; it takes {', '.join(allowed)}")
    if scope == "node" and target not in ("", "node") and kind != "missing":
        raise ValueError(f"{where}: {check} runs once for the node, so {target!r} is no target of it; leave it out")


def _check_place(where: str, check: str, place: str, kind: str) -> None:
    if check != PLACED_CHECK:
        raise ValueError(f"{where}: {check} has no places; only {PLACED_CHECK} has, as in {PLACED_CHECK}.{_PLACE}")
    if kind not in _PLACED_KINDS:
        raise ValueError(f"{where}: {kind} acts on all of {check}; a place takes {' or '.join(_PLACED_KINDS)}")
    known = list(all_places())
    # Of a step of the user's own only the worker knows the places; it refuses what is not there.
    if place not in known and not place.startswith(OWN):
        layer, _, operation = place.partition(".")
        layers = dict.fromkeys(one.partition(".")[0] for one in known)
        if layer not in layers:
            raise ValueError(f"{where}: no such layer: {layer!r}{_nearest(layer, layers)}")
        own = [one.partition(".")[2] for one in known if one.partition(".")[0] == layer]
        raise ValueError(f"{where}: no such operation of {layer}: {operation!r}{_nearest(operation, own)}")


def _magnitude(where: str, text: str) -> float:
    try:
        magnitude = float(text)
    except ValueError:
        magnitude = 0.0
    if not 0.0 < magnitude <= MAX_MAGNITUDE:  # also refuses NaN
        raise ValueError(
            f"{where}: a place takes a relative error above 0 and up to {MAX_MAGNITUDE:g}, as in corrupt:1e-3, "
            f"not {text!r}"
        )
    return magnitude


def _factor(where: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor <= MAX_FACTOR:  # also refuses NaN
        raise ValueError(f"{where}: slow needs a factor above 1 and up to {MAX_FACTOR:g}, as in slow:4, not {text!r}")
    return factor


def _nearest(word: str, known: Collection[str]) -> str:
    import difflib  # this import takes a millisecond, which a round of checks must not cost

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def without_missing(inventory: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    """
    The inventory as a driver shows it that has lost the devices of `missing` faults: the last device, unless named.
    """
    devices = list(inventory.get("devices") or ())
    for fault in faults:
        if fault.kind != "missing" or not devices:
            continue
        lost = devices[-1]["target"] if fault.target in (None, "node") else fault.target
        if lost and lost.startswith("rank:"):
            index = int(lost.partition(":")[2])
            lost = devices[index]["target"] if index < len(devices) else None
        devices = [device for device in devices if device["target"] != lost]
    gone = len(inventory.get("devices") or ()) - len(devices)
    if not gone:
        return dict(inventory)
    count = inventory.get("device_count")
    cores = [device.get("cores") for device in devices]
    return {
        **inventory,
        "devices": devices,
        "device_count": None if count is None else count - gone,
        "core_count": inventory.get("core_count") if None in cores else sum(cores),
    }
