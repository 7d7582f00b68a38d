"""Reads what others have written or send: never more of it than is allowed, and never for longer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from healthd.core.errors import BadInputError


def read_file(path: Path, most: int) -> bytes:
    """The content of a file. OSError; BadInputError, without the name, for one of more than `most` bytes."""
    with path.open("rb") as file:
        body = file.read(most + 1)
    if len(body) > most:
        raise BadInputError(f"larger than {_size(most)}")
    return body


def read_parts(parts: Iterable[bytes], most: int, *, until: float = float("inf")) -> bytes:
    """All parts as one. BadInputError for more than `most` bytes, or for any after `until` (time.monotonic)."""
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > most:
            raise BadInputError(f"more than {_size(most)}")
        if time.monotonic() > until:
            raise BadInputError("it did not end in time")
    return bytes(body)


def _size(most: int) -> str:
    return f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
