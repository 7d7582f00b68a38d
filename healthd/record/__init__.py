"""
A machine's readings as a directory that `--host-root` replays: for a bug report, a test, a look from elsewhere.

`sources` lists what is recorded, and what must not be. Vendors' tools become small programs that print again what they
printed. Everything is bounded in size, number and time; what was left out is said.
"""

from __future__ import annotations

from pathlib import Path

from checks.host.machine import Host
from healthd.core.errors import BadInputError
from healthd.record.copying import Copier, Recording
from healthd.record.machine import record_machine


def record(host: Host, directory: Path, *, tools: bool = True) -> Recording:
    """
    Record the machine into a directory that is not there yet, or empty. `tools` False starts no program.

    Raises BadInputError where the directory holds something or cannot be written. What cannot be read is left out, and
    said in `recording.json`.
    """
    copier = Copier(host, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise BadInputError(f"{directory}: is not empty; name a directory that is not there yet")
        record_machine(copier, tools=tools)
    except OSError as error:
        place = error.filename or directory
        text = f"{place}: {error.strerror or error}; name a directory that can be written to, with room"
        raise BadInputError(text) from None
    return copier.made
