"""
Which of the host's devices each device is that can be used here. No accelerator of its own.

sysfs and the kernel log speak of the host's devices, also inside a container that was given a part of them, while
/dev and neuron-ls may number that part anew. To take one number for the other would read the counters of somebody
else's device.

Source: aws-neuron-driver, neuron_cdev.c (ncdev_create_device_node: the minor number of /dev/neuronN is the driver's
index of the device); fw_io_topology (neighbours are told by the driver's indices).
Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.accelerators.neuron.sysfs import SysfsDevice
from checks.host.container import in_container
from checks.host.machine import Host

DEVICE_FILE = "/dev/neuron{index}"

Links = Mapping[int, "Sequence[int] | None"]


def find_host_indices(host: Host, links: Links, shown: Sequence[SysfsDevice] | None) -> dict[int, int | None]:
    """
    The host's index of each device; None where it cannot be told.

    `links` are the devices of a listing by the number that it gives them, with their neighbours; `shown` is what sysfs
    shows. The minor number of the device's file tells; outside of a container every number is the host's.
    """
    minors = {number: host.device_minor(DEVICE_FILE.format(index=number)) for number in links}
    if not in_container(host):
        return {number: number if minor is None else minor for number, minor in minors.items()}
    guessed = match_neighbours(links, shown)
    found = {number: guessed[number] if minor is None else minor for number, minor in minors.items()}
    told = [index for index in found.values() if index is not None]
    # Two devices cannot be one of the host's.
    return {number: index if index is None or told.count(index) == 1 else None for number, index in found.items()}


def match_neighbours(links: Links, shown: Sequence[SysfsDevice] | None) -> dict[int, int | None]:
    """
    The devices of sysfs by their neighbours, where only one has the same; pure.

    Without neighbours the numbers are the host's where they are those of all devices that sysfs shows.
    """
    by_links: dict[frozenset[int], list[int]] = {}
    for device in shown or ():
        by_links.setdefault(frozenset(device.connected_to or ()), []).append(device.number)
    whole = set(links) == {device.number for device in shown or ()}
    found: dict[int, int | None] = {}
    for number, neighbours in links.items():
        same = by_links.get(frozenset(neighbours), []) if neighbours else []
        found[number] = same[0] if len(same) == 1 else number if whole and not neighbours else None
    return found
