"""What is learned of measurements: samples, what they come to, and how far a person has agreed. Frozen data."""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass

LEAST_SAMPLES = 11
"""Below it nothing is learned: median and deviation of fewer say too little, and absolute floors alone judge."""
LEAST_SOURCES = 3
"""Devices that the samples must come from at least: of two that differ nobody can say which is the normal one."""
WINDOW_DAYS = 28
"""Samples older than that are dropped: four weeks hold every weekly habit of a fleet."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What may be compared: `hardware` (see `checks.learned.hardware_of`) and sorted (name, version) pairs."""

    hardware: str
    accelerator: str
    versions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ", ".join((self.hardware, self.accelerator, *(f"{name} {version}" for name, version in self.versions)))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value of one device (or of `node` as a whole) on one day, counted from the epoch."""

    node: str
    target: str
    day: int
    value: float

    @property
    def rank(self) -> int:
        """A number by chance, the same for ever: those with the smallest are kept where not all can be."""
        import hashlib

        text = f"{self.node}\n{self.target}\n{self.day}".encode(errors="replace")
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class State(str, enum.Enum):
    """
    CANDIDATE judges nothing. APPROVED judges. FROZEN judges and is replaced by nobody but who says so. REVOKED was in
    force and judges no more.
    """

    CANDIDATE = "candidate"
    APPROVED = "approved"
    FROZEN = "frozen"
    REVOKED = "revoked"


@dataclass(frozen=True, kw_only=True)
class Learned:
    """
    What samples came to. `mad` is the median of the absolute deviations from the median, `factor` how many standard
    deviations the limit is away at least; `outside` counts samples that the limit itself would have failed.

    Both limits None: the samples differ by so much that no limit can be drawn.
    """

    median: float
    mad: float
    samples: int
    sources: int
    factor: float
    lower: float | None
    upper: float | None
    outside: int


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`version` counts the approved ones of a series; `by` and `decided_at` are who made it what it is, and when."""

    version: int
    state: State
    learned: Learned
    learned_at: float
    by: str | None = None
    decided_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """
    One measurement of one kind of machine. `name` is that of its limits (`matmul_flops_per_second/bf16`).

    `in_force` is the last one that a person agreed to, `candidate` what newer samples would make of it. `drift` is how
    far the recent median is from the approved one (0.07: 7 % higher); None where it is not, or nobody can tell.
    """

    kind: Kind
    name: str
    in_force: Baseline | None = None
    candidate: Baseline | None = None
    drift: float | None = None
    heard_day: int = 0

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits: people type them."""
        return series_id(self.kind, self.name)


@functools.lru_cache(maxsize=8192)
def series_id(kind: Kind, name: str) -> str:
    """What stands for a series."""
    import hashlib

    parts = (kind.hardware, kind.accelerator, *(f"{n}={v}" for n, v in kind.versions), name)
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:12]


def imported(old: Series, new: Series, by: str, now: float) -> Series:
    """A series with what a file says of it; its version goes on from the one that is here."""
    in_force = new.in_force
    if in_force is not None:
        version = max(in_force.version, 0 if old.in_force is None else old.in_force.version + 1)
        in_force = dataclasses.replace(in_force, version=version, by=f"{by} (import)", decided_at=now)
    return dataclasses.replace(
        old, in_force=in_force or old.in_force, candidate=new.candidate or old.candidate, drift=None
    )
