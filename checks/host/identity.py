"""
Who this machine is: boot, instance and versions. No judgement.

The instance type comes from configuration, else the instance metadata service (version 2), else the firmware's tables
(DMI), else what the accelerator's own tool said. The service is asked only on EC2, and only for what the firmware does
not tell: on Nitro, which all types with accelerators are, it tells both, and no request leaves the machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from checks.accelerators import descriptors
from checks.catalog import type_name
from checks.host.machine import Host, HostError
from checks.host.metadata import endpoint_of, fetch, may_ask

# On EC2's Nitro machines the firmware tables carry both; elsewhere they say something else, or nothing.
_DMI = "/sys/devices/virtual/dmi/id"

_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")


class Metadata(NamedTuple):
    """What the instance metadata service says; None for what it does not, or says in a form that cannot be right."""

    instance_type: str | None
    instance_id: str | None


def read_identity(
    host: Host,
    *,
    configured: str | None = None,
    inventory: Mapping[str, Any] | None = None,
    imds: bool | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    boot_id, instance_id, instance_type (None where unknown), its origin (config, imds, dmi, tool), on_ec2, versions.

    `configured` is the operator's word for the type and wins over all. `inventory` may hold the `instance_type` that
    the accelerator's tool said. `imds` False never asks the metadata service, True always does, None as `HEALTHD_IMDS`
    says (`off`, `on`: also where this does not look like EC2), else on EC2 alone. `endpoint` is for tests: without it
    nothing is ever asked about a machine that is data.
    """
    here = on_ec2(host)
    asset = (_line(host, f"{_DMI}/board_asset_tag") or "") if here else ""
    instance_id = asset if _INSTANCE_ID.fullmatch(asset) else None
    said = type_name(_line(host, f"{_DMI}/product_name")) if here else None
    metadata = Metadata(None, None)
    told = instance_id is not None and (configured or said) is not None
    if (imds or not told) and may_ask(imds, on_ec2=here) and (endpoint is not None or host.root is None):
        metadata = ask_metadata(endpoint)
    instance_type, origin = _first(
        (type_name(configured), "config"),
        (metadata.instance_type, "imds"),
        (said, "dmi"),
        (type_name((inventory or {}).get("instance_type")), "tool"),
    )
    versions = {"python": sys.version.split()[0]}
    kernel = _line(host, "/proc/sys/kernel/osrelease")
    if kernel:
        versions["kernel"] = kernel
    for kind in descriptors():
        versions.update(kind.read_versions(host) if kind.read_versions is not None else {})
        lines = {name: _line(host, path) for name, path in kind.version_files.items()}
        versions.update({name: line for name, line in lines.items() if line})
    return {
        "boot_id": _line(host, "/proc/sys/kernel/random/boot_id"),
        "instance_id": metadata.instance_id or instance_id,
        "instance_type": instance_type,
        "instance_type_origin": origin,
        "on_ec2": here or metadata.instance_type is not None,
        "versions": versions,
    }


def ask_metadata(endpoint: str | None = None) -> Metadata:
    """Type and id of the instance from the metadata service; never raises, see `checks.host.metadata.fetch`."""
    found = fetch(endpoint or endpoint_of(), ("instance-type", "instance-id"))
    name = found.get("instance-id") or ""
    return Metadata(type_name(found.get("instance-type")), name if _INSTANCE_ID.fullmatch(name) else None)


def on_ec2(host: Host) -> bool:
    """Whether the firmware says that this is a machine of EC2; no request leaves it."""
    return "amazon" in (_line(host, f"{_DMI}/sys_vendor") or "").lower()


def _first(*choices: tuple[str | None, str]) -> tuple[str | None, str | None]:
    return next(((value, origin) for value, origin in choices if value is not None), (None, None))


def _line(host: Host, path: str) -> str | None:
    """The one line of a small file; None where it cannot be read or is empty."""
    try:
        return host.read(path).strip() or None
    except HostError:
        return None
