"""The device files of the accelerator: whether they are there, and whether this user may use them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from checks.accelerators.neuron.ls import DEVICE_FILE
from checks.contract import NO_LIMIT, Context, Finding, NoParams, Status, check
from checks.host.container import has_own_dev
from checks.limits import within
from checks.system.neuron.neuron_scope import not_concerned, numbers, unknown


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def device_permissions(ctx: Context[NoParams]) -> Iterator[Finding]:
    """
    Every Neuron device has its file in /dev, and the user that checks run as may read and write it.

    The check looks at the files without opening them, because opening one uses the device. So it does not see the rules
    that can deny a container access to a device whose file it has. A container with its own /dev whose sysfs shows more
    devices than it has files was given a share of them, which is not a fault.

    Reads:   the rights of /dev/neuron*; which devices there are from the inventory.
    Judges:  fail MissingDevice (no file for a device that the driver shows) | unknown NoPermission (no right to it),
             NoData (no device is shown) | skip NotApplicable (no Neuron devices).
    Cost:    under 1 ms; harmless to jobs.
    Unverified on hardware: the names of the files are those of AWS's documentation.
    """
    other = not_concerned(ctx)
    if other is not None:
        yield other
        return
    listed = {int(device["index"]) for device in ctx.inventory.get("devices") or ()}
    shown = set(ctx.inventory.get("sysfs_indices") or ())
    wanted = sorted(listed if has_own_dev(ctx.host) else listed | shown)
    if not wanted:
        yield unknown("NoData", "the driver shows no device, so no device file can be checked; see device_count")
        return
    usable = {index: ctx.host.may_use(DEVICE_FILE.format(index=index)) for index in wanted}
    for index in (index for index, right in usable.items() if right is None):
        path = DEVICE_FILE.format(index=index)
        text = (
            f"{path} is missing although the driver shows the device; run `udevadm trigger`, or give it to the "
            "container"
        )
        yield Finding(status=Status.FAIL, reason="MissingDevice", message=text, target=f"neuron:{index}")
    barred = [index for index, right in usable.items() if right is False]
    if barred:
        yield _barred(barred)
    if all(usable.values()):
        yield within(
            float(len(usable)),
            name="usable_device_files_count",
            target="node",
            limit=NO_LIMIT,
            reason="NoPermission",
            subject=f"/dev/neuron files that {_user()} can read and write ({numbers(wanted)}):",
        )


def _barred(indices: list[int]) -> Finding:
    """One finding for all: one rule bars them together."""
    files = DEVICE_FILE.format(index=indices[0] if len(indices) == 1 else f"{{{numbers(indices)}}}")
    text = (
        f"{_user()} cannot read and write {files}; give the files mode 0666 as the driver's udev rule does, add the "
        "user to their group, or run as root"
    )
    return unknown("NoPermission", text, f"neuron:{indices[0]}" if len(indices) == 1 else "node")


def _user() -> str:
    return f"user {os.geteuid()}"
