"""
Two kinds of store with one set of operations: a directory of a file system, and a URL by way of fsspec.

Also here:

- what an error of a store means: a reason code and a sentence;
- whether a path is on the file system that it should be on, and not on the local disk beneath a missing mount.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from checks.host.machine import Host
from checks.system.mounts import Mount, find_unmounted, holding, read_fstab, read_points

CHUNK_BYTES = 1 << 20
_LOOKED_AT = 16  # entries of a folder for each file that is wanted

_BY_ERRNO: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: ("StoreNoSpace", "no space left"),
    errno.EDQUOT: ("StoreQuota", "the quota of the user, group or project is exhausted"),
    errno.EROFS: ("StoreReadOnly", "it is mounted read-only"),
    errno.EACCES: ("StoreNoPermission", "permission denied"),
    errno.EPERM: ("StoreNoPermission", "operation not permitted"),
    errno.ESTALE: ("StoreStale", "stale file handle: the server no longer knows this mount"),
    errno.ENOTCONN: ("StoreStale", "the program that serves this mount has exited"),
    errno.ENOENT: ("StoreMissing", "it does not exist"),
    errno.ENOTDIR: ("StoreMissing", "it is not a directory"),
}


def open_store(root: str) -> Store:
    """The store at a path or URL. Raises ImportError where the library for it is not installed."""
    return ObjectStore(root) if is_url(root) else FileStore(root)


class Store(Protocol):
    """Names are relative to the store's root. What fails raises OSError, or what the library of the store raises."""

    root: str

    def make_folder(self, name: str) -> None:
        """Make a folder that must not be there yet, and those above it up to the root."""

    def write(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write a file; when this returns, the store has it for good."""

    def rename(self, old: str, new: str) -> None:
        """Give a file its final name, for good."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """A file from `offset`, `length` bytes or to its end, in chunks; from the store rather than from a cache."""

    def sizes(self, name: str, most: int | None = None) -> dict[str, int]:
        """
        The files directly in a folder with their sizes in bytes; folders are left out.

        With `most`, at most so many, and none that is hidden (`.name`).
        """

    def folders(self, name: str) -> list[str]:
        """The names of the folders directly in a folder."""

    def remove(self, name: str) -> None:
        """Delete a file."""

    def remove_folder(self, name: str) -> None:
        """Delete a folder, which must be empty."""


class FileStore:
    """A directory of a mounted file system."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def make_folder(self, name: str) -> None:
        """See `Store`. The root itself must be there."""
        above = os.path.dirname(name)
        if above and not os.path.isdir(self._path(above)):
            self.make_folder(above)
        os.mkdir(self._path(name), 0o755)

    def write(self, name: str, chunks: Iterator[bytes]) -> None:
        """See `Store`: written and flushed to the device or the server."""
        descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # network file systems report some failures here

    def rename(self, old: str, new: str) -> None:
        """See `Store`: the folder is flushed too."""
        os.rename(self._path(old), self._path(new))
        folder = os.open(os.path.dirname(self._path(new)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """See `Store`."""
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Clean pages are dropped, so that most file systems ask the device or the server again.
            os.posix_fadvise(descriptor, offset, length or 0, os.POSIX_FADV_DONTNEED)
            left = length
            while left is None or left > 0:
                chunk = os.pread(descriptor, CHUNK_BYTES if left is None else min(CHUNK_BYTES, left), offset)
                if not chunk:
                    return
                yield chunk
                offset += len(chunk)
                left = None if left is None else left - len(chunk)
        finally:
            os.close(descriptor)

    def sizes(self, name: str, most: int | None = None) -> dict[str, int]:
        """See `Store`."""
        found: dict[str, int] = {}
        with os.scandir(self._path(name)) as entries:
            for entry in islice(entries, most and most * _LOOKED_AT):
                if most is not None and len(found) >= most:
                    break
                if most is not None and entry.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):  # renamed or removed by another node since it was listed
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def folders(self, name: str) -> list[str]:
        """See `Store`."""
        with os.scandir(self._path(name)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def remove(self, name: str) -> None:
        """See `Store`."""
        os.unlink(self._path(name))

    def remove_folder(self, name: str) -> None:
        """See `Store`."""
        os.rmdir(self._path(name))


class ObjectStore:
    """A URL, by fsspec. An object store has no folders: making one does nothing."""

    def __init__(self, url: str) -> None:
        import fsspec

        # Listings of an earlier moment are no evidence.
        self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.root = url
        self._root: str = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def make_folder(self, name: str) -> None:
        """See `Store`."""
        if not self._files.exists(self._root.split("/")[0]):
            raise FileNotFoundError(self.root)

    def write(self, name: str, chunks: Iterator[bytes]) -> None:
        """See `Store`."""
        with self._files.open(self._path(name), "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def rename(self, old: str, new: str) -> None:
        """See `Store`. An object store copies, then deletes the old name."""
        self._files.mv(self._path(old), self._path(new))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """See `Store`."""
        with self._files.open(self._path(name), "rb", cache_type="none" if length is not None else "readahead") as file:
            file.seek(offset)
            left = length
            while left is None or left > 0:
                chunk = file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
                if not chunk:
                    return
                yield chunk
                left = None if left is None else left - len(chunk)

    def _listed(self, name: str) -> list[dict[str, Any]]:
        return list(self._files.ls(self._path(name), detail=True))

    def sizes(self, name: str, most: int | None = None) -> dict[str, int]:
        """See `Store`."""
        files = [one for one in self._listed(name) if one["type"] == "file"]
        found = {one["name"].rpartition("/")[2]: int(one["size"]) for one in files}
        if most is None:
            return found
        return dict(islice(((name, size) for name, size in found.items() if not name.startswith(".")), most))

    def folders(self, name: str) -> list[str]:
        """See `Store`."""
        found = [one["name"].rstrip("/") for one in self._listed(name) if one["type"] == "directory"]
        return sorted(one.rpartition("/")[2] for one in found)

    def remove(self, name: str) -> None:
        """See `Store`."""
        self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """See `Store`."""


def is_url(root: str) -> bool:
    """Whether a root is a URL of fsspec rather than a path."""
    return "://" in root


def explain(error: Exception, step: str, root: str) -> tuple[str, str]:
    """The reason and one sentence for what a step on the store at `root` raised."""
    if isinstance(error, StoreFault):
        return error.reason, str(error)
    if isinstance(error, ImportError):
        return "MissingTool", f"{error}; install the object-store extra of healthd in the probes' environment"
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, PermissionError):
        number = errno.EACCES
    if number is None and isinstance(error, FileNotFoundError):
        number = errno.ENOENT
    if number == errno.ENOSPC and _has_no_inodes(root):
        return "StoreNoInodes", f"{step}: no inodes left, although there is space: too many files"
    if number is not None and number in _BY_ERRNO:
        reason, text = _BY_ERRNO[number]
        return reason, f"{step}: {text}"
    said = " ".join(str(error).split())[:300]
    return "StoreError", f"{step}: {type(error).__name__}: {said}"


def require_mount(path: str, kinds: Sequence[str]) -> Mount | None:
    """
    The mount that a path is on; None where the table of mounts does not have it.

    Raises StoreFault StoreNotMounted where `kinds` are given and it is on another one, or where /etc/fstab mounts
    something at the path, or above it, that is not mounted.
    """
    with suppress(OSError):  # an automounter mounts it when it is opened
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    points = read_points(Host())
    place = os.path.realpath(path)
    mount = holding(points, place)
    if kinds and (mount is None or mount.kind not in kinds):
        there = "nothing" if mount is None else f"{mount.kind} ({mount.source} on {mount.point})"
        wanted = " or ".join(kinds)
        text = f"{path} is on {there}, not on {wanted}: writes go to the local disk; mount it"
        raise StoreFault("StoreNotMounted", text)
    if point := find_unmounted(place, read_fstab(Host()), points):
        text = f"/etc/fstab mounts {point}, but nothing is mounted there: writes to {path} go to the local disk"
        raise StoreFault("StoreNotMounted", text)
    return mount


class StoreFault(Exception):
    """A fault of a store that has been told apart: `reason` is a code of `checks.reasons`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _has_no_inodes(root: str) -> bool:
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0
