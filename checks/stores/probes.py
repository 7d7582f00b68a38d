"""
What a child process does on a store: look at it, read parts of a data set, write and delete one file, leave and read
markers; each within bounds, measured.

Also here:

- reads parts of a data set, in order and at random places, and measures it; nothing is decoded;
- writes, renames, reads back, lists and deletes one file of bounded size, and measures it: in the child process;
- what one node wrote, every other sees whole: each node leaves one small marker, and reads those of its peers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from checks.json_text import parse_json
from checks.printable import some
from checks.stores.operations import CHUNK_BYTES, FileStore, Store, StoreFault
from checks.stores.report import Report

_MOST_FOLDERS = 64
_MOST_FILES = 4096

PREFIX = ".healthd-probe."
PART, WHOLE = "data.part", "data"
LEFTOVER_SECONDS = 900.0
"""A probe folder of this node that is older was left by a run that was killed: no run takes so long."""

_WRITE_SHARE = 0.3
"""Of the time for all: writing it, flushing it and reading it back may take as long each."""

FOLDER = ".healthd-markers"
PAYLOAD_BYTES = 64 << 10  # more than a page, so that a part can be missing
_POLL_SECONDS = 0.2
_MOST_MARKERS = 1024


def look(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """`order`: writable, whether jobs save there."""
    begun = time.perf_counter()
    report.step("read the file system's statistics")
    found = os.statvfs(store.root)
    report.step("list the directory")
    with os.scandir(store.root) as entries:
        next(entries, None)
    if order["writable"]:
        report.step("check whether it is writable")
        if found.f_flag & os.ST_RDONLY:
            raise StoreFault("StoreReadOnly", "it is mounted read-only, but jobs save there")
        if not os.access(store.root, os.W_OK | os.X_OK, effective_ids=True):
            raise StoreFault("StoreNoPermission", "its mode does not allow the user to write")
        if found.f_blocks and not found.f_bavail:
            raise StoreFault("StoreNoSpace", "users have no space left")
        if found.f_files and not found.f_favail:
            raise StoreFault("StoreNoInodes", "users have no inodes left: too many files")
        report.reading("store_available_bytes", float(found.f_bavail * found.f_frsize))
        if found.f_files:
            report.reading("store_available_inodes_ratio", found.f_favail / found.f_files)
    report.reading("store_answer_seconds", time.perf_counter() - begun)


def measure(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    `order`: size_bytes (read in order, at most), random_reads, random_bytes, seconds (for either kind, at most).

    Files and places are others in each run, so that caches do not answer.
    """
    report.step("list the data set")
    files = dict(find_files(store))
    report.reading("data_files_count", float(len(files)))
    filled = [(name, size) for name, size in files.items() if size > 0]
    if not filled:
        text = f"it has {len(files)} files, all of them empty" if files else "it contains no files"
        raise StoreFault("StoreMissing", text)
    chance = random.Random()  # noqa: S311  no secret hangs on it
    limit_seconds = float(order["seconds"])
    report.step("read sequentially")
    took, begun = 0, time.perf_counter()
    for name, size in chance.sample(filled, len(filled)):
        left = int(order["size_bytes"]) - took
        start = chance.randrange(0, max(1, size - left))
        for chunk in store.read(name, start, min(left, size - start)):
            took += len(chunk)
            if time.perf_counter() - begun > limit_seconds:
                break
        if took >= int(order["size_bytes"]) or time.perf_counter() - begun > limit_seconds:
            break
    _require(took)
    report.reading("data_sequential_bytes_per_second", took / (time.perf_counter() - begun))
    report.step("read at random offsets")
    took, each, begun = 0, [], time.perf_counter()
    for _ in range(int(order["random_reads"])):
        name, size = chance.choice(filled)
        since = time.perf_counter()
        start = chance.randrange(0, max(1, size - int(order["random_bytes"])))
        took += sum(map(len, store.read(name, start, min(size, int(order["random_bytes"])))))
        each.append(time.perf_counter() - since)
        if time.perf_counter() - begun > limit_seconds:
            break
    _require(took)
    report.reading("data_random_bytes_per_second", took / (time.perf_counter() - begun))
    report.reading("data_random_read_seconds", sorted(each)[len(each) // 2])


def find_files(store: Store) -> Iterator[tuple[str, int]]:
    """Files of the data set with their sizes, the nearest first, within bounds."""
    waiting, seen, found = [""], 0, 0
    while waiting and seen < _MOST_FOLDERS:
        folder = waiting.pop(0)
        seen += 1
        above = f"{folder}/" if folder else ""
        # Each file costs a question to the server, and a folder may have millions of them.
        for name, size in store.sizes(folder, _MOST_FILES - found).items():
            found += 1
            yield f"{above}{name}", size
        if found >= _MOST_FILES:
            return
        waiting += [f"{above}{name}" for name in store.folders(folder) if not name.startswith(".")]


def probe(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    One whole pass of what a save does, in a folder of its own name, which is removed whatever happens.

    `order`: node, size_bytes, seconds; and for other nodes what `exchange` takes.
    """
    if isinstance(store, FileStore):
        report.step("check the free space")
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
        exchange(store, order, report)


def exchange(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    Replace this node's marker, then read those of its peers until all are there or the time is up.

    `order`: node, peers, marker_seconds (older ones are not looked at), wait_seconds.
    """
    node = order["node"]
    report.step("write a marker for other nodes")
    _write(store, node)
    report.step("read the markers of other nodes")
    deadline = time.monotonic() + float(order["wait_seconds"])
    wanted = set(order["peers"]) - {node}
    while True:
        whole, torn = _read(store, node, wanted, float(order["marker_seconds"]))
        missing = wanted - whole
        if (not missing and not torn) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for name in sorted(torn):
        report.fault("StoreNotShared", f"the marker of {name} is incomplete here: {torn[name]}")
    missing -= torn.keys()
    if missing:
        seconds = float(order["marker_seconds"])
        report.fault(
            "StoreNotShared", f"no recent marker (under {seconds:g} s) is visible here from {some(sorted(missing), 8)}"
        )
    report.reading("checkpoint_peers_count", float(len(whole)))


def _require(took: int) -> None:
    if not took:
        raise StoreFault("StoreError", "files listed with a size returned no bytes")


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
    report.step("look for leftovers of earlier runs")
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


def _write(store: Store, node: str) -> None:
    payload = os.urandom(PAYLOAD_BYTES)
    digest = hashlib.blake2b(payload, digest_size=16).hexdigest()
    head = json.dumps({"node": node, "written_at": time.time(), "bytes": len(payload), "digest": digest}).encode()
    with suppress(FileExistsError):
        store.make_folder(FOLDER)
    if isinstance(store, FileStore) and os.path.islink(os.path.join(store.root, FOLDER)):
        raise StoreFault(
            "StoreNoPermission", f"{FOLDER} is a link to another place, so nothing is written there; remove it"
        )
    part = f"{FOLDER}/{node}.{os.urandom(4).hex()}.part"
    try:
        store.write(part, iter((head + b"\n", payload)))
        store.rename(part, f"{FOLDER}/{node}")
    except BaseException:
        with suppress(Exception):
            store.remove(part)
        raise


def _read(store: Store, node: str, wanted: Collection[str], seconds: float) -> tuple[set[str], dict[str, str]]:
    """
    The nodes with a marker that is young and whole, and those whose marker is not whole, with what is wrong.

    Markers that are wanted are all read, of others as many as the bound leaves.
    """
    whole: set[str] = set()
    torn: dict[str, str] = {}
    # What begins with a dot is the file system's own, such as NFS's name for a marker that was replaced while open.
    there = [name for name in store.sizes(FOLDER) if name != node and not name.startswith(".")]
    there = [name for name in there if name and not name.endswith(".part")]
    most = max(_MOST_MARKERS, len(wanted))
    for name in sorted(there, key=lambda name: (name not in wanted, name))[:most]:
        try:
            content = b"".join(store.read(f"{FOLDER}/{name}", 0, PAYLOAD_BYTES + 4096))
        except OSError as error:
            torn[name] = str(error)
            continue
        found = _judge(content)
        if isinstance(found, str):
            torn[name] = found
        elif time.time() - found < seconds:
            whole.add(name)
    return whole, torn


def _judge(content: bytes) -> float | str:
    """When a marker was written, or what is wrong with it."""
    head, _, payload = content.partition(b"\n")
    try:
        said = parse_json(head)
        written_at, size, digest = float(said["written_at"]), int(said["bytes"]), str(said["digest"])
    except (ValueError, KeyError, TypeError):
        return f"its {len(content)} bytes do not begin as a node's marker does"
    if len(payload) != size:
        return f"{len(payload)} of {size} bytes"
    if hashlib.blake2b(payload, digest_size=16).hexdigest() != digest:
        return "its bytes differ from what was written"
    return written_at
