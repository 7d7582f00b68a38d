"""
Who am I among how many: what the launcher of a job tells each of its processes.

One file a launcher, each with `find(environ) -> Place | None`. What was found, and from what, is said.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.errors import ConfigError

NAMES = ("torchrun",)


@dataclass(frozen=True, kw_only=True)
class Place:
    """
    The place of this process in its job.

    `rank` and `size` count nodes, not processes; `local_rank` and `local_size` the processes of this node: only local
    rank 0 probes. `main` is the host of rank 0. `source` says where this was read.
    """

    job: str | None
    attempt: int
    rank: int
    size: int
    main: str
    local_rank: int
    local_size: int
    source: str


def find_place(environ: Mapping[str, str]) -> Place | None:
    """What the first launcher that knows its own variables says; None when there is none."""
    for name in NAMES:
        place: Place | None = importlib.import_module(f"{__name__}.{name}").find(environ)
        if place is not None:
            return place
    return None


def number(environ: Mapping[str, str], name: str) -> int:
    """A whole number that is not negative, out of a variable; ConfigError names it."""
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"environment: {name}={text!r} is not a number; is this really the launcher's environment?")
    return int(text)
