"""
Which versions of AWS's Neuron software are here: the driver that is loaded, and what the package manager installed.

`modinfo` and dkms are not asked: after a reload that failed they name a driver that is not the one at work. What an
interpreter has of Python packages is not looked at either: a job brings its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from checks.host.machine import Host, HostError, LogLine

LOADED = "/sys/module/neuron/version"
PACKAGES: Mapping[str, str] = {
    "driver": "aws-neuronx-dkms",
    "runtime": "aws-neuronx-runtime-lib",
    "collectives": "aws-neuronx-collectives",
    "tools": "aws-neuronx-tools",
}

_DPKG = "/var/lib/dpkg/status"
_DPKG_BYTES = 64 << 20  # a full server's is 4 MB
_RPM = ("/var/lib/rpm", "/usr/lib/sysimage/rpm")
_RPM_FILES = ("rpmdb.sqlite", "Packages", "Packages.db")
_RPM_SECONDS = 5.0
_PARTS = {package: part for part, package in PACKAGES.items()}
_STARTED = re.compile(r"Neuron Driver Started with Version:\s*(\S{1,100})")
_VERSION = re.compile(r"(?:\d{1,4}:)?(\d{1,6}(?:\.\d{1,6}){1,5})", re.ASCII)
# Of dpkg: there for all purposes. All others but "config-files" and "not-installed" are installations that broke off.
_WHOLE = ("installed", "triggers-awaited", "triggers-pending")
_GONE = ("config-files", "not-installed")


class Package(NamedTuple):
    """An installed package; `state` is the package manager's word where its installation broke off, else None."""

    version: str
    state: str | None


def read_loaded(host: Host) -> str | None:
    """The version that the loaded driver says of itself; None where there is none, or it may not be read."""
    try:
        return " ".join(host.read(LOADED, max_bytes=4096).split())[:100] or None
    except HostError:
        return None


def find_started(lines: Iterable[LogLine]) -> str | None:
    """The version of the driver that started last, as the kernel log has it; None where no line says so any more."""
    found = None
    for _, text in lines:
        if "Neuron Driver Started" in text and (match := _STARTED.search(text[:1000])):
            found = match[1]
    return found


def read_packages(host: Host) -> dict[str, Package] | None:
    """
    The Neuron packages by what they are (`PACKAGES`), without those that are not installed.

    None where there is neither dpkg nor rpm. Raises HostError where there is, and it cannot be read.
    """
    if host.exists(_DPKG):
        return parse_dpkg(host.read(_DPKG, max_bytes=_DPKG_BYTES))
    if any(host.exists(f"{folder}/{file}") for folder in _RPM for file in _RPM_FILES):
        asked = ["rpm", "-q", "--qf", "%{NAME} %{VERSION}\\n", *PACKAGES.values()]
        ended = host.run(asked, timeout_seconds=_RPM_SECONDS)
        packages = parse_rpm(ended.stdout)
        # It exits with the number of packages that are not installed, and also says so when its database is broken.
        if "error:" in ended.stderr or (ended.returncode and "not installed" not in ended.stdout):
            words = ended.stderr.strip().rpartition("\n")[2][:200]
            raise HostError("NoData", f"rpm failed: {words or f'exit status {ended.returncode}'}")
        return packages
    return None


def parse_dpkg(text: str) -> dict[str, Package]:
    """The Neuron packages in dpkg's status file: paragraphs of `Name: value`, parted by empty lines."""
    found: dict[str, Package] = {}
    text = f"\n{text}"
    for package, part in _PARTS.items():
        start = text.find(f"\nPackage: {package}\n")
        if start < 0:
            continue
        fields: dict[str, str] = {}
        for line in text[start + 1 : start + 65536].partition("\n\n")[0].splitlines():
            name, colon, value = line.partition(": ")
            if colon and not line.startswith(" "):
                fields.setdefault(name, value.strip())
        words = fields.get("Status", "").split()
        state = words[-1] if words else "unknown state"
        version = fields.get("Version", "")[:100]
        if state not in _GONE:
            found[part] = Package(version or "unknown", None if state in _WHOLE and version else state)
    return found


def parse_rpm(text: str) -> dict[str, Package]:
    """Lines of `NAME VERSION`; those that say that a package is not installed have more words."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in _PARTS:
            found[_PARTS[words[0]]] = Package(words[1][:100], None)
    return found


def parse_version(text: str) -> tuple[int, ...] | None:
    """(2, 30, 2, 0) of `2.30.2.0-8a6f`: no epoch, and nothing after the numbers; None where it begins otherwise."""
    match = _VERSION.match(text)
    return tuple(int(number) for number in match[1].split(".")) if match else None


def same_version(one: str, other: str) -> bool | None:
    """Whether two ways of writing a version mean the same, as far as both say; None where one is not understood."""
    left, right = parse_version(one), parse_version(other)
    return None if left is None or right is None else all(a == b for a, b in zip(left, right, strict=False))


def read_all(host: Host) -> dict[str, str]:
    """
    `neuron_driver` (the loaded one), `neuron_runtime`, `neuron_collectives` and `neuron_tools`, as far as known.

    Empty, without a look at the packages, where no Neuron driver is loaded.
    """
    loaded = read_loaded(host)
    if loaded is None:
        return {}
    try:
        packages = read_packages(host) or {}
    except HostError:
        packages = {}
    found = {f"neuron_{part}": package.version for part, package in packages.items() if package.state is None}
    return {**found, "neuron_driver": loaded}
