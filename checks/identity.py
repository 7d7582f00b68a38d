"""
Who this machine is: boot, instance and versions, from files alone. No request to a metadata service, no judgement.
"""

from __future__ import annotations

import sys
from typing import Any

from checks.host import Host, HostError

# On EC2's Nitro machines the firmware tables carry both; elsewhere they say something else, or nothing.
_DMI = "/sys/devices/virtual/dmi/id"


def read_identity(host: Host) -> dict[str, Any]:
    """boot_id, instance_id, instance_type (None where unknown) and versions by name."""
    vendor = _line(host, f"{_DMI}/sys_vendor") or ""
    asset = _line(host, f"{_DMI}/board_asset_tag")
    on_ec2 = "amazon" in vendor.lower()
    versions = {"python": sys.version.split()[0]}
    kernel = _line(host, "/proc/sys/kernel/osrelease")
    if kernel:
        versions["kernel"] = kernel
    return {
        "boot_id": _line(host, "/proc/sys/kernel/random/boot_id"),
        "instance_id": asset if on_ec2 and asset and asset.startswith("i-") else None,
        "instance_type": _line(host, f"{_DMI}/product_name") if on_ec2 else None,
        "versions": versions,
    }


def _line(host: Host, path: str) -> str | None:
    """The one line of a small file; None where it cannot be read or is empty."""
    try:
        return host.read(path).strip() or None
    except HostError:
        return None
