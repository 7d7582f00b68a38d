"""
The only door to the machine: files, programs, clocks and kernel calls. Nothing is judged here.

With a root the machine is data: `proc/`, `sys/`, `etc/`, `dev/kmsg` (a text file), `bin/` (programs that come before
those of PATH) and `host.json` for what is no file (see `_data`). Everything is bounded in time and size, and every
failure is a HostError with a reason code.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_READ_BYTES = 4 << 20
MAX_KMSG_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 1 << 20
MAX_ENTRIES = 65536
TOOL_PATHS = ("/opt/aws/neuron/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class HostError(OSError):
    """
    Something of the machine that could not be had.

    `reason` is a code of `checks.reasons`: NoData, NoPermission, MissingTool or Timeout.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Completed(NamedTuple):
    """How a program ended. `returncode` is negative for a signal; output is cut at a bound."""

    returncode: int
    stdout: str
    stderr: str


class FileSystem(NamedTuple):
    """Size and room of a file system, for those who are not root. `inodes` is 0 where it does not count them."""

    size_bytes: int
    available_bytes: int
    inodes: int
    available_inodes: int
    read_only: bool


class ClockState(NamedTuple):
    """What the kernel says of its clock. `offset_seconds` is the last offset that its keeper measured."""

    synchronized: bool
    offset_seconds: float
    max_error_seconds: float


