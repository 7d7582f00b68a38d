"""
Applies injected faults where real ones act, below the code that judges: the check's generator, its device, its output.

Nothing here decides what a fault means for the node: the check, its judge and the runner find that out as they do for a
real one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from checks.contract import Device, Evidence, Finding, Mesh, MeshOperation, Profile, Progress, Status
from checks.worker.faults import Fault

Item = Finding | Evidence | Progress | Profile


def apply_faults(
    faults: Sequence[Fault], items: Callable[[], Iterator[Item]], *, target: str, group: bool, output: int
) -> Iterator[Item]:
    """
    What a check yields while `faults` are in force.

    `items` starts the check; `target` is its target; `output` is the descriptor of results. In a group a rank hangs,
    crashes or sends garbage after it has joined and before it enters its first operation: the others wait there.
    """
    kinds = {fault.kind for fault in faults}
    if "absent" in kinds:
        sleep_forever()
    sudden = kinds & {"hang", "crash", "garbage"}
    if sudden and not group:
        _end_suddenly(sudden, output)
    factor = max((fault.value or 1.0 for fault in faults if fault.kind == "slow"), default=1.0)
    # With a device, the device is slow; a check without one is slow at every step.
    stream = items() if factor <= 1.0 or target != "node" else _slowed(items(), factor)
    for item in stream:
        if sudden and isinstance(item, Progress) and item.event == "entered":
            _end_suddenly(sudden, output)
        yield item
    if sudden:  # a group check that never reports what it enters
        _end_suddenly(sudden, output)
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


def _end_suddenly(kinds: Collection[str], output: int) -> None:
    """End or hang the check: crash, else garbage, else hang."""
    if "crash" in kinds:
        os.abort()
    if "garbage" in kinds:
        write_garbage(output)
    sleep_forever()


def sleep_forever() -> None:
    """Hang like a driver, until killed."""
    while True:
        time.sleep(3600)


def write_garbage(output: int) -> None:
    """Write a line of garbage, then a megabyte without an end of line."""
    os.write(output, b"\x00\xff this is no result\n")
    junk = b"\xa5" * 65536
    for _ in range(16):
        os.write(output, junk)


class FaultyDevice:
    """
    A device that is slow, or that flips one bit of one element of the first tensor that the host reads.

    `places` are those of a training step that it corrupts, with their magnitudes (see `checks.training.step`);
    `one_in` says for some of them that they are hit in one step of so many. Everything else is done by the real device.
    See `checks.contract.Device`.
    """

    def __init__(
        self,
        device: Device,
        *,
        factor: float,
        corrupt: bool,
        members: tuple[Device, ...] = (),
        places: Mapping[str, float | None] | None = None,
        one_in: Mapping[str, int] | None = None,
    ) -> None:
        self.members = members
        self.places = dict(places or {})
        self.one_in = dict(one_in or {})
        self.matmul_rows = device.matmul_rows
        self.target = device.target
        self.key = device.key
        self.torch: Any = device.torch
        self.torch_device: Any = device.torch_device
        self._device = device
        self._factor = factor
        self._corrupt = corrupt
        self._working_since: float | None = None

    def __getattr__(self, name: str) -> Any:
        """What an accelerator tells of its devices beyond the contract (`fallbacks`, `narrow_sums`)."""
        return getattr(self._device, name)

    @property
    def collective_backend(self) -> str:
        """See `Device`; read only on demand, because a device may have none."""
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
        """The tensor on the host; in the first one, one bit is flipped where the fault is `corrupt`."""
        host = self._device.read(tensor)
        self._working_since = time.perf_counter()  # the host's work on what it has read is not work of the device
        if not self._corrupt or host.numel() == 0:
            return host
        self._corrupt = False
        return flip_bit(self.torch, host)

    def collective(self, name: str, contributions: Any) -> MeshOperation:
        """See `Mesh.collective`; corruption happens when a member reads the result."""
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
    """The device with `faults` applied; the device itself where none concerns it."""
    factor = max((fault.value or 1.0 for fault in faults if fault.kind == "slow"), default=1.0)
    corrupt = any(fault.kind == "corrupt" and fault.place is None for fault in faults)
    places = {fault.place: fault.value for fault in faults if fault.place is not None}
    if device.members and (corrupt or places or factor > 1.0):
        members = tuple(
            faulty(
                member, [one for one in faults if one.kind == "corrupt" and one.hits(one.check, (member.target, name))]
            )
            for name, member in ((f"rank:{rank}", member) for rank, member in enumerate(device.members))
        )
        return FaultyDevice(device, factor=factor, corrupt=False, members=members)
    if not (corrupt or places or factor > 1.0):
        return device
    one_in = {fault.place: fault.one_in for fault in faults if fault.place is not None and fault.one_in is not None}
    return FaultyDevice(device, factor=factor, corrupt=corrupt, places=places, one_in=one_in)
