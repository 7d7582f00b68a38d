"""
Faults that an operator injects, acting where the real ones would: below the code that judges.

A fault is written `CHECK[@TARGET]=KIND[:VALUE]`. The runner hands a worker only the faults that concern it; the worker
applies them to the check's generator, to its device or to its own output. Nothing here decides what a fault means for
the node: the check, its judge and the runner find that out as they would for a real one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from checks.contract import Device, Evidence, Finding, Mesh, MeshOperation, Progress, Status

Item = Finding | Evidence | Progress

KINDS = ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage", "absent")
MAX_FACTOR = 10_000.0

# What makes sense where. A node check has no device whose data could be corrupt, and only a rank can fail to join.
_BY_SCOPE: Mapping[str, tuple[str, ...]] = {
    "node": ("fail", "hang", "crash", "slow", "garbage"),
    "device": ("fail", "hang", "crash", "slow", "corrupt", "missing", "garbage"),
    "group": KINDS,
}
COUNTING_CHECK = "device_count"  # the one node check that sees a missing device

_TARGET = re.compile(r"rank:\d+|[a-z][a-z0-9_]*(:[A-Za-z0-9_./-]+)?")


@dataclass(frozen=True)
class Fault:
    """`target` None means every target of the check; `value` is the factor of `slow`, else None."""

    check: str
    target: str | None
    kind: str
    value: float | None

    def __str__(self) -> str:
        """As an operator writes it."""
        target = f"@{self.target}" if self.target else ""
        value = f":{self.value:g}" if self.value is not None else ""
        return f"{self.check}{target}={self.kind}{value}"

    def hits(self, check: str, targets: Collection[str]) -> bool:
        """Whether it concerns a check on something that goes by these names (`cpu:1` and `rank:1` are one worker)."""
        return self.check == check and (self.target is None or self.target in targets)


def parse_fault(text: str, scopes: Mapping[str, str] | None = None) -> Fault:
    """
    One fault as an operator writes it.

    `scopes` maps the checks that there are to their scope (node, device, group); None accepts any name. Raises
    ValueError with one line that names what is wrong and the nearest right word.
    """
    where = f"fault {text!r}"
    left, separator, right = text.partition("=")
    if not separator or not left or not right:
        raise ValueError(f"{where}: write CHECK[@TARGET]=KIND[:VALUE], as in matmul@cpu:1=corrupt")
    check, at, target = left.strip().partition("@")
    kind, colon, value_text = right.strip().partition(":")
    if kind not in KINDS:
        raise ValueError(f"{where}: no such kind: {kind!r}{_nearest(kind, KINDS)}")
    if at and not _TARGET.fullmatch(target):
        raise ValueError(f"{where}: {target!r} is no target; write node, cpu:1 or rank:1")
    if scopes is not None:
        if check not in scopes:
            raise ValueError(f"{where}: no such check: {check!r}{_nearest(check, scopes)}")
        _check_scope(where, check, scopes[check], kind, target)
    if kind != "slow" and colon:
        raise ValueError(f"{where}: {kind} takes no value; only slow does, as in slow:4")
    return Fault(check, target or None, kind, _factor(where, value_text) if kind == "slow" else None)


def check_target(fault: Fault, devices: Collection[str], workers: Collection[str] = ()) -> None:
    """
    Refuse a fault on a device or rank that there is none of: it would strike nothing. Raises ValueError.

    `workers` are what checks run on, where that is not the devices: cores of them.
    """
    target = fault.target or ""
    kind = target.partition(":")[0]
    devices = workers if workers and fault.check != COUNTING_CHECK else devices
    there = [f"rank:{rank}" for rank in range(len(devices))] if kind == "rank" else sorted(devices)
    if target not in ("", "node") and target not in there:
        raise ValueError(f"fault on {fault.check}: there is no {target!r} here, only {', '.join(there) or 'no device'}")


def _check_scope(where: str, check: str, scope: str, kind: str, target: str) -> None:
    allowed = _BY_SCOPE[scope]
    if kind not in allowed and not (check == COUNTING_CHECK and kind == "missing"):
        raise ValueError(f"{where}: {kind} makes no sense for {check}, a {scope} check; it takes {', '.join(allowed)}")
    if scope == "node" and target not in ("", "node") and kind != "missing":
        raise ValueError(f"{where}: {check} runs once for the node, so {target!r} is no target of it; leave it out")


def _factor(where: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor <= MAX_FACTOR:  # also refuses NaN
        raise ValueError(f"{where}: slow needs a factor above 1 and up to {MAX_FACTOR:g}, as in slow:4, not {text!r}")
    return factor


def _nearest(word: str, known: Collection[str]) -> str:
    import difflib  # an operator's slip may cost a millisecond; a round of checks may not

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def without_missing(inventory: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    """The inventory as a driver shows it that has lost the devices of `missing` faults: the last one, unless named."""
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


# --- in the worker ----------------------------------------------------------------------------------------------------


def apply_faults(
    faults: Sequence[Fault], items: Callable[[], Iterator[Item]], *, target: str, group: bool, output: int
) -> Iterator[Item]:
    """
    The items of a check as they come when `faults` are in force.

    `items` starts the check; `target` is what it is about; `output` is the descriptor of results. In a group a rank
    hangs, crashes or babbles after it has joined and before it enters its first operation: the others wait there.
    """
    kinds = {fault.kind for fault in faults}
    if "absent" in kinds:
        sleep_forever()
    sudden = kinds & {"hang", "crash", "garbage"}
    if sudden and not group:
        _strike(sudden, output)
    factor = max((fault.value or 1.0 for fault in faults if fault.kind == "slow"), default=1.0)
    # With a device the slowness sits in the device; a check without one is slow at every step.
    stream = items() if factor <= 1.0 or target != "node" else _slowed(items(), factor)
    for item in stream:
        if sudden and isinstance(item, Progress) and item.event == "entered":
            _strike(sudden, output)
        yield item
    if sudden:  # a group check that never says what it enters
        _strike(sudden, output)
    if "fail" in kinds:
        yield Finding(
            status=Status.FAIL, reason="InjectedFault", message="an operator injected this failure", target=target
        )


def _slowed(items: Iterator[Item], factor: float) -> Iterator[Item]:
    while True:
        start = time.monotonic()
        item = next(items, None)
        time.sleep((time.monotonic() - start) * (factor - 1.0))
        if item is None:
            return
        yield item


def _strike(kinds: Collection[str], output: int) -> None:
    """What ends a check suddenly, the most sudden first."""
    if "crash" in kinds:
        os.abort()
    if "garbage" in kinds:
        write_garbage(output)
    sleep_forever()


def sleep_forever() -> None:
    """As a hung driver: until killed."""
    while True:
        time.sleep(3600)


def write_garbage(output: int) -> None:
    """A line of junk, then a megabyte without an end of line."""
    os.write(output, b"\x00\xff this is no result\n")
    junk = b"\xa5" * 65536
    for _ in range(16):
        os.write(output, junk)


class FaultyDevice:
    """
    A device that is slow, or that corrupts one bit of one element of the first tensor it gives to the host.

    Everything else is the device's own. See `checks.contract.Device`.
    """

    def __init__(self, device: Device, *, factor: float, corrupt: bool, members: tuple[Device, ...] = ()) -> None:
        self.members = members
        self.matmul_rows = device.matmul_rows
        self.target = device.target
        self.key = device.key
        self.torch: Any = device.torch
        self.torch_device: Any = device.torch_device
        self._device = device
        self._factor = factor
        self._corrupt = corrupt
        self._working_since: float | None = None

    @property
    def collective_backend(self) -> str:
        """See `Device`; asked only when it is wanted, because a device may have none."""
        return self._device.collective_backend

    def synchronize(self) -> None:
        """Take `factor` times as long as the work since the last synchronization did."""
        self._device.synchronize()
        now = time.perf_counter()
        if self._factor > 1.0 and self._working_since is not None:
            time.sleep((now - self._working_since) * (self._factor - 1.0))
        self._working_since = time.perf_counter()

    def available_bytes(self) -> int | None:
        """See `Device.available_bytes`."""
        return self._device.available_bytes()

    def read(self, tensor: Any) -> Any:
        """The tensor on the host; the first one with one bit flipped where that was asked for."""
        host = self._device.read(tensor)
        self._working_since = time.perf_counter()  # the host's own work on what it has read is not the device's
        if not self._corrupt or host.numel() == 0:
            return host
        self._corrupt = False
        return flip_bit(self.torch, host)

    def collective(self, name: str, contributions: Any) -> MeshOperation:
        """See `Mesh.collective`; what is corrupt is what a member reads of it."""
        return cast("Mesh", self._device).collective(name, contributions)

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """Each run of the operation takes `factor` times as long."""
        if self._factor <= 1.0:
            return self._device.measure(operation, repeats=repeats, warmup=warmup)

        def slow() -> None:
            start = time.perf_counter()
            operation()
            self._device.synchronize()
            time.sleep((time.perf_counter() - start) * (self._factor - 1.0))

        return self._device.measure(slow, repeats=repeats, warmup=warmup)


def flip_bit(torch: Any, host: Any) -> Any:
    """
    A copy of a tensor on the CPU with one bit of its middle element flipped.

    Of a float the highest bit of the exponent, so that no rounding hides it; of an integer one in the middle.
    """
    by_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    copy = host.clone()
    size = copy.element_size()
    bit = 8 * size - 2 if copy.is_floating_point() else 4 * size - 1
    flat = copy.view(-1)
    if size not in by_size or copy.is_complex() or copy.dtype == torch.bool:
        flat = flat.view(torch.uint8)
        size, bit = 1, 0
    words = flat.view(by_size[size])
    index = words.numel() // 2
    words[index] = words[index] ^ (1 << bit)
    return copy


def faulty(device: Device, faults: Sequence[Fault]) -> Device:
    """The device as `faults` make it; itself where none concerns it."""
    factor = max((fault.value or 1.0 for fault in faults if fault.kind == "slow"), default=1.0)
    corrupt = any(fault.kind == "corrupt" for fault in faults)
    if device.members and (corrupt or factor > 1.0):
        members = tuple(
            faulty(
                member, [one for one in faults if one.kind == "corrupt" and one.hits(one.check, (member.target, name))]
            )
            for name, member in ((f"rank:{rank}", member) for rank, member in enumerate(device.members))
        )
        return FaultyDevice(device, factor=factor, corrupt=False, members=members)
    return FaultyDevice(device, factor=factor, corrupt=corrupt) if corrupt or factor > 1.0 else device
