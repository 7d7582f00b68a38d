"""
What the readings of EFA interfaces mean: which accelerator uses which, how fast counters rise, what libfabric offers.

Pure: no look at the machine here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from checks.contract import Previous
from checks.host.efa import Adapter, name_at

# The most each counter may rise per second. Source: aws/eks-node-monitoring-agent 1.7.0, efa.go: for more it makes an
# event and marks no node.
RATE_LIMITS: Mapping[str, float] = {
    "rx_drops": 100.0,
    "rdma_write_wr_err": 100.0,
    "rdma_read_wr_err": 100.0,
    "unresponsive_remote_events": 100.0,
    "impaired_remote_conn_events": 100.0,
    "retrans_timeout_events": 100.0,
    "retrans_pkts": 1000.0,
    "retrans_bytes": 1e6,
}
MIN_ELAPSED_SECONDS = 1.0  # over less, one burst is taken for a rate

# The interface of each Trainium device, by the host's numbers. Two devices of trn1 share one. Source:
# aws-neuron/connected-device-maps-over-efa-for-neuron, lookup/neuron/*.json; which file is for which family says
# lookup/config/instance-family-mappings.json. For types that are not listed nothing is published.
_TRN1 = ("10:1a.0", "a0:1a.0", "20:19.0", "90:19.0", "20:1a.0", "90:1a.0", "10:19.0", "a0:19.0")
_TRN2 = (
    "c9:00.0", "b4:00.0", "b3:00.0", "ca:00.0", "6c:00.0", "57:00.0", "56:00.0", "6d:00.0",
    "98:00.0", "83:00.0", "82:00.0", "99:00.0", "f5:00.0", "e0:00.0", "df:00.0", "f6:00.0",
)  # fmt: skip
_TRN1N = (
    "10:17.0", "10:1a.0", "a0:17.0", "a0:1a.0", "20:19.0", "20:18.0", "90:19.0", "90:18.0",
    "20:17.0", "20:1a.0", "90:17.0", "90:1a.0", "10:19.0", "10:18.0", "a0:19.0", "a0:18.0",
)  # fmt: skip
_TRN3 = (
    "be:00.0", "a9:00.0", "a8:00.0", "bf:00.0", "61:00.0", "4c:00.0", "4b:00.0", "62:00.0",
    "8d:00.0", "78:00.0", "77:00.0", "8e:00.0", "ea:00.0", "d5:00.0", "d4:00.0", "eb:00.0",
)  # fmt: skip
MAPS: Mapping[str, tuple[str, ...]] = {
    "trn1.32xlarge": tuple(f"0000:{_TRN1[device // 2]}" for device in range(16)),
    "trn1n.32xlarge": tuple(f"0000:{address}" for address in _TRN1N),
    "trn2.48xlarge": tuple(f"0000:{address}" for address in _TRN2),
    "trn2u.48xlarge": tuple(f"0000:{address}" for address in _TRN2),
    "trn3.48xlarge": tuple(f"0000:{address}" for address in _TRN3),
    "trn3p.48xlarge": tuple(f"0000:{address}" for address in _TRN3),
}


class Rate(NamedTuple):
    """How fast one counter of one port rose since the last look."""

    adapter: str
    counter: str
    per_second: float


def map_devices(
    instance_type: str | None, adapters: Sequence[Adapter], devices: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """
    Targets of devices by the PCI address of the interface that each uses; empty where that cannot be told.

    The published map is taken where all devices of the type are seen (in a container numbers may start anywhere) and
    every interface found stands in it. Else a device uses the one whose bus is nearest; where two are as near, neither.
    """
    table = MAPS.get(instance_type or "")
    known = [adapter.address for adapter in adapters if adapter.address is not None]
    if table is not None and len(devices) == len(table) and set(known) <= set(table):
        mapped = _by_table(table, devices)
        if mapped is not None:
            return mapped
    return _by_bus(known, devices)


def missing_addresses(instance_type: str | None, adapters: Sequence[Adapter]) -> list[str]:
    """Where interfaces of this type should be and none is; empty where no map is known or it is not this machine's."""
    table = MAPS.get(instance_type or "")
    known = {adapter.address for adapter in adapters}
    if table is None or not known <= set(table):
        return []
    return sorted(set(table) - known)


