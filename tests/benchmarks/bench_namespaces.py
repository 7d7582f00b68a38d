"""
From fault to named culprit: six daemons in network namespaces, one of which spoils values, and a gate over all six.

Everything a real fleet would do in that time counts: the ranks' start, the whole, two rounds of pairs, the rest
together, the leases. Needs root.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Bench, Figure, Reading, Scale, spread
from tests.netns.fleet import Fleet

ROUNDS = 3
CULPRIT, FAULT = "n2", "all_reduce@rank:1=corrupt"

NAMED = Figure(name="culprit_named", what="from fault to named culprit, 6 nodes", unit="seconds", upper=20.0)


def named(scale: Scale) -> Iterator[Reading]:
    """The median over some gates, each a validation of its own."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        nodes = scale.of(6, 3)
        fleet = Fleet(Path(folder), nodes, collective_join="4s", collective_timeout="5s")
        try:
            fleet.fault(CULPRIT, FAULT)
            for _ in range(scale.of(ROUNDS, 1)):
                decided = fleet.decide(min_nodes=nodes - 1)
                if set(decided.excluded) != {CULPRIT} or decided.blamed != {CULPRIT}:
                    raise RuntimeError(f"not {CULPRIT} alone was named: {decided}")
                seconds.append(decided.seconds)
        finally:
            fleet.close()
    note = f"wrong values, job admitted on the other {nodes - 1}; {spread(NAMED, seconds)}"
    yield Reading(figure=NAMED.name, value=statistics.median(seconds), note=note)


BENCHES = (Bench(name="namespaces", figures=(NAMED,), run=named, limit_seconds=120.0, needs_root=True),)
