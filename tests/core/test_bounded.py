"""Files that others have written: never too much of them, and never a wait without an end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from healthd.core.bounded import read_file, read_stream
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.http.trust import trusting


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    assert read_file(file, 100_000) == b"x" * 100_000
    with pytest.raises(BadInputError, match="larger than 99999 bytes"):
        read_file(file, 99_999)
    with pytest.raises(BadInputError, match="larger than 4 MiB"):
        read_file(Path("/dev/zero"), 4 << 20)
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'"):
        read_file(tmp_path, 10)


def test_an_answer_without_an_end_is_given_up_at_its_bound() -> None:
    given = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal given
        while True:
            given += 1
            yield b"x" * 100

    async def short() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"c"

    assert asyncio.run(read_stream(short(), 3, what="it")) == b"abc"
    with pytest.raises(BadInputError, match="it is larger than 2 bytes"):
        asyncio.run(read_stream(short(), 2, what="it"))
    with pytest.raises(BadInputError, match="larger than 1000 bytes"):
        asyncio.run(read_stream(endless(), 1000, what="it"))
    assert given == 11


def test_a_pipe_that_nobody_writes_to_is_empty_and_keeps_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "pipe", 10) == b""


def test_a_pipe_is_read_to_its_end() -> None:
    """As `--hostfile <(scontrol show hostnames)` is: what writes into it may not have begun."""
    end, begin = os.pipe()
    asked = threading.Event()

    def write() -> None:
        asked.wait()
        for part in (b"n1\n", b"n2\n"):
            os.write(begin, part)
        os.close(begin)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(BadInputError, match=r"nothing has come from this pipe for 0\.01 s"):
            read_file(Path(f"/dev/fd/{end}"), 10, pipe_seconds=0.01)
        asked.set()
        assert read_file(Path(f"/dev/fd/{end}"), 10) == b"n1\nn2\n"
    finally:
        asked.set()
        writer.join()
        os.close(end)


def test_a_pipe_is_no_ca_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=r"ca\.pem: not a CA file: it is a pipe; name another with --ca-file"):
        trusting(tmp_path / "ca.pem")
