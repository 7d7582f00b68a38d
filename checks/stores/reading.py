"""Reads parts of a data set, in order and at random places, and measures it; nothing is decoded. In the child."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from checks.stores.errors import StoreFault
from checks.stores.operations import Store
from checks.stores.report import Report

_MOST_FOLDERS = 64
_MOST_FILES = 4096


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
        text = f"it has {len(files)} files, all of them empty" if files else "it has no file"
        raise StoreFault("StoreMissing", text)
    chance = random.Random()  # noqa: S311  no secret hangs on it
    limit_seconds = float(order["seconds"])
    report.step("read in order")
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
    report.step("read at random places")
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


def _require(took: int) -> None:
    if not took:
        raise StoreFault("StoreError", "files that are listed with a size gave no bytes")


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
