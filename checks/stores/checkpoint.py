"""
The metadata of a checkpoint of torch.distributed.checkpoint, and whether its files match it: without torch.

Its `.metadata` is a pickle, written last. It is read as plain records: no class that it names is imported and nothing
in it is called, because a checkpoint is a foreign file and the daemon may be root.

Also here:

- loads shards by torch.distributed.checkpoint itself, one chunk after the other, so that memory is bounded by a
  chunk.
"""

from __future__ import annotations

import collections
import io
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.stores.operations import Store, StoreFault, is_url
from checks.stores.report import Report

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
MAX_METADATA_BYTES = 256 << 20
_MOST_FAULTS = 8

_PLAIN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout")}
_PATHS = {("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")} | {
    ("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")
}


def inspect(store: Store, order: Mapping[str, Any], report: Report) -> None:
    """
    Whether the checkpoint is whole by its metadata, and loads: `order` has `all` (load every shard) and `load_bytes`.
    """
    report.step("list the checkpoint")
    sizes = store.sizes("")
    if METADATA not in sizes:
        there = f"there are {len(sizes)} other files" if sizes else "the directory is empty"
        text = f"{METADATA}, which is written last, is missing: the save did not finish ({there})"
        raise StoreFault("CheckpointTorn", text)
    report.step("read the metadata")
    content = b"".join(store.read(METADATA, 0, MAX_METADATA_BYTES))
    shards = read_shards(content)
    faults = list(_faults_of(shards, sizes))
    for reason, message in faults[:_MOST_FAULTS]:
        report.fault(reason, message)
    if len(faults) > _MOST_FAULTS:
        report.note(f"{len(faults) - _MOST_FAULTS} more files are wrong")
    report.reading("checkpoint_files_count", float(len(shards)))
    report.reading("checkpoint_size_bytes", float(sum(shard.needed_bytes for shard in shards)))
    if faults:
        return

    load(store.root, shards, report, everything=bool(order["all"]), most_bytes=int(order["load_bytes"]))


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
        text = f"{METADATA} cannot be read ({type(error).__name__}): the save did not finish, or the file is damaged"
        raise StoreFault("CheckpointTorn", text) from None
    if not ends:
        raise StoreFault("CheckpointTorn", f"{METADATA} lists no files")
    return [Shard(name, end, counts[name]) for name, end in sorted(ends.items())]


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


