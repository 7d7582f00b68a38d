"""
A machine's readings as a directory that `--host-root` replays.

A check that reads a new file needs a row here, or a recorded machine lacks that file. What must not be recorded goes on
the way (`healthd.core.pseudonyms`). Vendors' tools become small programs that print their recorded output.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from checks.accelerators import Tool, descriptors
from checks.accelerators.neuron.versions import PACKAGES
from checks.host.container import in_container
from checks.host.identity import on_ec2
from checks.host.machine import Host, HostError
from checks.host.metadata import may_ask
from checks.system.scheduled_events import MAINTENANCE, REBALANCE, SPOT
from healthd import __version__
from healthd.core.errors import BadInputError
from healthd.core.pseudonyms import redact_line, redact_mounts, redact_output

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
MOUNTS = ("/proc/self/mountinfo", "/etc/fstab")
# Of PCI devices of these vendors (Amazon, NVIDIA).
PCI_VENDORS = ("0x1d0f", "0x10de")
PCI = (
    "vendor",
    "device",
    "class",
    "driver",
    "numa_node",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "uevent",
)
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
NOT_IN_TREES = frozenset({"memory_usage"})  # half of all files, and no check reads them
DEVICE_FILES = ("/dev/neuron*", "/dev/nvidia*", "/dev/infiniband/uverbs*")
HELD = re.compile(r"(neuron|nvidia)\d+")
PROCESS = ("comm", "stat", "status", "wchan")  # no arguments, no environment
# Directories whose being there is a reading.
PLACES = ("/", "/tmp", "/var", "/dev/shm", "/sys/class", "/sys/module", "/proc")

DPKG = "/var/lib/dpkg/status"
RPM_DATABASES = tuple(
    f"{folder}/{file}"
    for folder in ("/var/lib/rpm", "/usr/lib/sysimage/rpm")
    for file in ("rpmdb.sqlite", "Packages", "Packages.db")
)
PACKAGE_NAMES = re.compile(r"(aws-neuron|aws-ofi|efa|libfabric|rdma|nvidia|cuda|libnccl|openmpi)")
RPM = Tool(("rpm", "-q", "--qf", "%{NAME} %{VERSION}\\n", *PACKAGES.values()))
SYSTEM_PACKAGES = ("efa*", "libfabric*", "openmpi*")
FI_INFO = Tool(("fi_info", "-p", "efa"))
# Tried before the ways in which programs are found.
PLACES_OF_TOOLS = {"fi_info": "/opt/amazon/efa/bin/fi_info"}
TOOL_SECONDS = 10.0
STREAM_PERIOD_SECONDS = 5

MAX_BYTES = 64 << 20
MAX_FILES = 60_000  # 128 cores have about 8,000 counters
MAX_FILE_BYTES = 1 << 20
MAX_SECONDS = 60.0
MAX_LOG_LINES = 20_000
MAX_LOG_BYTES = 2 << 20
MAX_PROCESSES = 8192
_MAX_PROCESS_BYTES = 8192  # of one file about a process
_MAX_PACKAGES_BYTES = 16 << 20
_MAX_LINKS = 40  # on the way to one file; the kernel's own bound

REMOVED = "command lines beyond a program's name, the boot's command line, audit records, users and passwords of mounts"


@dataclass
class Recording:
    """What was written, and what was not: path -> why."""

    root: Path
    files: int = 0
    bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def record(host: Host, directory: Path, *, tools: bool = True, seconds: float = MAX_SECONDS) -> Recording:
    """
    Record the machine into a directory that is not there yet, or empty. `tools` False starts no program.

    A new directory is for its owner alone: what is recorded may be readable by root alone. Raises BadInputError where
    the directory holds something, is another user's or cannot be written. What cannot be read is left out, and
    said in `recording.json`.
    """
    copier = Copier(host, directory, max_seconds=seconds)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise BadInputError(f"{directory}: belongs to another user; name a directory that does not exist yet")
        if any(directory.iterdir()):
            raise BadInputError(f"{directory}: is not empty; name a directory that does not exist yet")
        record_machine(copier, tools=tools)
    except OSError as error:
        place = error.filename or directory
        text = f"{place}: {error.strerror or error}; name a writable directory with enough room"
        raise BadInputError(text) from None
    return copier.made


# --- copying: bounded, links kept, nothing opened that is no plain file -----------------------------------------------


class Copier:
    """From a machine into a directory. Paths are those of the machine."""

    def __init__(
        self,
        host: Host,
        directory: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_files: int = MAX_FILES,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.host = host
        self.made = Recording(directory)
        self._max_bytes, self._max_files, self._max_seconds = max_bytes, max_files, max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._written: set[str] = set()
        self._full = False

    def real(self, path: str) -> Path:
        """Where a path of the machine is in the recording."""
        return self.made.root / path.lstrip("/")

    def full(self, path: str) -> bool:
        """Whether a bound is reached; the first path that is left out for it is noted."""
        if self._full:
            return True
        if self.made.files >= self._max_files:
            why = f"the limit of {self._max_files} files"
        elif self.made.bytes >= self._max_bytes:
            why = f"the limit of {self._max_bytes} bytes"
        elif time.monotonic() > self._deadline:
            why = f"{self._max_seconds:g} s were over"
        else:
            return False
        self.made.left_out[path] = f"this and everything after it: {why}"
        self._full = True
        return True

    def glob(self, pattern: str) -> Iterator[str]:
        """Paths of the machine that match, sorted."""
        root = self.host.path("/").rstrip("/")
        for path in sorted(glob.iglob(glob.escape(root) + pattern)):
            yield path[len(root) :]

    def text(self, path: str) -> str:
        """The text of a file; empty where it cannot be read."""
        try:
            return self.host.read(path)
        except HostError:
            return ""

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """A file of the recording, unless it is there already."""
        if place := self._new(path, len(data)):
            place.write_bytes(data)
            if mode is not None:
                place.chmod(mode)

    def link(self, path: str, to: str) -> None:
        """A symbolic link to a path of the machine, relative, so that the recording may be moved."""
        if place := self._new(path, 0):
            place.symlink_to(os.path.relpath(to, os.path.dirname(path)))

    def unreadable(self, path: str, error: HostError) -> None:
        """Recorded as what it is: there, and not to be read (by root it can be, and is empty)."""
        self.made.left_out[path] = str(error)
        if error.reason == "NoPermission":
            self.write(path, b"", 0)

    def copy(self, path: str) -> None:
        """A plain file, under the same name; links are followed."""
        if path in self._written or self.full(path):
            return
        try:
            if not stat.S_ISREG(os.stat(self.host.path(path)).st_mode):
                return
            text = self.host.read(path, max_bytes=MAX_FILE_BYTES)
        except HostError as error:
            self.unreadable(path, error)
            return
        except OSError:  # it went away, or may not be looked at
            return
        self.write(path, (redact_mounts(text) if path in MOUNTS else text).encode())

    def copy_linked(self, path: str) -> None:
        """A file of sysfs where it really is, with the links on the way to it."""
        place = self._follow(path)
        if place is None:
            return
        if os.path.isdir(self.host.path(place)):
            self.real(place).mkdir(parents=True, exist_ok=True)
        else:
            self.copy(place)

    def copy_tree(self, top: str) -> None:
        """All plain files below a directory but those that are never touched; no links."""
        begin = self.host.path(top)
        for folder, folders, names in os.walk(begin):
            below = top + folder[len(begin) :]
            folders[:] = sorted(name for name in folders if name not in NOT_IN_TREES)
            if self.full(below):
                return
            self.real(below).mkdir(parents=True, exist_ok=True)
            for name in sorted(names):
                if name not in NOT_IN_TREES and not os.path.islink(os.path.join(folder, name)):
                    self.copy(f"{below}/{name}")

    def _follow(self, path: str) -> str | None:
        """Where links lead to, inside the machine; each is made again. None for a loop, or where nothing is."""
        parts, place, links = path.strip("/").split("/"), "", 0
        while parts:
            part = parts.pop(0)
            here = f"{place}/{part}"
            try:
                target = self.host.readlink(here)
            except HostError:  # no link
                place = here
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            to = os.path.normpath(f"{place}/{target}" if not target.startswith("/") else target)
            self.link(here, to)
            parts, place = [*to.strip("/").split("/"), *parts], ""
        return place if self.host.exists(place) else None

    def _new(self, path: str, size: int) -> Path | None:
        """Count a file that is to be written there; None where one is."""
        if path in self._written:
            return None
        self._written.add(path)
        self.made.files += 1
        self.made.bytes += size
        place = self.real(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


# --- each kind of reading ---------------------------------------------------------------------------------------------


def record_machine(copier: Copier, *, tools: bool) -> None:
    """All of it. Raises OSError where the recording cannot be written."""
    for place in PLACES:
        if copier.host.exists(place):
            copier.real(place).mkdir(parents=True, exist_ok=True)
    _record_calls(copier)
    _record_view(copier)
    _record_name(copier)
    _record_log(copier)
    for pattern in PLAIN:
        for path in copier.glob(pattern):
            copier.copy(path)
    _record_packages(copier)
    _record_nodes(copier)
    if tools:
        _record_tools(copier)
    _record_sysfs(copier)
    _record_processes(copier)
    said = {
        "healthd": __version__,
        "recorded_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "files": copier.made.files,
        "bytes": copier.made.bytes,
        "left_out": copier.made.left_out,
        "removed": REMOVED,
    }
    copier.write("/recording.json", json.dumps(said, indent=1).encode())


def _record_calls(copier: Copier) -> None:
    """`host.json`: what the kernel says by calls and not by files, and what EC2 has scheduled."""
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
    here = on_ec2(host)
    if here and may_ask(None, on_ec2=here):
        try:
            said["metadata"] = host.metadata((MAINTENANCE, REBALANCE, SPOT))
            said["time"] = host.epoch_seconds()
        except HostError as error:
            copier.made.left_out["events scheduled by EC2"] = str(error)
    copier.write("/host.json", json.dumps(said, indent=1).encode())


def _record_view(copier: Copier) -> None:
    """From where the machine is looked at: the PID namespace."""
    namespace = copier.host.pid_namespace()
    if namespace is None:
        copier.made.left_out["/proc/self/ns/pid"] = "not available, so holders of devices are unknown in this recording"
    else:
        copier.write("/proc/self/ns/pid", f"{namespace}\n".encode())


def _record_name(copier: Copier) -> None:
    """The host's name, with the addresses that it resolves to here: elsewhere it may resolve to others."""
    hosts = copier.text("/etc/hosts")
    try:
        name = copier.host.host_name()
        copier.write("/etc/hostname", f"{name}\n".encode())
        addresses = copier.host.resolve(name)
    except HostError as error:
        copier.made.left_out["addresses of the host's name"] = str(error)
        return
    known = [line.split("#")[0].split() for line in hosts.splitlines()]
    missing = [one for one in addresses if not any(row[:1] == [one] and name in row[1:] for row in known)]
    rows = "".join(f"{address}\t{name}\n" for address in missing)
    between = "\n" if rows and hosts and not hosts.endswith("\n") else ""
    copier.write("/etc/hosts", f"{hosts}{between}{rows}".encode())


