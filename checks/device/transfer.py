"""The `transfer` probe: data comes back from the device as it went."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Profile, Status, check
from checks.device.probes import labelled_limit, new_seed, per_second
from checks.limits import within
from checks.peers import median
from checks.profiling.operations import with_profile


@dataclass(frozen=True)
class Params:
    size_bytes: int = 16 * 2**20
    """How much goes there and back; larger than most caches of one core."""
    repeats: int = 5
    """Timed copies each way; the median counts."""
    seed: int | None = None
    """Of the random data; None: a new one each run, shown in the message."""


@check(tier="quick", interval_seconds=3600, timeout_seconds=60, scope="device")
def transfer(ctx: Context[Params]) -> Iterator[Finding | Profile]:
    """
    Random bytes survive the copy from host to device and back, and the copy is fast.

    Reads:   the device, by copies of 16 MiB in each direction.
    Judges:  fail WrongResult (a byte differs) | fail SlowDevice (below `transfer_bytes_per_second`, or
             `transfer_bytes_per_second/device_to_host` for one direction) | pass with bytes/s of each direction.
    Cost:    under 0.1 s; 48 MiB of memory.
    Source:  own; on a CPU, where host and device memory are one, it copies between buffers.
    Unverified: GPUs and Neuron devices, so any copy over a bus. It has run on CPUs and on XLA's CPU device.
    """
    device = ctx.device
    if device is None:
        raise ValueError("transfer needs a device; run it in a device's worker")
    torch, params = device.torch, ctx.params
    count = max(1, params.size_bytes // 8)
    seed = new_seed(params.seed)
    # Random 64-bit words that travel as 32-bit ones: some devices have no 64-bit integers and would cut them.
    sent = torch.empty(count, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    sent = sent.view(torch.int32)
    there = torch.empty(2 * count, dtype=torch.int32, device=device.torch_device)
    back = torch.zeros(2 * count, dtype=torch.int32)
    for direction, text, copy, landed in (
        ("host_to_device", "host to device", lambda: there.copy_(sent), there),
        ("device_to_host", "device to host", lambda: back.copy_(there), back),
    ):
        seconds = device.measure(copy, repeats=params.repeats, warmup=1)
        name = "transfer_bytes_per_second"
        finding = within(
            per_second(count * 8, median(seconds)),
            name=name,
            target=device.target,
            limit=labelled_limit(ctx, name, direction, device.target),
            reason="SlowDevice",
            subject=f"{count * 8} bytes {text} exact (seed {seed}),",
            labels={"direction": direction},
        )
        found = device.read(landed)
        if not torch.equal(found, sent):
            differs = (found != sent).nonzero().flatten()
            message = (
                f"{text}: {differs.numel()} of {2 * count} words of 4 bytes differ after the copy, the first at byte "
                f"{int(differs[0]) * 4} (seed {seed})"
            )
            finding = dataclasses.replace(
                finding, status=Status.FAIL, reason="WrongResult", message=message, blame=None, action=None
            )
        yield from with_profile(ctx, device, f"transfer {direction}", copy, median(seconds), [finding])
