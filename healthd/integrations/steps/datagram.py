"""The datagram by which a rank reports one step: one line of text, so that any program can write it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = b"step1"
END_PREFIX = b"end1"
MAX_BYTES = 512
MAX_JOB_CHARACTERS = 128
MAX_RANKS = 1 << 20
_MAX_STEP = 1 << 62
_MAX_SECONDS = 86400.0
_LEAST_WORK, _MOST_WORK = 1e-6, 1e15


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank. `work` None: not told."""

    job: str
    rank: int
    size: int
    step: int
    own_seconds: float
    wait_seconds: float
    work: float | None


@dataclass(frozen=True, slots=True)
class RankEnd:
    """A rank reports no more steps."""

    job: str
    rank: int


def parse_end(data: bytes) -> RankEnd | None:
    """The end of a rank's reports in a datagram; None for anything else."""
    words = data.split() if len(data) <= MAX_BYTES else []
    if len(words) != 3 or words[0] != END_PREFIX:
        return None
    try:
        job, rank = words[1].decode("ascii"), int(words[2])
    except ValueError:
        return None
    return RankEnd(job, rank) if 0 <= rank < MAX_RANKS else None


def parse(data: bytes) -> StepReport | None:
    """The report in a datagram; None for anything else, since any process of the host may write there."""
    words = data.split() if len(data) <= MAX_BYTES else []
    if len(words) not in (7, 8) or words[0] != PREFIX:
        return None
    try:
        job = words[1].decode("ascii")
        rank, size, step = (int(word) for word in words[2:5])
        own, wait = float(words[5]), float(words[6])
        work = float(words[7]) if len(words) == 8 else None
    except ValueError:
        return None
    if not job.isprintable() or len(job) > MAX_JOB_CHARACTERS:
        return None
    if not (0 <= rank < size <= MAX_RANKS and 0 <= step < _MAX_STEP):
        return None
    if not (0 <= own <= _MAX_SECONDS and 0 <= wait <= _MAX_SECONDS):  # also catches NaN
        return None
    if work is not None and not _LEAST_WORK <= work <= _MOST_WORK:  # also catches NaN
        return None
    return StepReport(job, rank, size, step, own, wait, work)
