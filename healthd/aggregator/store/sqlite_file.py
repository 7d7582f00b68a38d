"""
The file of a SQLite database: one aggregator at a time has it, and it must stay where it is, with its journal.

SQLite goes on writing into a file that was deleted; what is answered then is gone with this process.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from healthd.core.errors import StoreError

LOCK_BYTE = 1 << 62
"""The byte of the file that is locked, far behind its end and behind the bytes at 1 << 30 that SQLite locks itself."""
BESIDE = ("-wal", "-shm")
"""What SQLite adds to the name of a database for its journal and the index of that."""

_Inode = tuple[int, int]  # device and inode: what a file is, whatever its name

# The files that this process has locked. Where a process closes any descriptor of a file, all its POSIX locks on it are
# gone, and SQLite's are such: a file that is ours must not even be opened once more.
_ours: set[_Inode] = set()


class DatabaseFile:
    """
    The file, locked; it is made where there is none. StoreError when another aggregator has it.

    The lock is that of an open file description, on one byte. It belongs to the file and not to a name, so symbolic
    links, hard links and deleted files beside it lead nowhere else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if _inode_of(path) in _ours:
            raise _in_use(path)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise StoreError(f"database {path}: {error.strerror}; make its directory exist and be writable") from None
        found = os.fstat(self._handle)
        self._inode = (found.st_dev, found.st_ino)
        # SQLite's files beside it, once the connection has them open; and the one that was taken from it.
        self._journal: dict[Path, _Inode] = {}
        self._taken: Path | None = None
        try:
            self._lock(found)
        except StoreError:
            os.close(self._handle)
            raise
        _ours.add(self._inode)

    @property
    def lost_its_journal(self) -> bool:
        """Whether a file of the journal was deleted or replaced. It stays so."""
        return self._taken is not None

    def check(self, place: str, save: Callable[[], None]) -> None:
        """
        StoreError where the file or its journal was deleted or replaced. `place` names the database for people.

        What was committed since the last checkpoint is only in the journal. Until another program opens the database,
        closing it saves that: SQLite copies the journal that it still has into the database. `save` closes it.
        """
        if _inode_of(self._path) != self._inode:
            raise StoreError(
                f"{place} was deleted or replaced while in use; restore it and restart the aggregator, or "
                "restart without it: nodes report their leases again"
            )
        changed = [file for file, inode in self._journal.items() if _inode_of(file) != inode]
        if changed and self._taken is None:
            self._taken = changed[0]
            if not any(file.exists() for file in changed):
                save()
        if self._taken is not None:
            raise StoreError(
                f"{place}: its file {self._taken.name} was deleted or replaced while in use; leave the files "
                "beside the database to SQLite and restart the aggregator: nodes report their leases again"
            )

    def note_journal(self) -> None:
        """Remember the journal and its index, which SQLite makes with the first transaction and keeps open."""
        if len(self._journal) == len(BESIDE):
            return
        real = self._path.resolve()  # SQLite follows symbolic links, too
        for suffix in BESIDE:
            file = real.with_name(real.name + suffix)
            inode = _inode_of(file)
            if inode is not None:
                self._journal[file] = inode

    def forget_journal(self) -> None:
        """The last connection has closed, and has removed these files itself."""
        self._journal.clear()

    def close(self) -> None:
        """Let go of it, after SQLite has closed the file. Safe to repeat."""
        if self._inode in _ours:
            _ours.discard(self._inode)
            os.close(self._handle)

    def _lock(self, found: os.stat_result) -> None:
        # struct flock: type, whence, start, length, process id (0 for this kind of lock)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BYTE, 1, 0)
        path = self._path
        try:
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            raise _in_use(path) from None
        except OSError as error:
            raise StoreError(f"database {path} cannot be locked: {error.strerror}; put it on a local disk") from None
        if found.st_nlink > 1:
            # SQLite keeps its journal beside the name that it was given: what another name left there would be lost.
            raise StoreError(f"database {path} is one file under several names (hard links); remove all but one")


def _inode_of(path: Path) -> _Inode | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(path: Path) -> StoreError:
    return StoreError(f"database {path} is in use by another aggregator; stop it or use another file")
