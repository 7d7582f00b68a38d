"""
What a checkpoint of torch.distributed.checkpoint says of itself, and whether its files are as it says: without torch.

Its `.metadata` is a pickle, written last. It is read as plain records: no class that it names is imported, nothing that
it says is called, because a checkpoint is a file of somebody else and the daemon may be root.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.stores.errors import StoreFault
from checks.stores.operations import Store
from checks.stores.report import Report

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
MAX_METADATA_BYTES = 256 << 20
_MOST_FAULTS = 8


class Record:
    """Stands for any object of a pickle: what it was made of and its attributes, and nothing that it could do."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments
        self.named = named

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, item: Any) -> None:
        """For pickles of classes that are lists."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """For pickles of classes that are dictionaries."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        # A class of its own for each name, so that one cannot become another.
        return type(name.rpartition(".")[2] or "Record", (Record,), {"__module__": "pickled"})


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint, and the bytes that it must have at least."""

    name: str
    needed_bytes: int
    items: int


def read_shards(content: bytes) -> list[Shard]:
    """
    The files that a `.metadata` names.

    Raises StoreFault CheckpointTorn for what is none, or is cut.
    """
    try:
        read = _Reader(io.BytesIO(content)).load()
        storage = read.storage_data
        ends: dict[str, int] = {}
        counts: collections.Counter[str] = collections.Counter()
        for info in storage.values():
            name, end = str(info.relative_path), int(info.offset) + int(info.length)
            ends[name] = max(ends.get(name, 0), end)
            counts[name] += 1
    except Exception as error:  # noqa: BLE001  bytes of any kind may raise anything
        text = f"{METADATA} cannot be read ({type(error).__name__}): the save did not end, or the file is damaged"
        raise StoreFault("CheckpointTorn", text) from None
    if not ends:
        raise StoreFault("CheckpointTorn", f"{METADATA} names no file")
    return [Shard(name, end, counts[name]) for name, end in sorted(ends.items())]


def inspect(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    Whether the checkpoint is whole by its metadata, and loads: `order` has `all` (load every shard) and `load_bytes`.
    """
    report.step("list the checkpoint")
    sizes = store.sizes("")
    if METADATA not in sizes:
        there = f"there are {len(sizes)} other files" if sizes else "the directory is empty"
        text = f"there is no {METADATA}, which is written last: the save did not end ({there})"
        raise StoreFault("CheckpointTorn", text)
    report.step("read the metadata")
    content = b"".join(store.read(METADATA, 0, MAX_METADATA_BYTES))
    shards = read_shards(content)
    faults = list(_faults_of(shards, sizes))
    for reason, message in faults[:_MOST_FAULTS]:
        report.fault(reason, message)
    if len(faults) > _MOST_FAULTS:
        report.note(f"{len(faults) - _MOST_FAULTS} more files are not as they should be")
    report.reading("checkpoint_files_count", float(len(shards)))
    report.reading("checkpoint_size_bytes", float(sum(shard.needed_bytes for shard in shards)))
    if faults:
        return
    from checks.stores.loading import load

    load(store.root, shards, report, everything=bool(order["all"]), most_bytes=int(order["load_bytes"]))


def _faults_of(shards: list[Shard], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for shard in shards:
        if shard.name not in sizes:
            yield "ShardMissing", f"{shard.name} is not there, and the metadata names it"
        elif sizes[shard.name] == 0:
            yield "ShardEmpty", f"{shard.name} is empty, and must have {shard.needed_bytes} bytes"
        elif sizes[shard.name] < shard.needed_bytes:
            yield "ShardShort", f"{shard.name} has {sizes[shard.name]} bytes, and must have {shard.needed_bytes}"
    named = {shard.name for shard in shards}
    for name, size in sorted(sizes.items()):
        if name.endswith(SHARD_SUFFIX) and name not in named and size == 0:
            yield "ShardEmpty", f"{name} is empty"
