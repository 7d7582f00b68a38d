"""
A machine's readings as a directory that `--host-root` replays: what is recorded and what must not be, each kind of
reading, copying within bounds, and vendors' tools as small programs that print their recorded output.

A check that reads a new file needs a row here, or a recorded machine lacks that file.
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

from checks.accelerators.neuron.versions import PACKAGES
from checks.host.container import in_container
from checks.host.identity import on_ec2
from checks.host.machine import Host, HostError
from checks.host.metadata import may_ask
from checks.json_text import parse_json
from checks.system.scheduled_events import MAINTENANCE, REBALANCE, SPOT
from healthd import __version__
from healthd.core.errors import BadInputError
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
    "driver",
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
PACKAGE_NAMES = re.compile(r"(aws-neuron|aws-ofi|efa|libfabric|rdma|nvidia|cuda|libnccl|openmpi)")

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


# Copying files of a machine into a directory: bounded, links kept, nothing opened that is no plain file.


MAX_BYTES = 64 << 20
MAX_FILES = 60_000  # 128 cores have about 8,000 counters
MAX_FILE_BYTES = 1 << 20
MAX_SECONDS = 60.0
_MAX_LINKS = 40  # on the way to one file; the kernel's own bound


@dataclass
class Recording:
    """What was written, and what was not: path -> why."""

    root: Path
    files: int = 0
    bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


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
        if path in self._written:
            return
        place = self.real(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if mode is not None:
            place.chmod(mode)
        self._count(path, len(data))

    def link(self, path: str, to: str) -> None:
        """A symbolic link to a path of the machine, relative, so that the recording may be moved."""
        if path in self._written:
            return
        place = self.real(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(to, os.path.dirname(path)))
        self._count(path, 0)

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
        if path == "/etc/fstab" or path.endswith("/mountinfo"):
            text = redact_mounts(text)
        self.write(path, text.encode())

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
        """Where links lead to, inside the machine; each is made anew. None for a loop, or where nothing is."""
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

    def _count(self, path: str, size: int) -> None:
        self._written.add(path)
        self.made.files += 1
        self.made.bytes += size


# Vendors' tools as small programs that print what the tools said: their part of a recorded machine.


STREAM_PERIOD_SECONDS = 5
_MAX_NAME_CHARACTERS = 64

# What neuron-monitor is asked for; it honours whole units alone.
_MONITOR_CONFIG = {
    "period": "1s",
    "neuron_runtimes": [
        {"tag_filter": ".*", "metrics": [{"type": "execution_stats"}, {"type": "neuroncore_counters"}]}
    ],
    "system_metrics": [{"type": "neuron_hw_counters"}],
}


class Tool(NamedTuple):
    """
    How a tool is asked. `streams`: it never ends, and its first line is what counts.

    `paths` are tried before the ways in which programs are found. With `only_with`, it is asked where one of these is.
    """

    name: str
    arguments: tuple[str, ...]
    timeout_seconds: float
    streams: bool = False
    paths: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()


# As checks ask them.
TOOLS = (
    Tool("neuron-ls", ("-j",), 10.0),
    Tool("neuron-monitor", ("-c", "{config}"), 10.0, streams=True),
    Tool(
        "rpm",
        ("-q", "--qf", "%{NAME} %{VERSION}\\n", *PACKAGES.values()),
        5.0,
        only_with=RPM_DATABASES,
    ),
    Tool("fi_info", ("-p", "efa"), 10.0, paths=("/opt/amazon/efa/bin/fi_info",)),
)


class ToolRun(NamedTuple):
    """What came of it. `returncode` None: it did not end, or streams on."""

    arguments: tuple[str, ...]
    stdout: str
    stderr: str
    returncode: int | None


# Whole or cut off in the middle.
_COMMAND = re.compile(r'("command"\s*:\s*")((?:[^"\\]|\\.)*)("|\\?$)')


def run_tool(host: Host, tool: Tool, folder: Path) -> ToolRun | None:
    """Ask a tool; None where it is not there. `folder` takes files that it needs."""
    config = folder / "monitor.json"
    config.write_text(json.dumps(_MONITOR_CONFIG))
    program = next((path for path in tool.paths if host.exists(path)), tool.name)
    argv = [program, *(argument.replace("{config}", str(config)) for argument in tool.arguments)]
    try:
        if tool.streams:
            line = host.first_line(argv, timeout_seconds=tool.timeout_seconds)
            return ToolRun((), redact_output(line) + "\n", "", None)
        done = host.run(argv, timeout_seconds=tool.timeout_seconds)
        if done.returncode != 0:  # neuron-ls up to 2.27 fails while another one asks the driver: once more
            done = host.run(argv, timeout_seconds=tool.timeout_seconds)
    except HostError as error:
        if error.reason == "MissingTool":
            return None
        return ToolRun(tool.arguments, "", "", 1 if error.reason == "NoData" else None)
    return ToolRun(tool.arguments, redact_output(done.stdout), redact_output(done.stderr), done.returncode)


def redact_output(text: str) -> str:
    """Of commands the program's name is kept, without its directory; arguments may hold secrets."""

    def name_alone(match: re.Match[str]) -> str:
        try:
            command = str(parse_json(f'"{match[2]}"', strict=False))
        except ValueError:  # cut off inside an escape: what is before it
            command = match[2].partition("\\")[0]
        word = next(iter(command.split()), "")
        name = "" if "=" in word else word.rpartition("/")[2][:_MAX_NAME_CHARACTERS]
        return f"{match[1]}{json.dumps(name)[1:-1]}{match[3]}"

    return redact(_COMMAND.sub(name_alone, text))


def program_text(name: str, runs: list[ToolRun]) -> str:
    """A program of the standard library that says it again; asked otherwise than it was, it gives the first answer."""
    rows = json.dumps([run._asdict() for run in runs])
    return f'''#!/usr/bin/env -S python3 -S -E
"""What {name} said when this machine was recorded."""

import json
import sys
import time

RUNS = json.loads({rows!r})
run = next((run for run in RUNS if run["arguments"] == sys.argv[1:]), RUNS[0])
try:
    while True:
        sys.stdout.write(run["stdout"])
        sys.stderr.write(run["stderr"])
        sys.stdout.flush()
        if run["returncode"] is not None:
            sys.exit(run["returncode"])
        # It streamed, or did not end in time: no reader waits for it forever.
        time.sleep({STREAM_PERIOD_SECONDS} if run["stdout"] else 3600)
except BrokenPipeError:
    sys.exit(0)
'''


# Each kind of reading of a machine, one after the other.


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
        copier.made.left_out["/proc/self/ns/pid"] = "not available, so holders of devices are unknown in this recording"
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
        copier.made.left_out["/proc/*/fd"] = f"{blind} processes cannot be inspected; run as root"


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
    wanted = [part for part in parts if PACKAGE_NAMES.match(part.removeprefix("Package:").strip())]
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


# A machine's readings as a directory that `--host-root` replays: for a bug report, a test, a look from elsewhere.


def record(host: Host, directory: Path, *, tools: bool = True) -> Recording:
    """
    Record the machine into a directory that is not there yet, or empty. `tools` False starts no program.

    A new directory is for its owner alone: what is recorded may be readable by root alone. Raises BadInputError where
    the directory holds something, is another user's or cannot be written. What cannot be read is left out, and
    said in `recording.json`.
    """
    copier = Copier(host, directory)
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
