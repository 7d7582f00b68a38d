"""
Faults that an operator injects, as text and as records; `fault_injection` applies them in the worker.

A fault is written `CHECK[@TARGET]=KIND[:VALUE]`. The runner sends a worker only the faults that concern it. Training
steps have places within their work: `train_step.LAYER.OPERATION[@TARGET]=corrupt[:MAGNITUDE][/STEPS]`, see
`checks.training.model`; with `/STEPS` the fault strikes one step in so many, by chance, and
with `/1` every one, so that the device agrees with itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.training.model import OWN, all_places, reduced_places

KINDS = ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage", "absent")
MAX_FACTOR = 10_000.0
MAX_MAGNITUDE = 1e30
MAX_STEPS = 1_000_000_000

# What makes sense where. A node check has no device whose data could be corrupt, and only a rank can fail to join.
_BY_SCOPE: Mapping[str, tuple[str, ...]] = {
    "node": ("fail", "hang", "crash", "slow", "garbage"),
    "device": ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage"),
    "group": KINDS,
}
COUNTING_CHECK = "device_count"  # the one node check that sees a missing device
_PLACE = "block1.gelu"  # an example

# Checks whose faults have places, each with places that it has besides those of every step.
PLACED_CHECKS: Mapping[str, tuple[str, ...]] = {"train_step": (), "data_parallel_step": tuple(reduced_places())}

_TARGET = re.compile(r"rank:\d+|[a-z][a-z0-9_]*(:[A-Za-z0-9_./-]+)?")


@dataclass(frozen=True)
class Fault:
    """
    One injected fault.

    `target` None means every target of the check; `value` is the factor of `slow`, or the relative error of what is
    corrupted at `place` (None: a bit of the exponent); `place` is where in the check's work, for checks that have
    places, and `one_in` says that it strikes one step in so many, by chance (None: one repeat, always the same).
    """

    check: str
    target: str | None
    kind: str
    value: float | None
    place: str | None = None
    one_in: int | None = None

    def __str__(self) -> str:
        """As an operator writes it."""
        target = f"@{self.target}" if self.target else ""
        value = f":{self.value:g}" if self.value is not None else ""
        place = f".{self.place}" if self.place else ""
        rate = f"/{self.one_in}" if self.one_in is not None else ""
        return f"{self.check}{place}{target}={self.kind}{value}{rate}"

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
    body, slash, steps = right.strip().partition("/")
    kind, colon, value_text = body.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{where}: no such kind: {kind!r}{_nearest(kind, KINDS)}")
    if at and not _TARGET.fullmatch(target):
        raise ValueError(f"{where}: {target!r} is not a target; write node, cpu:1 or rank:1")
    if scopes is not None:
        if check not in scopes:
            raise ValueError(f"{where}: no such check: {check!r}{_nearest(check, scopes)}")
        _check_scope(where, check, scopes[check], kind, target)
    if dot:
        _check_place(where, check, place, kind)
        magnitude = _magnitude(where, value_text) if colon else None
        return Fault(check, target or None, kind, magnitude, place, _steps(where, steps) if slash else None)
    if slash:
        raise ValueError(f"{where}: only a place of a training step takes a rate: train_step.{_PLACE}=corrupt/10000")
    if kind != "slow" and colon:
        raise ValueError(f"{where}: {kind} takes no value; only slow does, as in slow:4")
    return Fault(check, target or None, kind, _factor(where, value_text) if kind == "slow" else None)


def check_of(text: str) -> str:
    """The check of a fault as it is written, without its place and target."""
    return text.partition("=")[0].partition("@")[0].partition(".")[0]


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
        raise ValueError(f"fault on {fault.check}: this node has no {target!r}, only {', '.join(there) or 'no device'}")


def _check_scope(where: str, check: str, scope: str, kind: str, target: str) -> None:
    allowed = _BY_SCOPE[scope]
    if kind not in allowed and not (check == COUNTING_CHECK and kind == "missing"):
        raise ValueError(
            f"{where}: {kind} cannot be injected into {check}, a {scope} check; it takes {', '.join(allowed)}"
        )
    if scope == "node" and target not in ("", "node") and kind != "missing":
        raise ValueError(f"{where}: {check} runs once for the node, so it has no target {target!r}; leave it out")


def _check_place(where: str, check: str, place: str, kind: str) -> None:
    if check not in PLACED_CHECKS:
        placed = " and ".join(PLACED_CHECKS)
        raise ValueError(f"{where}: {check} has no places; only {placed} have, as in train_step.{_PLACE}")
    if kind != "corrupt":
        raise ValueError(f"{where}: {kind} affects all of {check}; a place takes only corrupt")
    known = [*all_places(), *PLACED_CHECKS[check]]
    # Of a step of the user's own only the worker knows the places; it refuses what is not there.
    if place not in known and not (place.startswith(OWN) and check == "train_step"):
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
            f"{where}: corrupt takes a relative error above 0 and up to {MAX_MAGNITUDE:g}, as in corrupt:1e-3, "
            f"not {text!r}"
        )
    return magnitude


def _steps(where: str, text: str) -> int:
    steps = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"{where}: corrupt affects one step in 1 to {MAX_STEPS}, as in corrupt/10000, not {text!r}")
    return steps


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
    return f"; did you mean {near[0]!r}?" if near else f"; choose from: {', '.join(known)}"


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
