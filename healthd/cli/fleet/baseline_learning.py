"""`healthd baseline` without an aggregator: a book of baselines out of files, learned and decided here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from healthd.baselines import sampling
from healthd.baselines.book import Book, due
from healthd.baselines.model import LEAST_SAMPLES, LEAST_SOURCES, Series, State
from healthd.cli.fleet.line import own_name
from healthd.cli.settings.tree import Settings
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError
from healthd.core.model import NodeState

# A node's state is some 100 kB, a page of them some more.
MOST_BYTES = 64 << 20


def book_of(series: Sequence[Series], settings: Settings | None = None) -> Book:
    """A book of these series; without settings it is for looking things up alone."""
    book = Book(None if settings is None else settings.baseline.rule)
    for one in series:
        book.put(one)
    return book


def learned_of(states: Sequence[Path], known: Sequence[Series], settings: Settings) -> tuple[Book, list[str]]:
    """What the files teach, and which nodes were left out and why."""
    book = book_of(known, settings)
    left_out, newest = [], 0.0
    for path in states:
        for state in _states(path):
            # The node's own clock says when it was: a file may be old, and days tell samples apart.
            newest = max(newest, state.observed_at)
            free = dataclasses.replace(state, quarantine=None)
            why, kind = sampling.why_not(free), sampling.kind_of(free)
            if why is not None or kind is None:
                left_out.append(f"{path}: {state.node}: {why}")
                continue
            for name, _, sample in sampling.samples_of(free, now=state.observed_at):
                book.add(kind, name, sample)
    book.learn(now=newest or time.time(), automatic=False)
    return book, left_out


def _states(path: Path) -> tuple[NodeState, ...]:
    """The states in a file: one, or a list."""
    try:
        body = read_file(path, MOST_BYTES)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}; 'healthd check --json' writes less") from None
    if body.lstrip()[:1] == b"[":
        return wire.decode(body, tuple[NodeState, ...], what=str(path))
    return (wire.decode(body, NodeState, what=str(path)),)


def too_few(book: Book, left_out: Sequence[str]) -> str:
    """Why nothing could be learned."""
    most = max((len(book.samples(one.id)) for one in book.all()), default=0)
    text = f"at most {most} samples of a measurement, {LEAST_SAMPLES} from {LEAST_SOURCES} devices are needed"
    return f"{text}; left out: {left_out[0]}" if left_out else text


def decide(book: Book, names: Sequence[str], state: str) -> tuple[Series, ...]:
    """Decide on the series that are named, or on all that wait for it; BadInputError where there is none."""
    wanted = State(state)
    found = book.find(names) if names else tuple(one for one in book.all() if due(one, wanted))
    if not found:
        raise BadInputError(f"there is nothing that could be {state}; 'healthd baseline show' lists all")
    return book.decide([one.id for one in found], wanted, by=own_name(), now=time.time())
