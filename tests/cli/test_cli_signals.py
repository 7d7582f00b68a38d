"""What a command makes of the signals that whoever started it has left to it."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.hooks.inside import run_inside


def test_ends_of_programs_are_heard_where_they_were_ignored() -> None:
    """Else every program that we start would seem to have ended well."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_inside("checks", "--help").code == 0
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_stopped_while_it_is_loaded_it_shows_no_traceback() -> None:
    program = """
import sys
class Stopped:
    def find_spec(self, name, *_):
        if name == "healthd.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stopped())
sys.argv = ["healthd", "fleet", "status"]
from healthd.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nhealthd: stopped\n")
