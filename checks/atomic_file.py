"""Writes a file in one step: a reader sees the old content or the new content, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(
    path: Path, body: bytes, *, mode: int | None = None, durable: bool = False, several_writers: bool = False
) -> None:
    """
    Write a new file beside the old one, and put it in its place. Raises OSError; the old file stays then.

    `mode` None: as the umask says. `durable` waits until the disk has it. `several_writers`: other processes may write
    the same file at the same time, and the last one wins; one that is killed leaves a file with a name of its own.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new" if several_writers else f".{path.name}.new")
    new.unlink(missing_ok=True)  # what a crash has left; its mode, its owner or a link must not be taken over
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(body)
            file.flush()
            if durable:
                os.fsync(descriptor)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
