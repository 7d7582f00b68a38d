"""Reads files of the machine, bounded in size; every failure is a HostError with a reason code."""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checks.json_text import parse_json

MAX_READ_BYTES = 4 << 20
MAX_ENTRIES = 65536


class HostError(OSError):
    """
    Something of the machine that could not be had.

    `reason` is a code of `checks.reasons`: NoData, NoPermission, MissingTool or Timeout. `output` is what a program had
    written on both streams when its time was up, bounded.
    """

    def __init__(self, reason: str, message: str, output: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.output = output


class HostFiles:
    """The files of the machine, or of a directory that stands for it."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self._content: Mapping[str, Any] | None = None

    def path(self, path: str) -> str:
        """Where an absolute path of the machine really is."""
        return os.path.join(str(self.root), path.lstrip("/")) if self.root else path

    def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> str:
        """The text of a file, at most `max_bytes` of it."""
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise to_host_error(error, path) from None
        try:
            parts, left = [], max_bytes
            while left > 0 and (part := os.read(descriptor, min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise to_host_error(error, path) from None
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
            raise to_host_error(error, path) from None

    def glob(self, folder: str, pattern: str) -> list[str]:
        """The paths in one directory whose names match a pattern, sorted; none where there is no such directory."""
        try:
            names = self.listdir(folder)
        except HostError as error:
            if error.reason == "NoData":
                return []
            raise
        return [f"{folder.rstrip('/')}/{name}" for name in names if fnmatch.fnmatchcase(name, pattern)]

    def walk(self, folder: str, *, skip: Collection[str], max_depth: int, max_folders: int) -> list[str]:
        """
        What lies below a directory and is none itself, as paths relative to it, the nearest first; no links followed.

        Directories named in `skip`, beyond the bounds, or that may not be read are left out.
        """
        from checks.host.trees import walk

        return walk(self.path(folder), skip=skip, max_depth=max_depth, max_folders=max_folders)

    def inode(self, path: str) -> int | None:
        """The inode's number: another one where the kernel has made the thing anew. None where there is nothing."""
        try:
            return os.stat(self.path(path)).st_ino
        except OSError:
            return None

    def may_use(self, path: str) -> bool | None:
        """
        Whether this process may read and write something, without opening it; None where there is nothing.

        As data: whether its owner may, because whoever replays a machine is somebody else.
        """
        place = self.path(path)
        try:
            mode = os.stat(place).st_mode
        except OSError:
            return None
        if self.root is not None:
            return mode & 0o600 == 0o600
        return os.access(place, os.R_OK | os.W_OK, effective_ids=True)

    def readlink(self, path: str) -> str:
        """Where a symbolic link points, as it is written."""
        try:
            return os.readlink(self.path(path))
        except OSError as error:
            raise to_host_error(error, path) from None

    def device_minor(self, path: str) -> int | None:
        """The minor number of a character device's file; None for anything else. As data: `{"minors": {PATH: N}}`."""
        if self.root is not None:
            with suppress(HostError):
                minors = self.data("minors")
                number = minors.get(path) if isinstance(minors, dict) else None
                return number if isinstance(number, int) and not isinstance(number, bool) else None
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        return os.minor(found.st_rdev) if stat.S_ISCHR(found.st_mode) else None

    def pid_namespace(self) -> str | None:
        """
        The PID namespace of the one who looks: `pid:[4026531836]` is the machine's own. None where that is not told.

        As data: the text of `/proc/self/ns/pid`, which is a link on a machine and a plain file in a recording.
        """
        for read in (self.readlink, self.read):
            with suppress(HostError):
                return read("/proc/self/ns/pid").strip() or None
        return None

    def data(self, name: str) -> Any:
        """A member of `host.json`: what a machine as data says of things that are no files."""
        if self._content is None:
            try:
                self._content = parse_json(self.read("/host.json"))
            except (ValueError, HostError) as error:
                raise HostError("NoData", f"host.json: {error}") from None
        if not isinstance(self._content, dict) or name not in self._content:
            raise HostError("NoData", f"host.json says nothing of {name}")
        return self._content[name]


def to_host_error(error: OSError, path: str) -> HostError:
    text = f"{path}: {(error.strerror or str(error)).lower()}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return HostError("NoPermission", f"{text}; run as root or give this user the right to read it")
    return HostError("NoData", text)
