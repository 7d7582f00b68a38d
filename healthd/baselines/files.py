"""
Baselines as a file, for nodes without an aggregator and for taking them from one fleet to another: JSON or TOML.

Written whole or not at all. What is not understood is an error of one line, never half a file: a limit that was lost
would be a device that nobody judges.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from healthd.baselines.learning import higher_is_better
from healthd.baselines.model import Baseline, Kind, Learned, Series, State
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.config.toml_text import parse_toml
from healthd.core.errors import BadInputError, words_of

FORMAT = 1
MOST_BYTES = 4 << 20
MOST_ENTRIES = 2000
MOST_COUNT = 10**9
MOST_WORD = 512
LAST_TIME = 4e9
"""The year 2096: databases, and whoever shows a time, have their bounds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One baseline in a file; `id` is for people and not read. `by` and the times may be missing."""

    hardware: str
    accelerator: str
    versions: Mapping[str, str]
    name: str
    version: int
    state: State
    median: float
    mad: float
    samples: int
    sources: int
    factor: float = 0.0
    lower: float | None = None
    upper: float | None = None
    outside: int = 0
    learned_at: float = 0.0
    by: str | None = None
    decided_at: float | None = None
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class File:
    """A whole file."""

    format: int
    baseline: tuple[Entry, ...]


def entries_of(series: Iterable[Series], *, candidates: bool = False) -> tuple[Entry, ...]:
    """What goes into a file: what is in force, and with `candidates` also what nobody has agreed to yet."""
    found: list[Entry] = []
    for one in series:
        current = one.in_force if one.in_force is not None and one.in_force.state is not State.REVOKED else None
        both = (current, one.candidate if candidates else None)
        found.extend(_entry(one, baseline) for baseline in both if baseline is not None)
    return tuple(found)


def series_of(entries: Iterable[Entry]) -> tuple[Series, ...]:
    """The other way round; BadInputError for two of the same series and standing, or numbers that make no sense."""
    found: dict[str, Series] = {}
    for entry in entries:
        _check(entry)
        kind = Kind(
            hardware=entry.hardware, accelerator=entry.accelerator, versions=tuple(sorted(entry.versions.items()))
        )
        fresh = Series(kind=kind, name=entry.name)
        series = found.setdefault(fresh.id, fresh)
        baseline = _baseline(entry)
        if entry.state is State.CANDIDATE and series.candidate is None:
            found[fresh.id] = _with(series, series.in_force, baseline)
        elif entry.state is not State.CANDIDATE and series.in_force is None:
            found[fresh.id] = _with(series, baseline, series.candidate)
        else:
            raise BadInputError(f"{entry.name} on {kind} is there twice; remove one")
    return tuple(found.values())


def encode(series: Iterable[Series], *, candidates: bool = False) -> bytes:
    """JSON of a file."""
    return wire.encode(File(format=FORMAT, baseline=entries_of(series, candidates=candidates)))


def decode(body: bytes, *, what: str, toml: bool = False) -> tuple[Series, ...]:
    """What a file holds; BadInputError in one line that begins with `what`."""
    if len(body) > MOST_BYTES:
        raise BadInputError(f"{what}: larger than {MOST_BYTES} bytes; this is no file of baselines")
    if toml:
        try:
            plain: object = parse_toml(body.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInputError(f"{what}: not TOML: {error}") from None
        file = wire.convert(plain, File, what=what)
    else:
        file = wire.decode(body, File, what=what)
    return checked(file, what=what)


def checked(file: File, *, what: str) -> tuple[Series, ...]:
    """What a file says, where all of it makes sense; BadInputError like `decode`."""
    if file.format != FORMAT:
        raise BadInputError(f"{what}: format {file.format} is not known here, {FORMAT} is; use a healthd of its age")
    if len(file.baseline) > MOST_ENTRIES:
        raise BadInputError(f"{what}: {len(file.baseline)} baselines; at most {MOST_ENTRIES} are taken")
    try:
        return series_of(file.baseline)
    except BadInputError as error:
        raise BadInputError(f"{what}: {error}") from None


def read(path: Path) -> tuple[Series, ...]:
    """The file at a path, TOML if it is called so; BadInputError in one line."""
    try:
        body = read_file(path, MOST_BYTES)
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; 'healthd baseline export' writes one") from None
    except (OSError, BadInputError) as error:
        raise BadInputError(f"{path}: cannot be read: {words_of(error)}") from None
    return decode(body, what=str(path), toml=path.suffix == ".toml")


def write(path: Path, series: Iterable[Series], *, candidates: bool = False) -> int:
    """Write the file in one step; how many baselines it has. BadInputError when it cannot be written."""
    entries = entries_of(series, candidates=candidates)
    if len(entries) > MOST_ENTRIES:
        raise BadInputError(f"{path}: {len(entries)} baselines; at most {MOST_ENTRIES} fit, name some")
    if path.suffix == ".toml":
        body = _toml(entries).encode()
    else:
        body = json.dumps(wire.plain(File(format=FORMAT, baseline=entries)), indent=1).encode() + b"\n"
    put(path, body)
    return len(entries)


def put(path: Path, body: bytes) -> None:
    """A whole new file in the place of the old one; BadInputError, and the old one is kept, when that fails."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with new.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be written: {error.strerror}; what was there is kept") from None


