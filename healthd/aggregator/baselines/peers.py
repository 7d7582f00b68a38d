"""
What each device of the fleet measured last, compactly, and the search for stragglers among them.

A straggler is found in one run and named by the next: idle nodes measure themselves every hour, alone, so that a
second opinion comes by itself.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from healthd.aggregator.baselines import stragglers
from healthd.aggregator.baselines.stragglers import Suspect
from healthd.baselines.model import Kind, Sample

MOST_VALUES = 4_000_000
"""Numbers kept, 8 bytes each and a little more: twenty thousand nodes with sixteen devices and a dozen of numbers."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One measurement on all devices of a node: `values` in the order of `targets`, which many nodes share."""

    began: float
    targets: tuple[str, ...]
    values: array[float]


class Peers:
    """On the event loop alone, but for the arithmetic of `search`."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Kind, str], dict[str, _Run]] = {}
        self._targets: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._values = 0
        self._found: tuple[Suspect, ...] = ()
        self.compared = 0
        """How many nodes the last search has compared with others."""
        self._told: set[tuple[str, str, str]] = set()

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """As of the last search: confirmed ones first."""
        return self._found

    def take_in(self, kind: Kind, node: str, found: Sequence[tuple[str, float, Sample]]) -> None:
        """What a node has measured last, by name and when the run began; nothing: what is known of it stays."""
        by_name: dict[str, tuple[float, dict[str, float]]] = {}
        for name, began, sample in found:
            by_name.setdefault(name, (began, {}))[1][sample.target] = sample.value
        if by_name:
            self.forget(node, other_than=kind)
        for name, (began, values) in by_name.items():
            runs = self._runs.setdefault((kind, sys.intern(name)), {})
            if self._values + len(values) > MOST_VALUES and node not in runs:
                continue
            old = runs.get(node)
            targets = tuple(values)
            run = _Run(began, self._targets.setdefault(targets, targets), array("d", values.values()))
            self._values += len(run.values) - (len(old.values) if old is not None else 0)
            runs[node] = run

    def forget(self, node: str, *, other_than: Kind | None = None) -> None:
        """Drop what a node measured, or what it measured while it was a machine of another kind."""
        for (kind, _), runs in self._runs.items():
            if kind != other_than and node in runs:
                self._values -= len(runs.pop(node).values)

    async def search(self) -> tuple[Suspect, ...]:
        """
        Look for stragglers now. Returns those that were confirmed and not told yet; `told` says that they were.

        Sorting a million values takes a second, so it is done beside the loop.
        """
        samples = [
            stragglers.Sample(peers=str(kind), name=name, node=node, target=target, value=value, run=f"{run.began:.3f}")
            for (kind, name), runs in self._runs.items()
            if len(runs) > 1
            for node, run in runs.items()
            for target, value in zip(run.targets, run.values, strict=True)
        ]
        self._found, self.compared = await asyncio.to_thread(_search, samples, self._found)
        keys = {one.key for one in self._found if one.confirmed}
        self._told &= keys
        return tuple(one for one in self._found if one.confirmed and one.key not in self._told)

    def told(self, suspects: Sequence[Suspect]) -> None:
        """These need not be told again as long as they stay."""
        self._told.update(one.key for one in suspects)


def _search(samples: Sequence[stragglers.Sample], before: Sequence[Suspect]) -> tuple[tuple[Suspect, ...], int]:
    """Who is out of line, and how many nodes were compared."""
    groups = stragglers.compared(samples)
    return stragglers.find(groups, before), len({sample.node for group in groups for sample in group})
