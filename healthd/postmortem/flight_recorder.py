"""
What torch's Flight Recorder dumps say: which collective each rank had reached. Reading one runs no code of it.

Of the formats 2.4 to 2.10 whatever keys are there are used. Ranks are joined by the *name* of the process group
(`process_group[0]`): `pg_id` counts the groups of one process and means another group in another one. Point-to-point
operations are left out: only two ranks take part, in an order of their own.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from checks.json_text import parse_json
from healthd.core.errors import BadInputError
from healthd.postmortem.judge import Late

MAX_BYTES = 64 * 1024 * 1024  # 2000 entries with their stacks are 2 to 8 MB
MAX_ENTRIES = 200_000


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective of one rank. `group` is the process group's name; `done` where it was seen complete."""

    group: str
    description: str
    sequence: int
    name: str
    done: bool


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What one rank had called, oldest first. `members` maps a group's name to its ranks, where the dump says them."""

    rank: int
    version: str
    operations: tuple[Operation, ...]
    members: Mapping[str, frozenset[int]]


class _Plain(pickle.Unpickler):
    """Takes numbers, text, lists, tuples and dictionaries, and refuses everything that names code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a dump has only plain values")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of it")


def read_dump(content: bytes, rank: int, where: str) -> Dump:
    """
    The dump of a rank, as pickle or as JSON. BadInputError, with `where`, for anything else.

    The rank is in the name of the file alone.
    """
    if len(content) > MAX_BYTES:
        raise BadInputError(f"{where}: larger than {MAX_BYTES} bytes; lower TORCH_FR_BUFFER_SIZE")
    try:
        whole = parse_json(content) if content.lstrip()[:1] == b"{" else _Plain(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  a broken pickle raises anything
        raise BadInputError(f"{where}: not a Flight Recorder dump: {type(error).__name__}: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("entries", []), list | tuple):
        raise BadInputError(f"{where}: not a Flight Recorder dump: it has no list of entries")
    entries = [each for each in whole.get("entries", [])[:MAX_ENTRIES] if isinstance(each, dict)]
    operations = [operation for each in entries if (operation := _operation(each)) is not None]
    return Dump(
        rank=rank,
        version=str(whole.get("version", "")),
        operations=tuple(operations),
        members=_members(whole.get("pg_config")),
    )


def _operation(entry: Mapping[object, object]) -> Operation | None:
    """One entry; None for what is point-to-point or has no number."""
    name = str(entry.get("profiling_name", ""))
    if entry.get("is_p2p") is True or re.search(r":(?:send|recv|coalesced)\b", name):
        return None
    group = entry.get("process_group")
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        return None
    named = [str(part) for part in group] if isinstance(group, list | tuple) else [str(entry.get("pg_name", group))]
    done = entry.get("state") == "completed" or entry.get("retired") is True
    done = done or bool(entry.get("time_discovered_completed_ns"))
    return Operation(
        group=named[0] if named else "", description=named[1] if len(named) > 1 else "", sequence=sequence,
        name=name.partition(":")[2] or name, done=done,
    )  # fmt: skip


def _members(config: object) -> dict[str, frozenset[int]]:
    members: dict[str, frozenset[int]] = {}
    for name, told in config.items() if isinstance(config, dict) else ():
        ranks = told.get("ranks") if isinstance(told, dict) else None
        numbers = re.findall(
            r"\d+", ranks if isinstance(ranks, str) else str(list(ranks)) if isinstance(ranks, list) else ""
        )
        if numbers:
            members[str(name)] = frozenset(int(number) for number in numbers)
    return members


def late_ranks(dumps: Iterable[Dump]) -> tuple[Late, ...]:
    """
    The ranks that the others waited for, by two rules; () where the dumps do not say.

    A rank whose buffer is empty while others hold unfinished collectives has not come to the first. A rank whose
    oldest unfinished collective in a group is older than those of its peers holds these up. Where neither names one: a
    rank that waits for nothing, and has not called what the others of its group wait in.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    waits = {rank: _oldest(dump.operations) for rank, dump in by_rank.items()}
    waiting = [rank for rank, groups in waits.items() if groups]
    if not waiting:
        return ()
    empty = [
        Late(rank=rank, why=f"it had called no collective while {_ranks(waiting)} waited in one")
        for rank, dump in sorted(by_rank.items())
        if not dump.operations
    ]
    return tuple(empty) or _older(waits) or _missing(by_rank, waits)


def _oldest(operations: Sequence[Operation]) -> dict[str, Operation]:
    """Group -> the oldest collective of it that is not finished."""
    oldest: dict[str, Operation] = {}
    for operation in operations:
        if not operation.done and (
            operation.group not in oldest or operation.sequence < oldest[operation.group].sequence
        ):
            oldest[operation.group] = operation
    return oldest


def _older(waits: Mapping[int, Mapping[str, Operation]]) -> tuple[Late, ...]:
    late: dict[int, str] = {}
    for group in sorted({group for groups in waits.values() for group in groups}):
        numbers = {rank: groups[group] for rank, groups in waits.items() if group in groups}
        last = max(operation.sequence for operation in numbers.values())
        behind = {rank: each for rank, each in numbers.items() if each.sequence < last}
        if 2 * len(behind) > len(numbers):  # most of them are not late: one is ahead, which explains nothing
            continue
        for rank, each in sorted(behind.items()):
            late.setdefault(
                rank,
                f"its oldest unfinished collective in {_named(each)} is number {each.sequence} ({each.name}), its "
                f"peers' is number {last}",
            )
    return tuple(Late(rank=rank, why=why) for rank, why in late.items())


def _missing(by_rank: Mapping[int, Dump], waits: Mapping[int, Mapping[str, Operation]]) -> tuple[Late, ...]:
    late: dict[int, str] = {}
    for rank, dump in sorted(by_rank.items()):
        if waits[rank]:
            continue
        reached = {operation.group: operation.sequence for operation in dump.operations}
        for group, last in reached.items():
            others = [groups[group] for other, groups in waits.items() if group in groups and other != rank]
            ahead = [operation for operation in others if operation.sequence > last]
            if ahead:
                first = min(ahead, key=lambda operation: operation.sequence)
                why = f"it had reached number {last} in {_named(first)}, while others waited in number {first.sequence}"
                late.setdefault(rank, f"{why} ({first.name})")
    return tuple(Late(rank=rank, why=why) for rank, why in late.items())


def _named(operation: Operation) -> str:
    return f"group {operation.group!r}" + (f" ({operation.description})" if operation.description else "")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
