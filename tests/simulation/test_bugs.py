"""The simulation finds bugs: each that is planted breaks a promise within a bounded number of schedules."""

from __future__ import annotations

import pytest

from healthd.aggregator.engine.engine import Engine
from tests.every import every
from tests.profile import some
from tests.simulation import bugs
from tests.simulation.plan import drawn
from tests.simulation.world import simulate


@every("bug", some(bugs.BUGS, 4))
def test_planted_bug_is_found(bug: bugs.Bug) -> None:
    with bug.planted():
        found = next(
            filter(None, (simulate(drawn(seed, aggregators=bug.aggregators)).broken for seed in bug.seeds)), ""
        )
    assert found, f"no schedule of {bug.seeds} breaks a promise"


def test_bug_whose_function_has_changed_is_an_error() -> None:
    gone = bugs.Edit(Engine, "_on_report", "self._wake.clear()", "pass")
    missing = bugs.Edit(Engine, "_on_rumour", "self._wake.set()", "pass")
    for edit in (gone, missing):
        with pytest.raises(bugs.StaleBugError), edit.planted():
            pass