def _record_log(copier: Copier) -> None:
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


def _record_packages(copier: Copier) -> None:
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
    wanted = [part for part in parts if PACKAGE_NAMES.match(part.removeprefix("Package:").strip())]
    copier.write(DPKG, ("\n\n".join(wanted) + "\n").encode())


def _record_nodes(copier: Copier) -> None:
    """Device nodes as empty files with their rights; none is opened."""
    for pattern in DEVICE_FILES:
        for path in copier.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                mode = os.stat(copier.host.path(path)).st_mode
                if not stat.S_ISDIR(mode):
                    copier.write(path, b"", stat.S_IMODE(mode) & 0o777)


def _record_sysfs(copier: Copier) -> None:
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


def _record_processes(copier: Copier) -> None:
    """Names, states and which devices they have open."""
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
        blind += not _record_held(copier, f"/proc/{entry}/fd")
    if blind:
        copier.made.left_out["/proc/*/fd"] = f"{blind} processes cannot be inspected; run as root"


def _record_held(copier: Copier, folder: str) -> bool:
    """
    The links of open files that are devices; other files are nobody's business. False where it may not be seen.
    """
    try:
        descriptors = copier.host.listdir(folder)
    except HostError as error:
        return error.reason != "NoPermission"
    for descriptor in descriptors:
        with contextlib.suppress(HostError):  # closed meanwhile
            name = os.path.basename(copier.host.readlink(f"{folder}/{descriptor}"))
            if HELD.fullmatch(name):
                copier.link(f"{folder}/{descriptor}", f"/dev/{name}")
    return True