class Host:
    """The machine, or a directory that stands for it."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self._said: Mapping[str, Any] | None = None

    # --- files --------------------------------------------------------------------------------------------------------

    def path(self, path: str) -> str:
        """Where an absolute path of the machine really is."""
        return os.path.join(str(self.root), path.lstrip("/")) if self.root else path

    def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> str:
        """The text of a file, at most `max_bytes` of it."""
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _translated(error, path) from None
        try:
            parts, left = [], max_bytes
            while left > 0 and (part := os.read(descriptor, min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise _translated(error, path) from None
        finally:
            os.close(descriptor)
        return b"".join(parts).decode("utf-8", "replace")

    def exists(self, path: str) -> bool:
        """Whether there is something at the path."""
        return os.path.lexists(self.path(path))

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted, at most MAX_ENTRIES."""
        try:
            return sorted(os.listdir(self.path(path)))[:MAX_ENTRIES]
        except OSError as error:
            raise _translated(error, path) from None

    def glob(self, folder: str, pattern: str) -> list[str]:
        """The paths in one directory whose names match a pattern, sorted; none where there is no such directory."""
        try:
            names = self.listdir(folder)
        except HostError as error:
            if error.reason == "NoData":
                return []
            raise
        return [f"{folder.rstrip('/')}/{name}" for name in names if fnmatch.fnmatchcase(name, pattern)]

    def readlink(self, path: str) -> str:
        """Where a symbolic link points, as it is written."""
        try:
            return os.readlink(self.path(path))
        except OSError as error:
            raise _translated(error, path) from None

    def kernel_log(self) -> list[tuple[float | None, str]]:
        """
        The lines of the kernel log since boot, oldest first: seconds since boot (None where a line has none) and text.

        Of /dev/kmsg only what is there now is read; it never waits for more.
        """
        if self.root is not None:
            return [_plain_line(line) for line in self.read("/dev/kmsg").splitlines() if line.strip()]
        try:
            descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _translated(error, "/dev/kmsg") from None
        lines: list[tuple[float | None, str]] = []
        size = 0
        try:
            while size < MAX_KMSG_BYTES:
                try:
                    record = os.read(descriptor, 8192)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno == errno.EPIPE:  # the ring was overwritten while we read: go on with what is left
                        continue
                    raise _translated(error, "/dev/kmsg") from None
                if not record:
                    break
                size += len(record)
                lines.append(_kmsg_record(record.decode("utf-8", "replace")))
        finally:
            os.close(descriptor)
        return lines

    # --- programs -----------------------------------------------------------------------------------------------------

    def find_program(self, name: str) -> str:
        """The path of a program; HostError MissingTool when there is none."""
        if "/" in name:
            candidates = [name]
        else:
            folders = [self.path("/bin")] if self.root else []
            folders += [*os.environ.get("PATH", "").split(os.pathsep), *TOOL_PATHS]
            candidates = [os.path.join(folder, name) for folder in folders if folder]
        for candidate in candidates:
            if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return candidate
        raise HostError("MissingTool", f"no such program: {name}; install it or name its path")

    def run(self, argv: Sequence[str], *, timeout_seconds: float) -> Completed:
        """
        Run a program to its end, with no input and in a process group of its own that is killed at the time-out.

        HostError Timeout or MissingTool. Output that a grandchild keeps open is not waited for.
        """
        import subprocess
        import tempfile

        program = self.find_program(argv[0])
        environment = {**os.environ, "LC_ALL": "C"}
        if self.root is not None:
            environment["PATH"] = self.path("/bin") + os.pathsep + environment.get("PATH", "")
            environment["HEALTHD_HOST_ROOT"] = str(self.root)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # files: nobody waits for a pipe's end
            try:
                process = subprocess.Popen(
                    [program, *argv[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise HostError("MissingTool", f"{program} cannot be started: {error.strerror}") from None
            try:
                code = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                _kill_group(process.pid)
                raise HostError("Timeout", f"{argv[0]} did not end within {timeout_seconds:g} s") from None
            _kill_group(process.pid)
            return Completed(code, _output(out), _output(err))

    # --- the kernel ---------------------------------------------------------------------------------------------------

    def monotonic_seconds(self) -> float:
        """CLOCK_MONOTONIC."""
        return time.monotonic()

    def time_seconds(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def boot_id(self) -> str | None:
        """The kernel's name for this boot; None where it says none."""
        try:
            return self.read("/proc/sys/kernel/random/boot_id").strip() or None
        except HostError:
            return None

    def file_system(self, path: str) -> FileSystem:
        """Room of the file system that holds a path. As data: `host.json`, `{"file_systems": {"/": {...}}}`."""
        if self.root is not None:
            systems = self._data("file_systems")
            if path not in systems:
                raise HostError("NoData", f"{path}: no such file or directory")
            return FileSystem(**systems[path])
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise _translated(error, path) from None
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
            return ClockState(**self._data("clock"))
        return _adjtimex()

    def process_limit(self, name: str) -> float:
        """The soft limit of this process: memlock in bytes or nofile; inf where there is none. As data: `limits`."""
        if self.root is not None:
            value = self._data("limits").get(name)
            return float("inf") if value is None else float(value)
        import resource

        kind = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name]
        soft = resource.getrlimit(kind)[0]
        return float("inf") if soft == resource.RLIM_INFINITY else float(soft)

    def host_name(self) -> str:
        """The machine's own name. As data: `/etc/hostname`."""
        return self.read("/etc/hostname").strip() if self.root is not None else os.uname().nodename

    def resolve(self, name: str) -> list[str]:
        """The addresses that a name resolves to here. As data: `/etc/hosts` alone."""
        if self.root is not None:
            rows = (line.split("#")[0].split() for line in self.read("/etc/hosts").splitlines())
            found = sorted({row[0] for row in rows if name in row[1:]})
        else:
            import socket

            try:
                found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
            except OSError as error:
                raise HostError("NoData", f"{name}: {error.strerror or error}") from None
        if not found:
            raise HostError("NoData", f"{name}: does not resolve")
        return found

    def _data(self, name: str) -> Any:
        """A member of `host.json`: what a machine as data says of things that are no files."""
        if self._said is None:
            try:
                self._said = json.loads(self.read("/host.json"))
            except (ValueError, HostError) as error:
                raise HostError("NoData", f"host.json: {error}") from None
        if not isinstance(self._said, dict) or name not in self._said:
            raise HostError("NoData", f"host.json says nothing of {name}")
        return self._said[name]


def _translated(error: OSError, path: str) -> HostError:
    text = f"{path}: {(error.strerror or str(error)).lower()}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return HostError("NoPermission", f"{text}; run as root or give this user the right to read it")
    return HostError("NoData", text)


def _kmsg_record(record: str) -> tuple[float | None, str]:
    """`6,1234,98765432,-;text` and more lines: the third member of the head is microseconds since boot."""
    head, _, rest = record.partition(";")
    fields = head.split(",")
    stamp = float(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdecimal() else None
    return stamp, rest.partition("\n")[0]


def _plain_line(line: str) -> tuple[float | None, str]:
    """A line as dmesg prints it, `[   12.345678] text`, or as /dev/kmsg gives it."""
    if line.startswith("["):
        stamp, closed, text = line[1:].partition("]")
        try:
            return (float(stamp), text.strip()) if closed else (None, line)
        except ValueError:
            return None, line
    return _kmsg_record(line) if ";" in line and line.split(",")[0].isdecimal() else (None, line)


def _output(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read(MAX_OUTPUT_BYTES)
    return text.decode("utf-8", "replace")


def _kill_group(pid: int) -> None:
    import signal

    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _adjtimex() -> ClockState:
    """Read the kernel's clock discipline. Source: adjtimex(2), <sys/timex.h>."""
    import ctypes

    class Timex(ctypes.Structure):
        _fields_ = [
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("constant", ctypes.c_long),
            ("precision", ctypes.c_long),
            ("tolerance", ctypes.c_long),
            ("time", ctypes.c_long * 2),
            ("tick", ctypes.c_long),
            ("rest", ctypes.c_byte * 128),
        ]

    unsynchronized, nanoseconds = 0x0040, 0x2000  # STA_UNSYNC, STA_NANO
    state = Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        number = ctypes.get_errno()
        raise _translated(OSError(number, os.strerror(number)), "adjtimex")
    scale = 1e-9 if state.status & nanoseconds else 1e-6
    return ClockState(
        synchronized=not state.status & unsynchronized,
        offset_seconds=state.offset * scale,
        max_error_seconds=state.maxerror * 1e-6,
    )
