"""What the hook makes of a sidecar that ends between its two words. The sidecar is a stand-in that says the first."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from healthd.core import wire
from healthd.core.errors import HealthdError
from healthd.hooks.launchers import Place
from healthd.hooks.preflight.hook import Outcome, run_hook
from healthd.hooks.stopping import Signals

PLACE = Place(job="a", attempt=0, rank=0, size=1, main="127.0.0.1", local_rank=0, local_size=1, source="options")
RUN = Outcome(kind="run", code=0, rank=0, size=1, hosts=("127.0.0.1",))

SIDECAR = """import os, select, sys
word = int(sys.argv[sys.argv.index("--sidecar") + 1].split(":")[0])
os.write(word, os.environ["FIRST_WORD"].encode() + b"\\n")
if os.environ["ENDS"] == "when it is answered":
    select.select([word], [], [])
os.write(word, os.environ["SECOND_WORD"].encode())
"""


def hooked(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: str, second: bytes = b"") -> object:
    """What the hook ends with."""
    interpreter = folder / "python"
    interpreter.write_text(f"#!{sys.executable}\n{SIDECAR}")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("FIRST_WORD", wire.encode(RUN).decode())
    monkeypatch.setenv("SECOND_WORD", second.decode())
    monkeypatch.setenv("ENDS", ends)

    def show(outcome: Outcome) -> None:
        if outcome.kind == "run" and ends == "before it is answered":
            child = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1]
            os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)

    return run_hook(PLACE, ("true",), (), show, Signals())


@pytest.mark.parametrize("ends", ["before it is answered", "when it is answered"])
def test_sidecar_that_ends_between_its_words_is_no_admission(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HealthdError, match="the sidecar of this node exited without a result; not admitted"):
        hooked(tmp_path, monkeypatch, ends)


@pytest.mark.parametrize("ends", ["before it is answered", "when it is answered"])
def test_last_word_of_a_sidecar_that_has_ended_is_heard(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = wire.encode(Outcome(kind="exit", code=1, message="not everybody has confirmed")) + b"\n"
    assert hooked(tmp_path, monkeypatch, ends, last) == 1
