"""Copying files of a machine into a directory: bounded, links kept, nothing opened that is no plain file."""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checks.host.machine import Host, HostError
from healthd.record.sources import NOT_IN_TREES, redact_mounts

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
            why = f"{self._max_files} files are the most"
        elif self.made.bytes >= self._max_bytes:
            why = f"{self._max_bytes} bytes are the most"
        elif time.monotonic() > self._deadline:
            why = f"{self._max_seconds:g} s were over"
        else:
            return False
        self.made.left_out[path] = f"this, and all that would have come after it: {why}"
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