# --- vendors' tools, as programs that say it again --------------------------------------------------------------------


class ToolRun(NamedTuple):
    """What came of it. `returncode` None: it did not end, or streams on."""

    arguments: tuple[str, ...]
    stdout: str
    stderr: str
    returncode: int | None


def tools_of(host: Host) -> tuple[Tool, ...]:
    """As checks ask them. They run one after the other: Neuron's fail when several ask the driver at once."""
    patterns = (*(name for one in descriptors() for name in one.system_packages), *SYSTEM_PACKAGES)
    has_rpm = any(host.exists(path) for path in RPM_DATABASES)
    rpm = (RPM, Tool(("rpm", "-qa", *patterns))) if has_rpm else ()
    return (*(tool for one in descriptors() for tool in one.support_tools), *rpm, FI_INFO)


def _record_tools(copier: Copier) -> None:
    runs: dict[str, list[ToolRun]] = {}
    with tempfile.TemporaryDirectory(prefix="healthd-record-") as folder:
        for tool in tools_of(copier.host):
            found = runs.setdefault(tool.command[0], [])
            run = None if copier.full(f"/bin/{tool.command[0]}") else run_tool(copier.host, tool, Path(folder))
            found += [] if run is None else [run]
    for name, found in runs.items():
        if found:
            write_program(copier, name, found)
        else:
            copier.made.left_out[f"/bin/{name}"] = "not installed"


