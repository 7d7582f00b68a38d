"""Host files of launchers: nodes, one a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from checks.printable import printable_line
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, OutputError, words_of

MAX_BYTES = 64 << 20
"""100,000 nodes with names of 20 characters, and a line for each of 32 slots."""

_SLOTS = re.compile(r"^([^:]+):\d+$")  # a name and how many ranks it takes; an IPv6 address has more colons


def read_hostfile(file: Path | None) -> tuple[str, ...]:
    """
    Names of nodes, one a line; what follows the name (`n1 slots=8`, `n1:8`) and comments are left out.

    A name that comes again is the same node once more: some schedulers write a line for each slot.
    """
    if file is None:
        return ()
    try:
        lines = read_file(file, MAX_BYTES).decode().splitlines()
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the host file cannot be read: {words_of(error)}") from None
    words = (line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip())
    names = tuple(dict.fromkeys(_SLOTS.sub(r"\1", word) for word in words))
    if not names:
        raise ConfigError(f"{file}: the host file names no node; write one name a line")
    return names


def write_hostfile(file: Path, names: Iterable[str]) -> None:
    """Write the nodes of a job. OutputError where that cannot be done: then the job must not start."""
    try:
        file.write_text("".join(f"{printable_line(name)}\n" for name in names), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot write the host file: {words_of(error)}") from None
