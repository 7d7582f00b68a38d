"""
What DRA drivers publish in ResourceSlices, and which of it is the device that is at fault. Pure.

Names and attributes of devices: kubernetes-sigs/dra-driver-nvidia-gpu `cmd/gpu-kubelet-plugin/deviceinfo.go`, and the
Neuron DRA driver as seen on EKS, which names its devices `neuron-device-N`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.accelerators import descriptors
from healthd.clients.kubernetes import members, records
from healthd.core.model import DeviceRecord

PCI_ADDRESS = "resource.kubernetes.io/pciBusID"
_NEURON_DRIVER, _NEURON_DEVICE = "neuron.aws.com", re.compile(r"neuron-device-(\d{1,4})")


@dataclass(frozen=True, kw_only=True)
class PublishedDevice:
    """A device as its driver publishes it. `attributes` are texts alone; `taints` are the effects of the driver's."""

    driver: str
    pool: str
    name: str
    attributes: Mapping[str, str]
    taints: tuple[str, ...] = ()

    def attribute(self, name: str) -> str | None:
        """By its name; one without a domain is in that of the driver."""
        return self.attributes.get(name) or self.attributes.get(f"{self.driver}/{name}")

    def __str__(self) -> str:
        return f"{self.name} of {self.driver} in pool {self.pool}"


@dataclass(frozen=True, kw_only=True)
class Match:
    """The published device, or why there is none that can be meant alone."""

    device: PublishedDevice | None = None
    why: str = ""


def parse_slices(slices: Iterable[object]) -> tuple[PublishedDevice, ...]:
    """
    The devices of these ResourceSlices (of v1 or v1beta2). A pool counts by its newest generation, and only when all
    slices of that are there.
    """
    pools: dict[tuple[str, str], list[object]] = defaultdict(list)
    for one in slices:
        driver, pool = members(one, "spec", "driver"), members(one, "spec", "pool", "name")
        if isinstance(driver, str) and isinstance(pool, str):
            pools[driver, pool].append(members(one, "spec"))
    found = []
    for (driver, pool), specs in pools.items():
        newest = max(_whole(members(spec, "pool", "generation")) for spec in specs)
        specs = [spec for spec in specs if _whole(members(spec, "pool", "generation")) == newest]
        if len(specs) != _whole(members(specs[0], "pool", "resourceSliceCount")):
            continue
        for device in (device for spec in specs for device in records(spec, "devices")):
            if isinstance(name := device.get("name"), str):
                attributes = _texts(device.get("attributes"))
                effects = tuple(str(taint.get("effect")) for taint in records(device, "taints"))
                found.append(
                    PublishedDevice(driver=driver, pool=pool, name=name, attributes=attributes, taints=effects)
                )
    return tuple(found)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _texts(attributes: object) -> dict[str, str]:
    if not isinstance(attributes, dict):
        return {}
    texts = {str(name): members(value, "string") for name, value in attributes.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def find_device(wanted: DeviceRecord, published: Sequence[PublishedDevice]) -> Match:
    """
    The published device that is `wanted`: by UUID, PCI address, and for Neuron by number.

    All that both sides tell must agree. One that agrees in a part, such as a partition of the same GPU, speaks against
    the match: a taint on the whole does not keep a job off it.
    """
    signs = [(device, _signs(wanted, device)) for device in published]
    touched = [(device, agree) for device, agree in signs if any(agree)]
    if not touched:
        return Match(why=f"no DRA driver publishes {wanted.target} of this node by its UUID, PCI address or number")
    if len(touched) > 1:
        return Match(why=f"{wanted.target} may be {touched[0][0]} or {touched[1][0]}")
    device, agree = touched[0]
    return Match(device=device) if all(agree) else Match(why=f"{wanted.target} matches {device} only in part")


def _signs(wanted: DeviceRecord, device: PublishedDevice) -> tuple[bool, ...]:
    """For each that both sides tell, whether it is the same."""
    found = []
    if wanted.serial and (uuid := device.attribute("uuid")):
        found.append(uuid.casefold() == wanted.serial.casefold())
    if wanted.bdf and (address := device.attributes.get(PCI_ADDRESS)):
        found.append(address.casefold() == wanted.bdf.casefold())
    number = wanted.target.removeprefix("neuron:")
    named = _NEURON_DEVICE.fullmatch(device.name) if device.driver == _NEURON_DRIVER else None
    if named is not None and number != wanted.target:
        found.append(named[1] == number)
    return tuple(found)


def plugin_resource(node: object) -> str | None:
    """A resource of a device plugin by which the node gives accelerators away; rules have no effect on it."""
    ours = tuple(name for one in descriptors() for name in one.kubernetes_resources)
    amounts = members(node, "status", "allocatable")
    if not isinstance(amounts, dict):
        return None
    return next((str(name) for name, amount in amounts.items() if str(name).startswith(ours) and amount != "0"), None)