def _toml(entries: Iterable[Entry]) -> str:
    """Every string of JSON is one of TOML too, and so is every number that is no infinity."""
    lines = [f"format = {FORMAT}"]
    for entry in entries:
        lines += ["", "[[baseline]]"]
        for key, value in wire.plain(entry).items():
            if isinstance(value, dict):
                pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
                lines.append(f"{key} = {{{pairs}}}")
            elif value is not None:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _check(entry: Entry) -> None:
    """Numbers that types cannot bound: a limit that is not a number would judge nothing, or everything."""
    name = f"{entry.name[:80]!r}"
    better = higher_is_better(entry.name)
    if better is None or len(entry.name) > 250 or not entry.name.isprintable():
        raise BadInputError(f"{name} is no rate and no duration; only these have baselines")
    numbers = (entry.median, entry.mad, entry.factor, entry.learned_at, entry.decided_at or 0.0)
    if not all(math.isfinite(number) for number in numbers) or entry.median <= 0 or entry.mad < 0:
        raise BadInputError(f"{name}: its median must be above 0, and all its numbers finite")
    if entry.lower is not None and (not better or not 0 < entry.lower <= entry.median):
        raise BadInputError(f"{name}: a lower limit of {entry.lower} with a median of {entry.median} makes no sense")
    if entry.upper is not None and (better or not entry.median <= entry.upper < math.inf):
        raise BadInputError(f"{name}: an upper limit of {entry.upper} with a median of {entry.median} makes no sense")
    counts = (entry.version - 1, entry.samples, entry.sources, entry.outside)
    if min(counts) < 0 or max(counts) > MOST_COUNT:
        raise BadInputError(f"{name}: its version and counts cannot be negative, or above {MOST_COUNT}")
    if not all(0 <= at <= LAST_TIME for at in (entry.learned_at, entry.decided_at or 0.0)):
        raise BadInputError(f"{name}: learned_at and decided_at are seconds since the epoch")
    if not entry.hardware or not entry.accelerator or not entry.versions or len(entry.versions) > 16:
        raise BadInputError(f"{name}: hardware, accelerator and versions say whom it is for, and must be there")
    words = (entry.hardware, entry.accelerator, entry.by or "", *entry.versions, *entry.versions.values())
    if not all(word.isprintable() and len(word) <= MOST_WORD for word in words):
        raise BadInputError(f"{name}: its words must be printable, with at most {MOST_WORD} characters each")


def _entry(series: Series, baseline: Baseline) -> Entry:
    learned = baseline.learned
    return Entry(
        id=series.id,
        hardware=series.kind.hardware,
        accelerator=series.kind.accelerator,
        versions=dict(series.kind.versions),
        name=series.name,
        version=baseline.version,
        state=baseline.state,
        median=learned.median,
        mad=learned.mad,
        samples=learned.samples,
        sources=learned.sources,
        factor=learned.factor,
        lower=learned.lower,
        upper=learned.upper,
        outside=learned.outside,
        learned_at=baseline.learned_at,
        by=baseline.by,
        decided_at=baseline.decided_at,
    )


def _baseline(entry: Entry) -> Baseline:
    learned = Learned(
        median=entry.median,
        mad=entry.mad,
        samples=entry.samples,
        sources=entry.sources,
        factor=entry.factor,
        lower=entry.lower,
        upper=entry.upper,
        outside=entry.outside,
    )
    return Baseline(
        version=entry.version,
        state=entry.state,
        learned=learned,
        learned_at=entry.learned_at,
        by=entry.by,
        decided_at=entry.decided_at,
    )


def _with(series: Series, in_force: Baseline | None, candidate: Baseline | None) -> Series:
    return Series(kind=series.kind, name=series.name, in_force=in_force, candidate=candidate)
