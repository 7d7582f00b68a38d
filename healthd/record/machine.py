"""Each kind of reading of a machine, one after the other."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import stat
import tempfile
from pathlib import Path

from checks.host.container import in_container
from checks.host.identity import on_ec2
from checks.host.machine import HostError
from checks.host.metadata import may_ask
from checks.system.scheduled_events import MAINTENANCE, REBALANCE, SPOT
from healthd import __version__
from healthd.record.copying import Copier
from healthd.record.sources import (
    DEVICE_FILES,
    DPKG,
    HOLDS,
    LINKED,
    PACKAGES,
    PCI,
    PCI_VENDORS,
    PLACES,
    PLAIN,
    PROCESS,
    REMOVED,
    RPM_DATABASES,
    TREES,
    redact_line,
)
from healthd.record.tools import TOOLS, ToolRun, program_text, run_tool

MAX_LOG_LINES = 20_000
MAX_LOG_BYTES = 2 << 20
MAX_PROCESSES = 8192
_MAX_PROCESS_BYTES = 8192  # of one file about a process
_MAX_PACKAGES_BYTES = 16 << 20


def record_machine(copier: Copier, *, tools: bool) -> None:
    """All of it. Raises OSError where the recording cannot be written."""
    for place in PLACES:
        if copier.host.exists(place):
            copier.real(place).mkdir(parents=True, exist_ok=True)
    record_calls(copier)
    record_view(copier)
    record_name(copier)
    record_log(copier)
    for pattern in PLAIN:
        for path in copier.glob(pattern):
            copier.copy(path)
    record_packages(copier)
    record_nodes(copier)
    if tools:
        record_tools(copier)
    record_sysfs(copier)
    record_processes(copier)
    said = {
        "healthd": __version__,
        "recorded_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "files": copier.made.files,
        "bytes": copier.made.bytes,
        "left_out": copier.made.left_out,
        "removed": REMOVED,
    }
    copier.write("/recording.json", json.dumps(said, indent=1).encode())


def record_calls(copier: Copier) -> None:
    """`host.json`: what the kernel says by calls and not by files."""
    host = copier.host
    systems: dict[str, object] = {}
    for path in PLACES:
        with contextlib.suppress(HostError):
            systems[path] = host.file_system(path)._asdict()
    limits: dict[str, float | None] = {}
    for name in ("nofile", "memlock"):
        with contextlib.suppress(HostError):
            value = host.process_limit(name)
            limits[name] = None if value == float("inf") else value
    minors = {path: host.device_minor(path) for path in copier.glob("/dev/neuron*")}
    # Said here and not by its signs: variables and other namespaces are no files.
    said: dict[str, object] = {"file_systems": systems, "limits": limits, "container": in_container(host)}
    if known := {path: minor for path, minor in minors.items() if minor is not None}:
        said["minors"] = known
    try:
        said["clock"] = host.clock()._asdict()
    except HostError as error:
        copier.made.left_out["the clock's state"] = str(error)
    record_events(copier, said)
    copier.write("/host.json", json.dumps(said, indent=1).encode())


def record_events(copier: Copier, said: dict[str, object]) -> None:
    """What EC2 has scheduled, with the time at which it was asked; nothing where this is not EC2."""
    here = on_ec2(copier.host)
    if not here or not may_ask(None, on_ec2=here):
        return
    try:
        said["metadata"] = copier.host.metadata((MAINTENANCE, REBALANCE, SPOT))
        said["time"] = copier.host.epoch_seconds()
    except HostError as error:
        copier.made.left_out["events scheduled by EC2"] = str(error)


def record_view(copier: Copier) -> None:
    """From where the machine is looked at: the PID namespace."""
    namespace = copier.host.pid_namespace()
    if namespace is None:
        copier.made.left_out["/proc/self/ns/pid"] = "not told, so holders of devices are unknown in this recording"
    else:
        copier.write("/proc/self/ns/pid", f"{namespace}\n".encode())


def record_name(copier: Copier) -> None:
    """The host's name, with the addresses that it resolves to here: elsewhere it may resolve to others."""
    hosts = copier.text("/etc/hosts")
    try:
        name = copier.host.host_name()
        copier.write("/etc/hostname", f"{name}\n".encode())
        addresses = copier.host.resolve(name)
    except HostError as error:
        copier.made.left_out["addresses of the host's name"] = str(error)
        return
    rows = "".join(f"{address}\t{name}\n" for address in addresses if not _has_row(hosts, address, name))
    between = "\n" if rows and hosts and not hosts.endswith("\n") else ""
    copier.write("/etc/hosts", f"{hosts}{between}{rows}".encode())


