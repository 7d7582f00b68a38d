"""
Loads shards by torch.distributed.checkpoint itself, one chunk after the other, so that memory is bounded by a chunk.

In the child process alone. No pickle of the checkpoint is run: the metadata may name classes of
torch.distributed.checkpoint and no others, tensors are loaded with `weights_only`, and objects are read but not made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from checks.stores.checkpoint import METADATA, Shard
from checks.stores.errors import StoreFault
from checks.stores.operations import is_url
from checks.stores.report import Report

_PLAIN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout")}
_PATHS = {("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")} | {
    ("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")
}


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
                raise StoreFault("CheckpointTorn", f"{METADATA} names {module}.{name}, which no checkpoint needs")
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
