"""
Learns for how long the ranks of a collective may be silent, from the runs that went well on this machine.

A collective reports its progress. What shows a hang is not how long the collective takes but how long no rank reports
anything, and a machine that has run the collective knows how long that normally is. The rules, which
docs/operations.md explains:

- Nothing learned: the check's own time limit alone. It stays the upper bound of everything.
- Learned: `FACTOR` times the longest silence of the last `KEPT_RUNS` good runs, and never less than the setting
  `silence_floor_seconds`.
- Another boot, driver, library version or kind of hardware: nothing is learned yet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.json_text import parse_json
from healthd.runner.settings import SILENCE_FLOOR_SECONDS

log = logging.getLogger(__name__)

FACTOR = 10.0
"""Ten times what was ever seen: throttled clocks and a slow disk under the same boot cost less than that."""
KEPT_RUNS = 20
"""So many good runs of each collective count."""
MAX_BYTES = 64 * 1024
MAX_COLLECTIVES = 64


class SilenceLimits:
    """
    The longest silences of good runs, by collective, in one file.

    `file` None, a file that cannot be read and one about another `identity` mean that nothing is learned yet. A file
    that cannot be written is no error, since the time limit of the check holds anyway.
    """

    def __init__(
        self, file: Path | None, identity: Mapping[str, Any], *, floor_seconds: float = SILENCE_FLOOR_SECONDS
    ) -> None:
        self._file = file
        self._floor_seconds = floor_seconds
        self._identity = parse_json(json.dumps(identity))
        self._silences = self._read()

    def silence_seconds(self, collective: str) -> float | None:
        """How long its ranks may be silent before they count as hung; None where that is not known."""
        known = self._silences.get(collective)
        return max(self._floor_seconds, FACTOR * max(known)) if known else None

    def learn(self, collective: str, silence_seconds: float) -> None:
        """Record the longest silence of a run that went well."""
        if not 0.0 <= silence_seconds < math.inf:
            return
        known = [*self._silences.get(collective, []), round(silence_seconds, 6)][-KEPT_RUNS:]
        others = {name: seconds for name, seconds in self._silences.items() if name != collective}
        while len(others) >= MAX_COLLECTIVES:
            del others[next(iter(others))]
        self._silences = {**others, collective: known}
        self._write()

    def _read(self) -> dict[str, list[float]]:
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as stream:
                content = parse_json(stream.read(MAX_BYTES))
            if content["identity"] != self._identity:
                return {}
            return {str(name): _seconds(values) for name, values in content["silences"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.info("%s: not used, the time limits of the checks hold: %s", self._file, error)
            return {}

    def _write(self) -> None:
        if self._file is None:
            return
        content = json.dumps({"identity": self._identity, "silences": self._silences})
        new = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(content, encoding="utf-8")
            new.replace(self._file)
        except OSError as error:
            log.info("%s: not written, the time limits of the checks hold: %s", self._file, error)
            with contextlib.suppress(OSError):
                new.unlink()


def _seconds(values: Sequence[Any]) -> list[float]:
    seconds = [float(value) for value in values[-KEPT_RUNS:]]
    if not all(0.0 <= value < math.inf for value in seconds):
        raise ValueError("a silence is no number of seconds")
    return seconds


def longest_silence(moments: Sequence[float]) -> float:
    """The longest time between two moments (monotonic) at which any rank reported something."""
    ordered = sorted(moments)
    return max((later - earlier for earlier, later in itertools.pairwise(ordered)), default=0.0)


class Silence:
    """
    How long the ranks of one collective have been silent, less the time for which they waited for a processor.

    `limit_seconds` None: there is no limit. A rank that was ready to run and did not get a processor is slow because of
    other processes: on an overloaded machine the clock of the silence stands still.
    """

    def __init__(self, limit_seconds: float | None, began: float) -> None:
        self.limit_seconds = limit_seconds
        self._reported_at = began
        self._waited: dict[int, float] | None = None

    def left_seconds(self, now: float, reported_at: float, waited: Mapping[int, float]) -> float:
        """
        How long they may still be silent; infinite without a limit.

        `reported_at` is when a rank last reported something; `waited` the seconds for which each of their threads, by
        its id, has waited for a processor since it started.
        """
        if self.limit_seconds is None:
            return math.inf
        if self._waited is None or reported_at > self._reported_at:
            self._reported_at, self._waited = max(reported_at, self._reported_at), dict(waited)
        before = self._waited
        starved = max((seconds - before.get(thread, 0.0) for thread, seconds in waited.items()), default=0.0)
        return self.limit_seconds - max(0.0, now - self._reported_at - starved)


def waited_seconds(pids: Iterable[int]) -> dict[int, float]:
    """How long each thread of these processes has waited for a processor (schedstat); empty where it is not known."""
    found: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    words = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                    found[int(thread)] = int(words[1]) / 1e9
    return found
