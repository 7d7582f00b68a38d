"""A signal that ends a hook: where it may raise, and where it must not."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from healthd.hooks.stopping import Signals, Stopped, stoppable
from tests.patience import PATIENCE


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_signal_ends_the_wait_and_not_the_work_half_way() -> None:
    told, ended = threading.Event(), threading.Event()

    def work() -> None:
        stop_me()
        told.wait(20 * PATIENCE)
        ended.set()

    with pytest.raises(Stopped, match="SIGTERM"), stoppable() as signals:
        signals.wait_for(work)
    assert not ended.is_set(), "no request waits for it"
    told.set()
    assert ended.wait(20 * PATIENCE), "it has gone on as if nothing had come"


def test_signal_that_comes_while_the_thread_is_started_lets_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside of `Thread.start` would let the new thread die with a traceback."""
    start, died = threading.Thread.start, list[object]()

    def slow(thread: threading.Thread) -> None:
        stop_me()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    monkeypatch.setattr(threading, "excepthook", died.append)
    worked = threading.Event()
    with pytest.raises(Stopped), stoppable() as signals:
        signals.wait_for(worked.set)
    assert worked.wait(20 * PATIENCE)
    assert not died


def test_what_the_work_comes_to_or_raises_is_that_of_the_wait() -> None:
    signals = Signals()
    assert signals.wait_for(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        signals.wait_for(lambda: 1 // 0)