def used_by(targets: Sequence[str] | None) -> str:
    """The end of a message that names the devices which use an interface."""
    return f"; used by {', '.join(targets)}" if targets else ""


def target_at(address: str, adapters: Sequence[Adapter]) -> str:
    """The target of an interface that is not there: by the name that it would have, if the others are named so."""
    named = any(adapter.address and adapter.name == name_at(adapter.address) for adapter in adapters)
    return f"efa:{name_at(address) if named or not adapters else address}"


def counters_of(adapters: Sequence[Adapter]) -> dict[str, dict[str, int]]:
    """The counters of each port (`rdmap16s27/1`), as they are remembered for the next look."""
    return {f"{adapter.name}/{port.number}": dict(port.counters) for adapter in adapters for port in adapter.ports}


def rates(
    now: Mapping[str, Mapping[str, int]], previous: Previous | None, boot_id: str | None
) -> tuple[list[Rate], list[str]]:
    """
    What each counter rose by since the last look of this boot, and the ports whose counters began anew meanwhile.

    A counter that is lower than before was set back (the driver was loaded again): it tells nothing this time.
    """
    if previous is None or not previous.evidence or previous.boot_id != boot_id:
        return [], []
    if not MIN_ELAPSED_SECONDS <= previous.elapsed_seconds < float("inf"):
        return [], []
    before = previous.evidence[-1].data.get("counters")
    found: list[Rate] = []
    anew: set[str] = set()
    for port, counters in now.items():
        earlier = before.get(port) if isinstance(before, dict) else None
        for name, value in counters.items():
            old = earlier.get(name) if isinstance(earlier, dict) else None
            if not isinstance(old, int) or isinstance(old, bool):
                continue
            if value < old:
                anew.add(port)
            else:
                found.append(Rate(port.partition("/")[0], name, (value - old) / previous.elapsed_seconds))
    return [rate for rate in found if not any(port.partition("/")[0] == rate.adapter for port in anew)], sorted(anew)


def parse_fi_info(text: str) -> list[str]:
    """
    The domains of the efa provider in the output of `fi_info -p efa`, without their kind: `rdmap16s27`.

    Blocks begin with `provider: efa` (in old libfabric also `efa;ofi_rxr`), and a domain is `rdmap16s27-rdm`. Blocks of
    other providers do not count.
    """
    found: set[str] = set()
    provider = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "provider":
            provider = value.strip()
        elif key.strip() == "domain" and provider.partition(";")[0] == "efa" and value.strip():
            found.add(re.sub(r"-(rdm|dgrm|direct)$", "", value.strip()))
    return sorted(found)


def _by_table(table: Sequence[str], devices: Sequence[Mapping[str, Any]]) -> dict[str, list[str]] | None:
    mapped: dict[str, list[str]] = {}
    for device in devices:
        index = device.get("host_index", device.get("index"))
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(table):
            return None
        mapped.setdefault(table[index], []).append(str(device.get("target")))
    return mapped


def _by_bus(known: Sequence[str], devices: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    mapped: dict[str, list[str]] = {}
    for device in devices:
        place = _place(device.get("bdf"))
        if place is None:
            continue
        far = sorted((abs(_bus(address) - place[1]), address) for address in known if _domain(address) == place[0])
        if far and (len(far) == 1 or far[0][0] < far[1][0]):
            mapped.setdefault(far[0][1], []).append(str(device.get("target")))
    return mapped


def _place(address: object) -> tuple[int, int] | None:
    """Domain and bus of a PCI address; None where it is none."""
    if not isinstance(address, str) or not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address):
        return None
    return _domain(address), _bus(address)


def _domain(address: str) -> int:
    return int(address.split(":")[0], 16)


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)
