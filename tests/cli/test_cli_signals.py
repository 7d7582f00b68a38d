"""What a command makes of the signals that whoever started it has left to it."""

from __future__ import annotations

import signal

from tests.hooks.inside import run_inside


def test_ends_of_programs_are_heard_where_they_were_ignored() -> None:
    """Else every program that we start would seem to have ended well."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_inside("checks", "--help").code == 0
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)
