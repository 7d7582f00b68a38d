"""
Access to the machine: files, programs, clocks and kernel calls. Nothing is judged here.

With a root the machine is data: `proc/`, `sys/`, `etc/`, `dev/kmsg` (a text file), `bin/` (programs that precede those
of PATH) and `host.json` for what is no file (see `HostFiles.data`). Everything is bounded in time and size, and every
failure is a HostError with a reason code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from checks.host import kernel
from checks.host.files import HostError as HostError
from checks.host.files import to_host_error
from checks.host.kernel import ClockState, LogLine
from checks.host.programs import Completed as Completed
from checks.host.programs import HostPrograms

RESOLVER_SECONDS = 3.0  # its own first retry comes after 5 s, and the check that asks has 5 s

T = TypeVar("T")


class FileSystem(NamedTuple):
    """Size and room of a file system, for those who are not root. `inodes` is 0 where it does not count them."""

    size_bytes: int
    available_bytes: int
    inodes: int
    available_inodes: int
    read_only: bool


class Host(HostPrograms):
    """The machine, or a directory that stands for it."""

    def kernel_log(self) -> list[LogLine]:
        """
        The lines of the kernel log since boot, oldest first: seconds since boot (None where a line has none) and text.

        Of /dev/kmsg only what is there now is read, the newest lines if there are very many; it never waits for more.
        """
        if self.root is not None:
            return [kernel.parse_line(line) for line in self.read("/dev/kmsg").splitlines() if line.strip()]
        try:
            return kernel.read_log()
        except OSError as error:
            raise to_host_error(error, "/dev/kmsg") from None

    def monotonic_seconds(self) -> float:
        """CLOCK_MONOTONIC."""
        return time.monotonic()

    def epoch_seconds(self) -> float:
        """The time of day, in seconds since the epoch. As data: `time` in `host.json`."""
        if self.root is None:
            return time.time()
        said = self.data("time")
        if not isinstance(said, (int, float)) or isinstance(said, bool):
            raise HostError("NoData", "host.json: time is no number")
        return float(said)

    def metadata(self, names: Iterable[str]) -> dict[str, str | None]:
        """
        Values of the instance metadata service of EC2, below `/latest/meta-data`; None for what it does not have.

        HostError NoData unless it answers for every name, which takes a second at most. As data: `metadata` in
        `host.json`, values by name.
        """
        if self.root is None:
            from checks.host.metadata import endpoint_of, fetch_all

            return fetch_all(endpoint_of(), names)
        said = self.data("metadata")
        if not isinstance(said, dict):
            raise HostError("NoData", "host.json: metadata holds no values by name")
        return {name: None if said.get(name) is None else str(said[name]) for name in names}

    def uptime_seconds(self) -> float:
        """Seconds since boot, as the kernel log counts them. As data: `/proc/uptime`."""
        if self.root is None:
            return time.monotonic()
        try:
            return float(self.read("/proc/uptime").split()[0])
        except (ValueError, IndexError):
            raise HostError("NoData", "/proc/uptime: holds no number") from None

    def boot_id(self) -> str | None:
        """The kernel's name for this boot; None where it says none."""
        try:
            return self.read("/proc/sys/kernel/random/boot_id").strip() or None
        except HostError:
            return None

    def file_system(self, path: str) -> FileSystem:
        """Room of the file system that holds a path. As data: `host.json`, `{"file_systems": {"/": {...}}}`."""
        if self.root is not None:
            systems = self.data("file_systems")
            if path not in systems:
                raise HostError("NoData", f"{path}: no such file or directory")
            return _made(FileSystem, systems[path], f"file_systems {path}")
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise to_host_error(error, path) from None
        return FileSystem(
            size_bytes=found.f_frsize * found.f_blocks,
            available_bytes=found.f_frsize * found.f_bavail,
            inodes=found.f_files,
            available_inodes=found.f_favail,
            read_only=bool(found.f_flag & os.ST_RDONLY),
        )

    def clock(self) -> ClockState:
        """adjtimex(2) without changing anything. As data: `{"clock": {...}}`."""
        if self.root is not None:
            return _made(ClockState, self.data("clock"), "clock")
        try:
            return kernel.read_clock()
        except OSError as error:
            raise to_host_error(error, "adjtimex") from None

    def process_limit(self, name: str) -> float:
        """The soft limit of this process: memlock in bytes or nofile; inf where there is none. As data: `limits`."""
        if self.root is not None:
            said = self.data("limits")
            value = said.get(name, "") if isinstance(said, dict) else ""
            if value is not None and not isinstance(value, (int, float)):
                raise HostError("NoData", f"host.json: limits say no number of {name}")
            return float("inf") if value is None else float(value)
        import resource

        kind = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name]
        soft = resource.getrlimit(kind)[0]
        return float("inf") if soft == resource.RLIM_INFINITY else float(soft)

    def host_name(self) -> str:
        """The machine's own name. As data: `/etc/hostname`."""
        return self.read("/etc/hostname").strip() if self.root is not None else os.uname().nodename

    def resolve(self, name: str) -> list[str]:
        """
        The addresses that a name resolves to here. As data: `/etc/hosts` alone.

        HostError NoData where it has none, Timeout where the resolver does not answer.
        """
        if self.root is not None:
            rows = (line.split("#")[0].split() for line in self.read("/etc/hosts").splitlines())
            found = sorted({row[0] for row in rows if name in row[1:]})
        else:
            found = _look_up(name)
        if not found:
            raise HostError("NoData", f"{name} does not resolve to any address")
        return found


def _made(kind: type[T], members: Any, what: str) -> T:
    """A record from a member of `host.json`."""
    try:
        return kind(**members)
    except TypeError as error:
        raise HostError("NoData", f"host.json: {what}: {error}") from None


def _look_up(name: str) -> list[str]:
    """
    What the system's resolver says.

    In a thread, because the resolver knows no time limit and asks servers that are away for half a minute.
    """
    import socket
    import threading

    answers: list[list[str]] = []

    def ask() -> None:
        try:
            answers.append(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name.encode(), None)}))
        except (OSError, ValueError):  # ValueError: a null character
            answers.append([])

    thread = threading.Thread(target=ask, name="resolver", daemon=True)
    thread.start()
    thread.join(RESOLVER_SECONDS)
    if not answers:
        raise HostError("Timeout", f"{name}: the resolver did not answer within {RESOLVER_SECONDS:g} s")
    return answers[0]
