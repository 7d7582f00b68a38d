"""
Counters from one look to the next: what rose, what was set back, what an hour brought. Pure.

A counter of the Neuron driver counts from its load; writing to it, or loading the driver again, sets it back to 0.
Between two looks the difference counts; where a value went down, or is another one after the device's directory was
made anew, it has been set back and counts from 0. The same value then is no rise where it counts memory errors
(`_ecc_`), whose registers outlive the driver; the driver's own counters begin at 0 again, so these are new errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

WINDOW_SECONDS = 3600.0

Counts = dict[str, dict[str, int]]  # target -> name -> count; what is 0 may be left out


@dataclass
class History:
    """
    What is carried from look to look.

    `counts` and `inodes` are those of the last look. `rises` are of the window that runs since `seconds`, `before` of
    the one before it, so that what rose within the last hour is in one of the two. `wiped` is what counters held that
    were set back: a reading of 0 does not mean that nothing was.
    """

    counts: Counts = field(default_factory=dict)
    inodes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    rises: Counts = field(default_factory=dict)
    before_seconds: float = 0.0
    before: Counts = field(default_factory=dict)
    wiped: Counts = field(default_factory=dict)

    def recent(self, target: str, name: str) -> int:
        """By how much a counter rose within the last one to two hours, as far as it was looked at."""
        return self.rises.get(target, {}).get(name, 0) + self.before.get(target, {}).get(name, 0)

    def recent_per_hour(self, target: str, name: str) -> float:
        """The same by hour; of less than an hour it is what there was so far, so that a second look is no rate."""
        return self.recent(target, name) / max(1.0, (self.seconds + self.before_seconds) / WINDOW_SECONDS)

    def as_data(self) -> dict[str, Any]:
        """JSON values for the evidence."""
        return {
            "counts": self.counts,
            "inodes": self.inodes,
            "seconds": self.seconds,
            "rises": self.rises,
            "before_seconds": self.before_seconds,
            "before": self.before,
            "wiped": self.wiped,
        }


def next_history(
    data: Mapping[str, Any] | None, elapsed_seconds: float, counts: Counts, inodes: Mapping[str, int]
) -> History:
    """
    The history after a look that read `counts`; `data` is that of the last look (None: there was none in this boot).

    A target that was not seen last time has nothing to be compared with, and neither has a first look.
    """
    if data is None:
        return History(counts=_nonzero(counts), inodes=dict(inodes))
    # What another version of this check has left may have other members.
    last = History(**{one.name: data[one.name] for one in fields(History) if one.name in data})
    rises = {target: dict(names) for target, names in last.rises.items()}
    wiped = {target: dict(names) for target, names in last.wiped.items()}
    for target, names in counts.items():
        if target not in last.inodes:
            continue
        anew = last.inodes[target] != inodes.get(target, last.inodes[target])
        for name, count in names.items():
            held = last.counts.get(target, {}).get(name, 0)
            back = count < held or (anew and (count != held or "_ecc_" not in name))
            if back and held:
                _add(wiped, target, name, held)
            if count > (0 if back else held):
                _add(rises, target, name, count - (0 if back else held))
    history = History(
        # What could not be read this time keeps what it had.
        counts=_nonzero({**last.counts, **{t: {**last.counts.get(t, {}), **n} for t, n in counts.items()}}),
        inodes={**last.inodes, **inodes},
        seconds=last.seconds + elapsed_seconds,
        rises=rises,
        before_seconds=last.before_seconds,
        before=last.before,
        wiped=wiped,
    )
    if history.seconds >= WINDOW_SECONDS:
        history.before, history.before_seconds = history.rises, history.seconds
        history.rises, history.seconds = {}, 0.0
    return history


def _add(counts: Counts, target: str, name: str, count: int) -> None:
    names = counts.setdefault(target, {})
    names[name] = names.get(name, 0) + count


def _nonzero(counts: Counts) -> Counts:
    kept = {target: {name: count for name, count in names.items() if count} for target, names in counts.items()}
    return {target: names for target, names in kept.items() if names}