def record_log(copier: Copier) -> None:
    """The kernel log as text, the newest lines."""
    try:
        lines = copier.host.kernel_log()
    except HostError as error:
        copier.unreadable("/dev/kmsg", error)
        return
    texts = [
        redact_line(text) if seconds is None else f"[{seconds:12.6f}] {redact_line(text)}"
        for seconds, text in lines[-MAX_LOG_LINES:]
    ]
    data = "".join(f"{text}\n" for text in texts).encode()
    if len(data) > MAX_LOG_BYTES:
        data = data[-MAX_LOG_BYTES:].partition(b"\n")[2]
    missing = len(lines) - data.count(b"\n")
    if missing > 0:
        copier.made.left_out["/dev/kmsg"] = f"the oldest {missing} of {len(lines)} lines"
    copier.write("/dev/kmsg", data)


def record_sysfs(copier: Copier) -> None:
    """Attributes of devices, with the links between them."""
    for pattern in LINKED:
        for path in copier.glob(pattern):
            copier.copy_linked(path)
    for path in copier.glob("/sys/bus/pci/devices/*"):
        if copier.text(f"{path}/vendor").strip() in PCI_VENDORS:
            for name in PCI:
                copier.copy_linked(f"{path}/{name}")
    for tree in TREES:
        if copier.host.exists(tree):
            copier.copy_tree(tree)


def record_processes(copier: Copier) -> None:
    """Names, states and which devices they have open; no arguments, no environment."""
    try:
        entries = [entry for entry in copier.host.listdir("/proc") if entry.isdecimal()]
    except HostError as error:
        copier.made.left_out["/proc"] = str(error)
        return
    if len(entries) > MAX_PROCESSES:
        copier.made.left_out["/proc/*"] = f"{len(entries) - MAX_PROCESSES} of {len(entries)} processes"
    blind = 0
    for entry in entries[:MAX_PROCESSES]:
        if copier.full(f"/proc/{entry}"):
            break
        for name in PROCESS:
            with contextlib.suppress(HostError):
                text = copier.host.read(f"/proc/{entry}/{name}", max_bytes=_MAX_PROCESS_BYTES)
                copier.write(f"/proc/{entry}/{name}", text.encode())
        blind += not _record_holds(copier, entry)
    if blind:
        copier.made.left_out["/proc/*/fd"] = f"{blind} processes may not be looked into; run as root"


def _record_holds(copier: Copier, entry: str) -> bool:
    """
    The links of open files that are devices; other files are nobody's business.

    False where it may not be seen.
    """
    folder = f"/proc/{entry}/fd"
    try:
        descriptors = copier.host.listdir(folder)
    except HostError as error:
        return error.reason != "NoPermission"
    for descriptor in descriptors:
        with contextlib.suppress(HostError):  # closed meanwhile
            name = os.path.basename(copier.host.readlink(f"{folder}/{descriptor}"))
            if HOLDS.fullmatch(name):
                copier.link(f"{folder}/{descriptor}", f"/dev/{name}")
    return True


def record_packages(copier: Copier) -> None:
    """The record that dpkg keeps, of the packages that matter; of rpm's database only that it is there."""
    for path in RPM_DATABASES:
        if copier.host.exists(path):
            copier.write(path, b"")
    try:
        text = copier.host.read(DPKG, max_bytes=_MAX_PACKAGES_BYTES)
    except HostError as error:
        if error.reason == "NoPermission":
            copier.unreadable(DPKG, error)
        return
    parts = (part.strip("\n") for part in text.split("\n\n"))
    wanted = [part for part in parts if PACKAGES.match(part.removeprefix("Package:").strip())]
    copier.write(DPKG, ("\n\n".join(wanted) + "\n").encode())


def record_nodes(copier: Copier) -> None:
    """Device nodes as empty files with their rights; none is opened."""
    for pattern in DEVICE_FILES:
        for path in copier.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                mode = os.stat(copier.host.path(path)).st_mode
                if not stat.S_ISDIR(mode):
                    copier.write(path, b"", stat.S_IMODE(mode) & 0o777)


def record_tools(copier: Copier) -> None:
    """What the vendors' tools say, as programs that say it again."""
    runs: dict[str, list[ToolRun]] = {}
    with tempfile.TemporaryDirectory(prefix="healthd-record-") as folder:
        wanted = [t for t in TOOLS if not t.only_with or any(copier.host.exists(path) for path in t.only_with)]
        for tool in wanted:
            run = None if copier.full(f"/bin/{tool.name}") else run_tool(copier.host, tool, Path(folder))
            if run is not None:
                runs.setdefault(tool.name, []).append(run)
    for name in dict.fromkeys(tool.name for tool in wanted):
        if name in runs:
            copier.write(f"/bin/{name}", program_text(name, runs[name]).encode(), 0o755)
        else:
            copier.made.left_out[f"/bin/{name}"] = "not installed"


def _has_row(hosts: str, address: str, name: str) -> bool:
    """Whether /etc/hosts gives this address to the name."""
    rows = (line.split("#")[0].split() for line in hosts.splitlines())
    return any(row[:1] == [address] and name in row[1:] for row in rows)