def run_tool(host: Host, tool: Tool, folder: Path, seconds: float = TOOL_SECONDS) -> ToolRun | None:
    """Ask a tool; None where it is not there. `folder` takes the file that it needs."""
    name, *arguments = tool.command
    config = folder / f"{name}.json"
    if tool.config is not None:
        config.write_text(tool.config)
    place = PLACES_OF_TOOLS.get(name)
    program = place if place is not None and host.exists(place) else name
    argv = [program, *(argument.replace("{config}", str(config)) for argument in arguments)]
    try:
        if tool.streams:
            line = host.first_line(argv, timeout_seconds=seconds)
            return ToolRun((), redact_output(line) + "\n", "", None)
        done = host.run(argv, timeout_seconds=seconds)
        if done.returncode != 0:  # neuron-ls up to 2.27 fails while another one asks the driver: once more
            done = host.run(argv, timeout_seconds=seconds)
    except HostError as error:
        if error.reason == "MissingTool":
            return None
        return ToolRun(tuple(arguments), "", "", 1 if error.reason == "NoData" else None)
    return ToolRun(tuple(arguments), redact_output(done.stdout), redact_output(done.stderr), done.returncode)


def write_program(copier: Copier, name: str, runs: list[ToolRun]) -> None:
    """A program of the standard library that says it again, beside files with what it says."""
    copier.write(f"/bin/{name}", _program(name, runs).encode(), 0o755)
    for number, run in enumerate(runs):
        copier.write(f"/bin/{name}.{number}.out", run.stdout.encode())
        copier.write(f"/bin/{name}.{number}.err", run.stderr.encode())


def _program(name: str, runs: list[ToolRun]) -> str:
    """Asked otherwise than it was, it gives the first answer."""
    asked = [(list(run.arguments), run.returncode) for run in runs]
    return f'''#!/usr/bin/env -S python3 -S -E
"""What {name} said when this machine was recorded."""

import sys
import time

RUNS = {asked!r}  # arguments, exit code
number = next((number for number, run in enumerate(RUNS) if run[0] == sys.argv[1:]), 0)
out, err = (open(f"{{__file__}}.{{number}}.{{kind}}", encoding="utf-8").read() for kind in ("out", "err"))
try:
    while True:
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.stdout.flush()
        if RUNS[number][1] is not None:
            sys.exit(RUNS[number][1])
        # It streamed, or did not end in time: no reader waits for it forever.
        time.sleep({STREAM_PERIOD_SECONDS} if out else 3600)
except BrokenPipeError:
    sys.exit(0)
'''
