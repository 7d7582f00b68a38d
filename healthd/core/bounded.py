"""Reads what others have written or send: never more of it than is allowed, and never for longer."""

from __future__ import annotations

import os
import select
import time
from collections.abc import AsyncIterable, Iterable
from pathlib import Path

from healthd.core.errors import BadInputError

PIPE_SECONDS = 60.0
"""How long who writes into a pipe may be silent: `--hostfile <(ssh head squeue ...)`."""


def read_file(path: Path, most: int, *, pipe_seconds: float = PIPE_SECONDS) -> bytes:
    """
    The content of a file. OSError; BadInputError, without the name, for one of more than `most` bytes, and for a pipe
    from which nothing comes for so long. One that nobody has open for writing is empty.
    """
    body = bytearray()
    with open(path, "rb", buffering=0, opener=_open_at_once) as file:
        while len(body) <= most:
            part = file.read(most + 1 - len(body))
            if part is None:  # a pipe, and nothing in it yet
                waiting = select.poll()
                waiting.register(file, select.POLLIN)
                if not waiting.poll(1e3 * pipe_seconds):
                    raise BadInputError(f"nothing has come from this pipe for {pipe_seconds:g} s")
            elif part:
                body += part
            else:
                return bytes(body)
    raise BadInputError(f"larger than {_size(most)}")


def _open_at_once(path: str, flags: int) -> int:
    """Without a wait for somebody who writes into a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_parts(parts: Iterable[bytes], most: int, *, until: float = float("inf")) -> bytes:
    """All parts as one. BadInputError for more than `most` bytes, or for any after `until` (time.monotonic)."""
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > most:
            raise BadInputError(f"more than {_size(most)}")
        if time.monotonic() > until:
            raise BadInputError("it did not finish in time")
    return bytes(body)


async def read_stream(parts: AsyncIterable[bytes], most: int, *, what: str) -> bytes:
    """All parts as one; BadInputError for more than `most` bytes: `what` is larger. The caller bounds the time."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > most:
            raise BadInputError(f"{what} is larger than {_size(most)}")
    return bytes(body)


def _size(most: int) -> str:
    return f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
