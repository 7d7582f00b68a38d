"""`healthd demo` as it looks on a terminal; what it shows is tested in tests/aggregator/test_main_job.py."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

from tests.aggregator.service import free_port
from tests.patience import PATIENCE

# One command of the demonstration, with a spinner of two seconds: nobody listens there.
ONE_COMMAND = """
import pathlib, sys
from healthd.cli.demo import Stage
with Stage(pathlib.Path(sys.argv[1])) as stage:
    stage.healthd("gate", "--aggregator", sys.argv[2], "--job", "j", "--node", "n1", "--wait", "2s", expect=75)
"""


def test_on_a_terminal_a_command_leaves_its_answer_and_no_frames_of_its_spinner(tmp_path: os.PathLike[str]) -> None:
    ours, theirs = pty.openpty()
    url = f"http://127.0.0.1:{free_port()}"
    line = [sys.executable, "-c", ONE_COMMAND, str(tmp_path), url]
    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as demo:
        os.close(theirs)
        said = _read(ours, seconds=30.0 * PATIENCE)
        assert demo.wait(10 * PATIENCE) == 0, said
    text = said.decode()
    assert "not admitted" in text
    assert "exit code 75" in text
    assert text.count("\n") < 12, text


def _read(terminal: int, *, seconds: float) -> bytes:
    """All that comes until the other side is closed."""
    said, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                said += os.read(terminal, 65536)
            except OSError:  # what Linux says of a terminal that nobody has open any more
                break
    os.close(terminal)
    return said
