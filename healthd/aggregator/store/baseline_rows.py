"""Baselines in the database: a row for each series, with the samples that it is learned from."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from healthd.aggregator.store.changes import PutEvent
from healthd.aggregator.store.rows import apply_changes, upsert
from healthd.aggregator.store.tables import BASELINES
from healthd.baselines.model import Sample, Series
from healthd.core import wire
from healthd.core.errors import BadInputError

_Samples = tuple[tuple[str, str, int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A series as it is on disk."""

    series: Series
    samples: tuple[Sample, ...]


def read(connection: Connection) -> tuple[Kept, ...]:
    """All of them; BadInputError when a record is not of our making."""
    found = []
    for row in connection.execute(select(BASELINES).order_by(BASELINES.c.id)):
        what = f"baseline {row.id}"
        series = wire.decode(row.record.encode(), Series, what=what)
        try:
            plain = zlib.decompress(row.samples)
        except zlib.error as error:
            raise BadInputError(f"samples of {what}: {error}") from None
        samples = wire.decode(plain, _Samples, what=f"samples of {what}")
        kept = tuple(Sample(node=node, target=target, day=day, value=value) for node, target, day, value in samples)
        found.append(Kept(series=series, samples=kept))
    return tuple(found)


def write(connection: Connection, kept: Sequence[Kept], events: Sequence[PutEvent], gone: Sequence[str]) -> None:
    """These as they are now, without those that are `gone`, and what is to be remembered of it. Safe to repeat."""
    if gone:
        connection.execute(delete(BASELINES).where(BASELINES.c.id.in_(gone)))
    rows = [
        {
            "id": one.series.id,
            "record": wire.encode(one.series).decode(),
            "samples": zlib.compress(wire.encode([(s.node, s.target, s.day, s.value) for s in one.samples]), 1),
        }
        for one in kept
    ]
    upsert(connection, BASELINES, rows)
    apply_changes(connection, events)
