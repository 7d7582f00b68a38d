"""Reads the process table as far as schedulers show in it: names, parents, and the arguments of a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Process:
    """
    One process. `name` is the kernel's, cut after 15 characters; `parent` and `started` (in clock ticks after boot) are
    None where they are unknown.
    """

    pid: int
    name: str
    parent: int | None
    zombie: bool
    started: int | None


def read_processes(proc: Path) -> tuple[Process, ...]:
    """All processes that can be seen, by id. Never touches their memory, where a read can wait for ever."""
    found = []
    for folder in proc.glob("[0-9]*"):
        if not folder.name.isdecimal():
            continue
        process = read_process(proc, int(folder.name))
        if process is not None:
            found.append(process)
    return tuple(sorted(found, key=lambda process: process.pid))


def read_process(proc: Path, pid: int) -> Process | None:
    """One process; None when it has ended or may not be looked into. OSError where nothing can be read just now."""
    folder = proc / str(pid)
    name = _read_if_there(folder / "comm")
    if name is None:
        return None
    # The second field of `stat` may hold any characters; source of the numbers: proc_pid_stat(5).
    fields = (_read_if_there(folder / "stat") or "").rpartition(")")[2].split()
    parent, started = (_number(fields, place) for place in (1, 19))
    return Process(pid=pid, name=name.strip(), parent=parent, zombie=fields[:1] in (["Z"], ["X"]), started=started)


def _number(fields: Sequence[str], place: int) -> int | None:
    return int(fields[place]) if len(fields) > place and fields[place].isdecimal() else None


def read_arguments(proc: Path, pid: int) -> tuple[str, ...] | None:
    """The argument vector as it is now (programs rewrite it); None when it cannot be read."""
    text = _read(proc / str(pid) / "cmdline")
    return None if text is None else tuple(part for part in text.split("\0") if part)


def read_environment(proc: Path, pid: int) -> Mapping[str, str] | None:
    """The variables that it was started with; None when they may not be read: root's right, or its own user's."""
    text = _read(proc / str(pid) / "environ")
    if text is None:
        return None
    return {name: value for name, _, value in (part.partition("=") for part in text.split("\0")) if name}


def _read_if_there(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError, PermissionError):
        return None  # any other error, such as too many open files, is no sign that the process has ended


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
