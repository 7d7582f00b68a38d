"""
What is recorded of a machine, in one place: what checks read, bounds, and what must not be recorded.

A check that reads another file needs a row here, or a recorded machine cannot say what the machine said.
"""

from __future__ import annotations

import re

from healthd.core.redaction import GONE, redact

# Written under the same name, links followed.
PLAIN = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/uptime",
    "/proc/self/mountinfo",
    "/proc/net/fib_trie",
    "/proc/net/if_inet6",
    "/proc/sys/fs/file-nr",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/random/boot_id",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/gpus/*/information",
    "/etc/fstab",
    "/etc/hosts",
    "/etc/os-release",
)
# Of PCI devices of these vendors (Amazon, NVIDIA).
PCI_VENDORS = ("0x1d0f", "0x10de")
PCI = (
    "vendor",
    "device",
    "class",
    "numa_node",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "uevent",
)
PROCESS = ("comm", "stat", "status", "wchan")

# With the links of sysfs kept: which device a class member belongs to is said by links alone.
LINKED = (
    "/sys/class/neuron_device/*",
    *(f"/sys/class/infiniband/*/device/{name}" for name in PCI),  # other files there are windows into the device
    "/sys/class/infiniband/*/ports/*/*",
    "/sys/class/infiniband/*/ports/*/hw_counters/*",
    "/sys/class/infiniband/*/hw_counters/*",
    "/sys/class/infiniband_verbs/*/ibdev",
    "/sys/devices/virtual/dmi/id/sys_vendor",
    "/sys/devices/virtual/dmi/id/product_name",
    "/sys/devices/virtual/dmi/id/board_asset_tag",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/module/neuron/version",
    "/sys/module/efa/version",
    "/sys/module/nvidia/version",
    "/sys/fs/ext4/*/errors_count",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory.stat",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    "/sys/fs/cgroup/memory/memory.stat",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/device",
)
TREES = ("/sys/devices/virtual/neuron_device",)
NOT_IN_TREES = frozenset(
    {
        "memory_usage",  # half of all files, and no check reads them
    }
)
DEVICE_FILES = ("/dev/neuron*", "/dev/nvidia*", "/dev/infiniband/uverbs*")
HOLDS = re.compile(r"(neuron|nvidia)\d+")
# Directories whose being there is a reading.
PLACES = ("/", "/tmp", "/var", "/dev/shm", "/sys/class", "/sys/module", "/proc")

DPKG = "/var/lib/dpkg/status"
RPM_DATABASES = tuple(
    f"{folder}/{file}"
    for folder in ("/var/lib/rpm", "/usr/lib/sysimage/rpm")
    for file in ("rpmdb.sqlite", "Packages", "Packages.db")
)
PACKAGES = re.compile(r"(aws-neuron|aws-ofi|efa|libfabric|rdma|nvidia|cuda|libnccl|openmpi)")

REMOVED = "command lines beyond a program's name, the boot's command line, audit records, users and passwords of mounts"

_SECRET_OPTION = re.compile(
    r"\b(password|passwd|pass|credentials|cred|username|user|secret|key|token)=[^,\s]+", re.IGNORECASE
)
_SECRET_LINES = (
    (
        re.compile(r"(command line:|kernel command line parameters|with environment:).*", re.IGNORECASE),
        r"\1 (left out)",
    ),
    (re.compile(r"^(audit: |(audit: )?type=\d+ audit\().*"), "audit: (left out)"),
)


def redact_line(text: str) -> str:
    """A line of the kernel log without what may hold secrets: parameters of the boot, audit records."""
    for pattern, instead in _SECRET_LINES:
        text = pattern.sub(instead, text)
    return redact(text)


def redact_mounts(text: str) -> str:
    """Mounts or /etc/fstab without names and passwords of users."""
    return redact(_SECRET_OPTION.sub(rf"\1={GONE}", text))
