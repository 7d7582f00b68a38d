"""
From fault to named culprit: six daemons in network namespaces, one of which spoils values, and a gate over all six.

Everything a real fleet would do in that time counts: the ranks' start, the whole, two rounds of pairs, the rest
together, the leases. Needs root.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Bench, Figure, Reading, spread
from tests.netns.fleet import Fleet

ROUNDS = 3
CULPRIT, FAULT = "n4", "all_reduce@rank:3=corrupt"

NAMED = Figure(name="culprit_named", what="from fault to named culprit, 6 nodes", unit="seconds", upper=20.0)


def named() -> Iterator[Reading]:
    """The median over some gates, each a validation of its own."""
    if os.geteuid() != 0:
        yield Reading(figure=NAMED.name, value=None, note="network namespaces need root")
        return
    seconds = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        fleet = Fleet(Path(folder), 6, collective_join="4s", collective_timeout="5s")
        try:
            fleet.fault(CULPRIT, FAULT)
            for _ in range(ROUNDS):
                decided = fleet.decide(min_nodes=5)
                if set(decided.excluded) != {CULPRIT} or decided.blamed != {CULPRIT}:
                    raise RuntimeError(f"not {CULPRIT} alone was named: {decided}")
                seconds.append(decided.seconds)
        finally:
            fleet.close()
    note = f"wrong values, job admitted on the other five; {spread(NAMED, seconds)}"
    yield Reading(figure=NAMED.name, value=statistics.median(seconds), note=note)


BENCHES = (Bench(name="namespaces", figures=(NAMED,), run=named, limit_seconds=120.0),)
