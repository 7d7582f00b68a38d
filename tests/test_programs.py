"""Programs and calls in threads that hang: neither they nor what they started outlive their time."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from pathlib import Path

import pytest

from healthd.core.threads import CalledOffError, Programs, use_daemon_threads
from tests.aggregator.service import until
from tests.patience import PATIENCE

HANGS = "#!/bin/sh\nsleep 600 &\necho $! > {file}.new; mv {file}.new {file}\nwait\n"


@pytest.fixture
def hanging(tmp_path: Path) -> tuple[Path, Path]:
    """A program that hangs with a child of its own, and the file with the number of that child."""
    program, file = tmp_path / "program", tmp_path / "child"
    program.write_text(HANGS.format(file=file))
    program.chmod(0o755)
    return program, file


def gone(file: Path) -> bool:
    """Whether the process whose number the file has is no more, but for being reaped by init."""
    try:
        return Path(f"/proc/{int(file.read_text())}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_program_that_is_out_of_time_ends_with_what_it_started(hanging: tuple[Path, Path]) -> None:
    program, file = hanging
    with pytest.raises(subprocess.TimeoutExpired):
        Programs().run([str(program)], timeout_seconds=0.4)
    until(lambda: gone(file))


def test_program_that_is_called_off_ends_with_what_it_started_and_no_other_starts(hanging: tuple[Path, Path]) -> None:
    program, file = hanging
    programs = Programs()
    ended: list[subprocess.CompletedProcess[bytes]] = []
    thread = threading.Thread(
        target=lambda: ended.append(programs.run([str(program)], timeout_seconds=600)), daemon=True
    )
    thread.start()
    until(file.exists)
    programs.cancel()
    until(lambda: bool(ended) and gone(file))
    assert ended[0].returncode == -9
    with pytest.raises(CalledOffError):
        programs.run(["true"], timeout_seconds=600)


def test_call_in_a_thread_that_hangs_does_not_keep_the_loop_from_ending() -> None:
    go = threading.Event()

    async def main() -> list[int]:
        use_daemon_threads()
        results = await asyncio.gather(*(asyncio.to_thread(abs, -number) for number in range(40)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.to_thread(go.wait, 20 * PATIENCE)
        return results

    began = time.monotonic()
    try:
        assert asyncio.run(main()) == list(range(40))
        assert time.monotonic() - began < 5 * PATIENCE
    finally:
        go.set()
