"""
A machine's readings as a directory that `--host-root` replays: for a bug report, a test, a look from elsewhere.

`sources` lists what is recorded, and what must not be. Vendors' tools become small programs that print again what they
printed. Everything is bounded in size, number and time; what was left out is said.
"""

from __future__ import annotations

import os
from pathlib import Path

from checks.host.machine import Host
from healthd.core.errors import BadInputError
from healthd.record.copying import Copier, Recording
from healthd.record.machine import record_machine


def record(host: Host, directory: Path, *, tools: bool = True) -> Recording:
    """
    Record the machine into a directory that is not there yet, or empty. `tools` False starts no program.

    A new directory is for its owner alone: what is recorded may be readable by root alone. Raises BadInputError where
    the directory holds something, is another user's or cannot be written. What cannot be read is left out, and
    said in `recording.json`.
    """
    copier = Copier(host, directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise BadInputError(f"{directory}: belongs to another user; name a directory that is not there yet")
        if any(directory.iterdir()):
            raise BadInputError(f"{directory}: is not empty; name a directory that is not there yet")
        record_machine(copier, tools=tools)
    except OSError as error:
        place = error.filename or directory
        text = f"{place}: {error.strerror or error}; name a directory that can be written to, with room"
        raise BadInputError(text) from None
    return copier.made
