"""
No test outlives its time, and nothing that the tests of a module started outlives them.

The time is 30 U (tests/speed.py) of this machine or of the slowest that was seen, whichever is longer: a fast machine
that is busy is a slow one. Tests with other programs, whose images and clusters are made on the way, have 600 U.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import speed
from tests.profile import THOROUGH

UNIT_SECONDS = max(speed.given(), speed.SLOWEST_SECONDS)
SECONDS = 30 * UNIT_SECONDS
SECONDS_OF_FOREIGN = 600 * UNIT_SECONDS
FOREIGN = ("gpu", "images", "kubernetes", "system", "xla")
FOR_ALL = ("prepared_server.py", "launch_ranks.py")  # stay to the end of the run


os.environ.setdefault("PYTEST_TIMEOUT", str(SECONDS))  # of pytest-timeout, for all that is not marked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for the night, and give tests with other programs their time."""
    if not THOROUGH:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    for item in items:
        if is_foreign(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS_OF_FOREIGN))


def is_foreign(item: pytest.Item) -> bool:
    return any(mark.name in FOREIGN for mark in item.iter_markers())


@functools.cache
def has_servers(session: pytest.Session) -> bool:
    """Whether databases and clusters may stay for more than one module."""
    return any(is_foreign(item) for item in session.items)


def heed_interrupts() -> None:
    """What is started in the background has SIGINT ignored, and so would all that the tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Behind the last test of a module no process is left that its tests or fixtures started."""
    yield
    last = nextitem is None or nextitem.path != item.path
    if last and not has_servers(item.session) and (left := end(children())):
        pytest.fail(f"still running behind the tests of {item.path.name}: {'; '.join(left)}", pytrace=False)


def children(pid: int | str = "self") -> set[int]:
    """The processes that a process has started and not waited for."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return {int(child) for file in files for child in file.read_text().split()}
    except OSError:  # it has ended
        return set()


def end(pids: set[int]) -> list[str]:
    """Kill processes and what they started, children first to be known; the command lines of those that were alive."""
    killed = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if not any(words) or any(word.endswith(FOR_ALL) for word in words):  # it has ended and nobody waited for it
            continue
        below = children(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed += [" ".join(words).strip()[:200], *end(below)]
    return killed
