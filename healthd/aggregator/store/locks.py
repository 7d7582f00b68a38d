"""
Only one aggregator at a time has a database: a lock on the file itself, or in the server.

It keeps a second one from starting while the first lives. What is committed does not rest on it: see `leadership`.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import sqlalchemy as sa

from healthd.core.errors import StoreError

LOCK_KEY = 0x6865616C746864
"""PostgreSQL advisory lock of an aggregator: "healthd" in ASCII."""
LOCK_SECONDS = 2.0
"""How long a former aggregator's connection may take to be gone from the server."""
LOCK_BYTE = 1 << 62
"""The byte of the file that is locked, far behind its end and behind the bytes at 1 << 30 that SQLite locks itself."""

# Device and inode of the files that this process has locked. Where a process closes any descriptor of a file, all its
# POSIX locks on it are gone, and SQLite's are such: a file that is ours must not even be opened once more.
_ours: set[tuple[int, int]] = set()


class FileLock:
    """
    The lock on a SQLite file, whatever name it is reached by; makes the file where there is none.

    An open file description's lock on one byte: it belongs to the file and not to a name, so symbolic links, hard links
    and deleted files beside it lead nowhere else. StoreError when another aggregator has it.
    """

    def __init__(self, path: Path) -> None:
        if inode_of(path) in _ours:
            raise _in_use(path)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise StoreError(f"database {path}: {error.strerror}; make its directory exist and be writable") from None
        found = os.fstat(self._handle)
        self.inode = (found.st_dev, found.st_ino)
        try:
            self._lock(path, found)
        except StoreError:
            os.close(self._handle)
            raise
        _ours.add(self.inode)

    def _lock(self, path: Path, found: os.stat_result) -> None:
        # struct flock: type, whence, start, length, process id (0 for this kind of lock)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BYTE, 1, 0)
        try:
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            raise _in_use(path) from None
        except OSError as error:
            raise StoreError(f"database {path} cannot be locked: {error.strerror}; put it on a local disk") from None
        if found.st_nlink > 1:
            # SQLite keeps its journal beside the name that it was given: what another name left there would be lost.
            raise StoreError(f"database {path} is one file under several names (hard links); remove all but one")

    def close(self) -> None:
        """Let go of it, after SQLite has closed the file. Safe to repeat."""
        if self.inode in _ours:
            _ours.discard(self.inode)
            os.close(self._handle)


def inode_of(path: Path) -> tuple[int, int] | None:
    """What a file is whatever its name: device and inode; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def lock_server(connection: sa.Connection) -> bool:
    """The same on PostgreSQL, for as long as the connection lives; one that just closed is given time to go."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        taken = connection.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK_KEY}).scalar()
        connection.commit()
        if taken or time.monotonic() > until:
            return bool(taken)
        time.sleep(0.05)


def _in_use(path: Path) -> StoreError:
    return StoreError(f"database {path} is in use by another aggregator; stop it or use another file")