def load(root: str, shards: Sequence[Shard], report: Report, *, everything: bool, most_bytes: int) -> None:
    """Load every shard, or the smallest one: of that the chunks that fit into `most_bytes`, at least one."""
    report.step("import torch.distributed.checkpoint")
    from torch.distributed.checkpoint.planner import LoadPlan

    reader = _open_reader(root)
    report.step("load the metadata")
    metadata = _metadata(reader)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    by_file: dict[str, list[Any]] = {}
    for index, info in metadata.storage_data.items():
        by_file.setdefault(str(info.relative_path), []).append((info.length, info.offset, index))
    # The smallest file says as much as any other of whether this store and this torch can load; deep loads all.
    chosen = list(shards) if everything else [min(shards, key=lambda shard: (shard.needed_bytes, shard.name))]
    begun, took, count = time.perf_counter(), 0, 0
    for shard in chosen:
        report.step(f"load {shard.name}")
        stored = sorted(by_file.get(shard.name, ()), key=lambda one: one[:2])
        if not everything:
            stored = _within(stored, most_bytes)
        took, count = took + sum(one[0] for one in stored), count + len(stored)
        try:
            reader.read_data(LoadPlan([_item(metadata, one[2]) for one in stored]), _planner(metadata)).wait()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  damaged bytes may raise anything in torch
            said = " ".join(str(error).split())[:200]
            report.fault("ShardUnreadable", f"{shard.name} cannot be loaded: {type(error).__name__}: {said}")
    report.reading("checkpoint_load_bytes_per_second", took / (time.perf_counter() - begun))
    report.note(f"{count} tensors and objects of {len(chosen)} of {len(shards)} files")


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint, and the bytes that it must have at least."""

    name: str
    needed_bytes: int
    items: int


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        # A class of its own for each name, so that one cannot become another.
        return type(name.rpartition(".")[2] or "Record", (Record,), {"__module__": "pickled"})


def _faults_of(shards: list[Shard], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for shard in shards:
        if shard.name not in sizes:
            yield "ShardMissing", f"{shard.name} is listed in the metadata but missing"
        elif sizes[shard.name] == 0:
            yield "ShardEmpty", f"{shard.name} is empty and must have {shard.needed_bytes} bytes"
        elif sizes[shard.name] < shard.needed_bytes:
            yield "ShardShort", f"{shard.name} has {sizes[shard.name]} bytes and must have {shard.needed_bytes}"
    named = {shard.name for shard in shards}
    for name, size in sorted(sizes.items()):
        if name.endswith(SHARD_SUFFIX) and name not in named and size == 0:
            yield "ShardEmpty", f"{name} is empty"


def _within(stored: Sequence[Any], most_bytes: int) -> list[Any]:
    """The first items that take no more than so many bytes together, at least one."""
    taken, found = 0, list[Any]()
    for one in stored:
        if found and taken + one[0] > most_bytes:
            break
        taken += one[0]
        found.append(one)
    return found


def _open_reader(root: str) -> Any:
    if is_url(root):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(root)
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(root)


def _planner(metadata: Any) -> Any:
    """Gives memory to each tensor that is read, and keeps none of it."""
    import torch
    from torch.distributed.checkpoint.planner import LoadPlanner

    class Planner(LoadPlanner):  # type: ignore[misc]
        def set_up_planner(self, *_: Any, **__: Any) -> None: ...
        def create_local_plan(self) -> Any: ...
        def create_global_plan(self, plans: Any) -> Any: ...
        def finish_plan(self, plan: Any) -> Any: ...
        def commit_tensor(self, read_item: Any, tensor: Any) -> None: ...

        def load_bytes(self, read_item: Any, value: Any) -> None:
            if not value.getvalue():
                raise ValueError(f"{read_item.storage_index.fqn} has no bytes")

        def resolve_tensor(self, read_item: Any) -> Any:
            dtype = metadata.state_dict_metadata[read_item.storage_index.fqn].properties.dtype
            return torch.empty(tuple(read_item.lengths), dtype=dtype)

    return Planner()


def _item(metadata: Any, index: Any) -> Any:
    """The order to read one stored item whole."""
    import torch
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    chunks = getattr(metadata.state_dict_metadata[index.fqn], "chunks", None)
    kind, sizes = LoadItemType.BYTE_IO, torch.Size([0])
    if chunks is not None:
        kind = LoadItemType.TENSOR
        sizes = next((one for one in chunks if one.offsets == index.offset), chunks[0]).sizes
    zeros = torch.Size([0] * len(sizes))
    return ReadItem(
        type=kind, dest_index=index, dest_offsets=zeros, storage_index=index, storage_offsets=zeros, lengths=sizes
    )


def _metadata(reader: Any) -> Any:
    """The metadata as torch's own records. Raises StoreFault CheckpointTorn."""
    import pickle

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name) if "." not in name and _may_import(module, name) else None
            if found is None or not _is_data(module, name, found):
                raise StoreFault("CheckpointTorn", f"{METADATA} refers to {module}.{name}, which no checkpoint needs")
            return found

    path = reader.fs.concat_path(reader.path, METADATA)
    with reader.fs.create_stream(path, "rb") as stream:
        try:
            metadata = Reader(stream).load()
        except (StoreFault, OSError):
            raise
        except Exception as error:  # noqa: BLE001  bytes of any kind may raise anything
            text = f"{METADATA} cannot be loaded by this torch: {type(error).__name__}: {error}"
            raise StoreFault("CheckpointTorn", text) from None
    if getattr(metadata, "storage_meta", None) is None:
        from torch.distributed.checkpoint.metadata import StorageMeta

        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def _may_import(module: str, name: str) -> bool:
    return module == "torch" or module.startswith("torch.distributed.checkpoint.") or (module, name) in _PLAIN | _PATHS


def _is_data(module: str, name: str, found: Any) -> bool:
    """Records, enumerations, and the few plain things beside them; no function but the one that names layouts."""
    import dataclasses
    import enum

    import torch

    if (module, name) in _PLAIN | _PATHS:
        return True
    if isinstance(found, torch.dtype):
        return True
    return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
