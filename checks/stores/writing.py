"""Writes, renames, reads back, lists and deletes one file of bounded size, and measures it: in the child process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from checks.stores.errors import StoreFault
from checks.stores.operations import CHUNK_BYTES, FileStore, Store
from checks.stores.report import Report

PREFIX = ".healthd-probe."
PART, WHOLE = "data.part", "data"
LEFTOVER_SECONDS = 900.0
"""A probe folder of this node that is older was left by a run that was killed: no run takes so long."""

_WRITE_SHARE = 0.3
"""Of the time for all: writing it, flushing it and reading it back may take as long each."""


def probe(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    One whole pass of what a save does, in a folder of its own name, which is removed whatever happens.

    `order`: node, size_bytes, seconds; and for other nodes what `markers.exchange` takes.
    """
    if isinstance(store, FileStore):
        report.step("look for room")
        room = os.statvfs(store.root)
        report.reading("checkpoint_available_bytes", float(room.f_bavail * room.f_frsize))
    _remove_leftovers(store, order["node"], report)
    folder = f"{PREFIX}{order['node']}.{os.urandom(6).hex()}"
    written = _Written(int(order["size_bytes"]), time.monotonic() + float(order["seconds"]) * _WRITE_SHARE)
    seconds: dict[str, float] = {}
    report.step("make a folder")
    try:
        store.make_folder(folder)
        with report.timed("write and flush", seconds, "write"):
            store.write(f"{folder}/{PART}", written.chunks())
        size = written.size
        with report.timed("rename", seconds, "rename"):
            store.rename(f"{folder}/{PART}", f"{folder}/{WHOLE}")
        report.step("list")
        listed = store.sizes(folder)
        if listed != {WHOLE: size}:
            text = f"list: it shows {listed or 'nothing'} right after {WHOLE} of {size} bytes was written"
            raise StoreFault("StoreCorruption", text)
        with report.timed("read back", seconds, "read"):
            _compare(store.read(f"{folder}/{WHOLE}"), written.again(), size)
        report.step("delete")
        store.remove(f"{folder}/{WHOLE}")
        store.remove_folder(folder)
    except BaseException:
        _remove(store, folder)
        raise
    report.reading("checkpoint_write_bytes_per_second", size / seconds["write"])
    report.reading("checkpoint_read_bytes_per_second", size / seconds["read"])
    report.reading("checkpoint_rename_seconds", seconds["rename"])
    if float(order["marker_seconds"]) > 0:
        from checks.stores.markers import exchange

        exchange(store, order, report)


class _Written:
    """
    Random bytes, each chunk with its own number: what compresses or repeats would measure something else.

    A slow store is given fewer of them, so that its speed is known before the process is killed.
    """

    def __init__(self, most_bytes: int, deadline: float) -> None:
        self.size = 0
        self._most_bytes, self._deadline = most_bytes, deadline
        self._block = os.urandom(CHUNK_BYTES)

    def chunks(self) -> Iterator[bytes]:
        """Those to write, until there are enough or the time for it is up."""
        while self.size < self._most_bytes and (not self.size or time.monotonic() < self._deadline):
            chunk = self._chunk(self.size)[: self._most_bytes - self.size]
            self.size += len(chunk)
            yield chunk

    def again(self) -> Iterator[bytes]:
        """Those that were written."""
        for place in range(0, self.size, CHUNK_BYTES):
            yield self._chunk(place)[: self.size - place]

    def _chunk(self, place: int) -> bytes:
        return place.to_bytes(8, "big") + self._block[8:]


def _compare(found: Iterator[bytes], wanted: Iterator[bytes], size: int) -> None:
    """Raises StoreFault for the first byte that differs from what was written."""
    place, rest = 0, b""
    for part in found:
        offset = 0
        while offset < len(part):
            rest = rest or next(wanted, b"")
            if not rest:
                raise StoreFault("StoreCorruption", f"read back: more than the {size} bytes that were written")
            piece = part[offset : offset + len(rest)]
            if piece != rest[: len(piece)]:
                first = next(i for i, (a, b) in enumerate(zip(piece, rest, strict=False)) if a != b)
                raise StoreFault("StoreCorruption", f"read back: byte {place + first} differs from what was written")
            offset, place, rest = offset + len(piece), place + len(piece), rest[len(piece) :]
    if place != size:
        raise StoreFault("StoreCorruption", f"read back: {place} of {size} bytes")


def _remove(store: Store, folder: str) -> None:
    """Remove the files of a probe by their names, then its folder; what else may be in it stays, and so does it."""
    for name in (PART, WHOLE):
        with suppress(Exception):
            store.remove(f"{folder}/{name}")
    with suppress(Exception):
        store.remove_folder(folder)


def _remove_leftovers(store: Store, node: str, report: Report) -> None:
    """Remove what a killed run of this node has left, on file systems; an object is there only when it is whole."""
    if not isinstance(store, FileStore):
        return
    report.step("look for what an earlier run left")
    for name in store.folders(""):
        if name.startswith(f"{PREFIX}{node}."):
            with suppress(OSError):
                _remove_leftover(store.root, name)


def _remove_leftover(root: str, name: str) -> None:
    """Remove an old probe folder of our own by its descriptor: its name may lead elsewhere a moment later."""
    above = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            there = os.fstat(folder)
            if there.st_uid != os.geteuid() or time.time() - there.st_mtime <= LEFTOVER_SECONDS:
                return
            for file in (PART, WHOLE):
                with suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=above)
    finally:
        os.close(above)
